"""Checkpoints the layers of a model, and undoes it. Knows modules and when to decide, not how the
decision is made nor how a layer is replayed."""

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch.nn import Module

from holdfast import _checks
from holdfast.activation._keeping.manager import CheckpointManager
from holdfast.activation._layers.available import available_bytes
from holdfast.activation._layers.candidates import named, part_of, repeated
from holdfast.activation._layers.config import CheckpointConfig, CheckpointStrategy
from holdfast.activation._layers.layer_forward import (
    Arguments,
    Forward,
    checkpointed,
    install,
    installed,
    remove,
)
from holdfast.activation._layers.layer_report import LayerRow, table
from holdfast.activation._layers.learning import Learning
from holdfast.activation._layers.strategies import (
    LayerCost,
    choose_by_cost,
    choose_by_name,
    missing_bytes,
)

_log = logging.getLogger("holdfast.activation")


def checkpoint_layers(
    model: Any, config: CheckpointConfig | None = None, *, manager: CheckpointManager | None = None
) -> "CheckpointedLayers":
    """Checkpoint layers of ``model`` from now on, until the handle that is returned undoes it.

    ``config`` says which; by default every repeated layer. ``manager`` replays them and counts, by
    the layers' names; it is not closed. A name stands for one layer to it, so give models with the
    same names managers of their own. Without one the layers have one to themselves.

    The model's parameters, buffers, ``state_dict`` and modules stay as they are. A layer's own
    hooks run once, around it; those of modules inside it run again in a replay. In eval mode or
    without gradients the layers run as they are. A copy of the model goes on as the model did when
    it was copied, without handle or manager, until ``checkpoint_layers`` is called on it.

    With a strategy that learns, every candidate is checkpointed in the first forward, so that
    nothing runs out of memory, and the choice is made at the first forward after a backward. Later
    shapes do not change it; ``relearn`` does. A layer that was not called then stays checkpointed,
    and so do all under ``torch.compile``, which measures nothing. Every rank chooses for itself:
    where a layer's forward calls collectives, as with tensor parallelism, name the layers instead,
    or ranks that replay different ones wait for each other for ever.

    Raises ``ValueError``, with the model unchanged, if it has no candidates, a pattern names
    nothing, layers of it are checkpointed already, or the strategy is ``memory_aware`` and the
    device does not tell its memory.
    """
    _checks.instance("model", model, Module)
    config = CheckpointConfig() if config is None else config
    _checks.instance("config", config, CheckpointConfig)
    if manager is not None:
        _checks.instance("manager", manager, CheckpointManager)
    refuse_taken(model)
    whole = part_of(model)
    parts = repeated(whole) if config.layers is None else named(whole, config.layers)
    candidates = {part.name: model.get_submodule(part.name) for part in parts}
    if config.strategy is CheckpointStrategy.MEMORY_AWARE:
        _require_memory(candidates)
    manager = CheckpointManager() if manager is None else manager
    layers = CheckpointedLayers(config, candidates, manager)
    for module in model.modules():
        remove(module, None)  # what a copy of a checkpointed model brought along
    for name in layers.layers:
        install(candidates[name], name, layers)
    return layers


class CheckpointedLayers:
    """The checkpointed layers of a model: what ``checkpoint_layers`` returns. Thread-safe.

    The layers keep it alive, it does not keep the model alive. As a context manager it undoes
    itself at the end.
    """

    __slots__ = (
        "__weakref__",
        "_chosen",
        "_config",
        "_costs",
        "_learning",
        "_lock",
        "_manager",
        "_modules",
        "_stop_learning",
        "_undone",
    )

    def __init__(
        self, config: CheckpointConfig, candidates: Mapping[str, Any], manager: CheckpointManager
    ) -> None:
        self._config = config
        self._manager = manager
        self._modules = {name: weakref.ref(module) for name, module in candidates.items()}
        self._lock = threading.Lock()
        self._undone = False
        self._costs: dict[str, LayerCost] = {}
        self._chosen = choose_by_name(config, tuple(candidates))
        self._learning: Learning | None = Learning()
        self._stop_learning = self._listen(self._learning)

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers that are checkpointed now, in the order of the model."""
        chosen = self._chosen
        return tuple(name for name in self._modules if name in chosen and not self._undone)

    def report(self) -> str:
        """A table of the candidates: whether their activations are kept or recomputed, the bytes
        that recomputing a layer drops in a forward, as far as measured, and how often and how long
        it was replayed. ``ClosedError`` if the manager is closed."""
        replayed = self._manager.engine.get_stats().layer_stats
        now, costs = set(self.layers), self._costs
        rows = []
        for name in self._modules:
            stats, cost = replayed.get(name), costs.get(name)
            rows.append(
                LayerRow(
                    name=name,
                    recomputed=name in now,
                    dropped_bytes=None if cost is None else cost.dropped_bytes,
                    replays=0 if stats is None else stats.call_count,
                    replay_ms=0.0 if stats is None else stats.total_computation_time_ms,
                )
            )
        return f"{self._state(len(now))}\n{table(rows)}"

    def relearn(self) -> None:
        """Measure the layers again in the next forward, and with a strategy that learns choose
        again after it, as after ``checkpoint_layers``. For when shapes have changed. Not between a
        forward and its backward if the layers are inside another checkpointed region: its replay
        would not do the same."""
        with self._lock:
            if self._undone:
                return
            learning = Learning()
            stop_learning = self._listen(learning)
            self._stop()
            self._stop_learning = stop_learning
            self._chosen = choose_by_name(self._config, tuple(self._modules))
            self._learning = learning

    def undo(self) -> None:
        """Give every layer back the forward it had. A forward that was run before can still run
        its backward. Idempotent."""
        with self._lock:
            self._undone = True
            self._stop()
        for reference in self._modules.values():
            module = reference()
            if module is not None:
                remove(module, self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"<CheckpointedLayers: {self._state(len(self.layers))}>"

    def _call(self, name: str, module: Any, forward: Forward, call: Arguments) -> Any:
        """One call of a layer in training."""
        learning = None if torch.compiler.is_compiling() else self._learning_now()
        # Undone, and still called: somebody wrapped the layer's forward after us.
        if self._undone or name not in self._chosen:
            args, kwargs = call
            return forward(*args, **kwargs)
        if learning is None:
            return checkpointed(name, module, forward, call, self._manager)
        run = functools.partial(checkpointed, name, module, forward, call, self._manager)
        return learning.watch(self._manager, name, run)

    def _recomputes(self, name: str) -> bool:
        return not self._undone and name in self._chosen

    def _learning_now(self) -> Learning | None:
        """What this call is to be counted in. Decides first, if what was learnt is complete."""
        learning = self._learning
        # Inside a backward this is the replay of a region around the layer, which must do what its
        # forward did.
        if learning is None or torch._C._current_graph_task_id() != -1:  # noqa: SLF001 -- torch's own checkpoint asks so
            return None
        if not learning.is_over:
            return learning
        with self._lock:
            if self._learning is learning:
                self._decide(learning)
        return None

    def _decide(self, learning: Learning) -> None:
        devices = {name: _device(reference()) for name, reference in self._modules.items()}
        costs = learning.costs(devices)
        self._costs = {cost.name: cost for cost in costs}
        if self._config.strategy.learns:
            self._choose(costs)
        self._stop()

    def _choose(self, costs: list[LayerCost]) -> None:
        available: dict[str, int] = {}
        if self._config.strategy is CheckpointStrategy.MEMORY_AWARE:
            # A device that stopped telling has nothing: then all of its layers are recomputed.
            available = {cost.device: available_bytes(cost.device) or 0 for cost in costs}
            for device, missing in missing_bytes(self._config, costs, available).items():
                _log.warning(
                    "memory_share %g of %s is %d bytes too little, with every layer recomputed",
                    *(self._config.memory_share, device, missing),
                )
        unseen = self._modules.keys() - self._costs.keys()
        self._chosen = choose_by_cost(self._config, costs, available) | unseen

    def _listen(self, learning: Learning) -> Callable[[], object]:
        """Have the engine tell it of replays, until what is returned is called or this is gone:
        the manager may outlive many models."""
        stop = weakref.finalize(self, learning.listen(self._manager.engine))
        stop.atexit = False
        return stop

    def _stop(self) -> None:
        self._stop_learning()
        self._learning = None

    def _state(self, count: int) -> str:
        strategy = self._config.strategy
        learning = " until it is learnt what to keep" if self._learns() else ""
        undone = ", undone" if self._undone else ""
        return (
            f"{strategy.value}: {count} of {len(self._modules)} layers recomputed{learning}{undone}"
        )

    def _learns(self) -> bool:
        return self._learning is not None and self._config.strategy.learns


def refuse_taken(model: Any) -> None:
    """``ValueError`` if layers of the model have a stand-in already, saying whose."""
    for name, module in model.named_modules():
        found = installed(module)
        if found is None or found.owner is None:
            continue
        if isinstance(found.owner, CheckpointedLayers):
            whose = f"checkpoint_layers, as {found.owner!r}"
            undo = "what checkpoint_layers returned"
        else:
            whose, undo = "a plan", "what plan.apply() returned, or leave plan.applied()"
        raise ValueError(
            f"layer {name!r} is checkpointed already, by {whose}; nothing was changed. Call undo() "
            f"of {undo} first; it is also model.get_submodule({name!r}).forward.owner"
        )


def _device(module: Any) -> str:
    tensor = None if module is None else next(module.parameters(), None)
    return "cpu" if tensor is None else str(tensor.device)


def _require_memory(candidates: Mapping[str, Any]) -> None:
    for name, module in candidates.items():
        device = _device(module)
        if available_bytes(device) is None:
            raise ValueError(
                f"strategy 'memory_aware' is refused: layer {name!r} is on {device!r}, of which "
                "the available memory cannot be told; use 'smart', 'size_based' or 'interval'"
            )
