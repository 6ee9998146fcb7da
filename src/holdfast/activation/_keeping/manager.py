"""Keeps activations by the id of their layer, and gets back those it does not keep. Knows ids,
tiers and who is told; not how bytes move, nor what a layer computes.
"""

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any, Self

import torch

from holdfast import _checks
from holdfast.activation._events import ActivationEvent, Subscribers
from holdfast.activation._keeping.cache import RecomputationCache
from holdfast.activation._keeping.held import Held, closed
from holdfast.activation._keeping.known_layers import KnownLayers
from holdfast.activation._keeping.memory_stats import MemoryAccount, MemoryStats
from holdfast.activation._keeping.recovery import Recompute, Recovery
from holdfast.activation._keeping.tiers import open_tier
from holdfast.activation._keeping.watched_regions import Watched, WatchedRegions
from holdfast.activation._layer_ids import layer_id as checked_id
from holdfast.activation._recomputing.engine import RecomputationEngine
from holdfast.activation._storages import memory_bytes
from holdfast.errors import CheckpointNotFoundError, ClosedError, CorruptedError, RecomputationError


class CheckpointManager:
    """Activations, kept by layer or for the regions of ``checkpoint()``. Thread-safe.

    ``tier`` says where they are kept. ``"inplace"``: where they are. ``"disk"``: in a file without
    a name in ``folder`` (by default the first of the temporary folders that is on a disk), past
    the page cache; they are written and read ahead by threads of the manager's own. ``"host"``:
    tensors of an accelerator in pinned memory of the host; a CPU tensor raises ``ValueError``.
    Where there is no room, tensors stay in memory, subscribers hear of ``fell_back`` and the log
    has one warning. Tensors under 64 KiB and those without a plain storage (sparse, quantized,
    DTensor and other subclasses) are always kept in place. Values are detached: a kept activation
    does not keep the graph that made it.

    What is not kept is recomputed by ``engine``, by default an engine of its own, and then kept in
    ``cache`` if there is one. A cache or an engine that was given is not closed with the manager;
    while it is closed itself, what needs it raises ``ClosedError``, and the rest works.

    A tensor that is changed in place while it is kept is an error when it is asked for, where the
    change can have reached what is kept: always in place; in the other tiers until its copy was
    complete and the thread that held it has used the manager again. After that its old value
    comes back. One that is cached and was changed is recomputed. As in autograd, changes through
    ``.data`` are not seen.

    After ``close()`` every call but ``close`` raises ``ClosedError``. A manager that is dropped
    without ends its threads and its file when the last tensor held by it is gone. In a process
    that was forked while no other thread used the manager, tensors stay in memory, and what was
    moved can be read as long as the process it came from keeps it.
    """

    def __init__(
        self,
        tier: str = "inplace",
        engine: RecomputationEngine | None = None,
        cache: RecomputationCache | None = None,
        *,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        if engine is not None:
            _checks.instance("engine", engine, RecomputationEngine)
        if cache is not None:
            _checks.instance("cache", cache, RecomputationCache)
        self._lock = threading.Lock()
        self._account = MemoryAccount()
        self._subscribers = Subscribers()
        self._tier = open_tier(tier, folder, self._lock, self._account, self._subscribers)
        self._owns_engine = engine is None
        self._engine = RecomputationEngine() if engine is None else engine
        self._recovery = Recovery(self._engine, cache)
        self._layers = KnownLayers()
        self._regions = WatchedRegions()
        self._closed = False

    @property
    def engine(self) -> RecomputationEngine:
        """What recomputes: the engine that was given, or the manager's own."""
        return self._engine

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def moves(self) -> bool:
        """Whether the tier takes tensors out of the memory they were computed in."""
        return self._tier.moves

    @property
    def checkpoint_count(self) -> int:
        """How many layers are registered."""
        self._require_open()
        return len(self._layers.registered())

    def register_checkpoint(self, layer_id: str, activation: torch.Tensor) -> None:
        """Keep the activation of a layer until it is cleared.

        ``ValueError`` for a blank id, one that is registered, or what is no tensor. Waits if the
        tier has too much to write.
        """
        checked_id("layer_id", layer_id)
        _checks.instance("activation", activation, torch.Tensor)
        self._require_open()
        if not self._register(self._layers, layer_id, activation):
            raise ValueError(
                f"layer {layer_id!r} is registered already; what is kept for it stays as it was"
            )

    def retrieve_or_recompute(self, layer_id: str, recompute: Recompute = None) -> torch.Tensor:
        """The activation of a layer: registered, else cached, else recomputed by ``recompute`` or
        the engine's function for the layer, and then cached, or registered if there is no cache.

        Threads that ask for a layer while it is recomputed wait and share the outcome. Raises
        ``CheckpointNotFoundError``, a ``KeyError``, if there is no way to get it, and
        ``RecomputationError`` if recomputing failed, asked for the layer itself, or if what was
        kept has been changed. What was kept and cannot be read back is recomputed if possible.
        """
        try:
            layer = self._layers.get(layer_id)
        except TypeError:  # no text: refused where ids are looked at
            layer = None
        if layer is None or (held := layer.held) is None:
            return self._find(layer_id, recompute)
        try:
            tensor = held.get()
        except RecomputationError as error:
            lost = isinstance(error.__cause__, OSError | CorruptedError)
            if not lost or not self._recovery.can_compute(layer_id, recompute):
                raise
            self._layers.lose(layer_id, held)
            return self._find(layer_id, recompute)
        next(layer.accesses)
        if self._subscribers:
            self._tell("retrieved", layer_id, held.size_bytes)
        return tensor

    def has_checkpoint(self, layer_id: str) -> bool:
        """Whether the layer is registered."""
        checked_id("layer_id", layer_id)
        self._require_open()
        return self._layers.held(layer_id) is not None

    def clear_checkpoints(self) -> None:
        """Forget all layers and empty the cache. Their memory is free when this returns, but for a
        tensor that is just being written, and those that others refer to. The peak stays, and so
        does what regions hold."""
        self._require_open()
        forgotten, self._layers = self._layers, KnownLayers()
        size_bytes = sum(held.size_bytes for held in forgotten.registered().values())
        del forgotten
        self._recovery.clear()
        with self._lock:
            self._tier.tidy()
        self._tier.trim()
        self._tell("cleared", "", size_bytes)

    def get_memory_stats(self) -> MemoryStats:
        """What is kept where, as of one moment."""
        self._require_open()
        layers = self._layers
        registered = layers.registered().values()
        parts = {id(part): part.size_bytes for held in registered for part in held.parts}
        unkept = layers.unkept_bytes(self._recovery.is_cached)
        ranked = layers.by_accesses()
        with self._lock:
            self._tier.tidy()
            current, peak, moved = self._account.current, self._account.peak, self._account.moved
        return MemoryStats(
            current_memory_used=current,
            peak_memory_used=peak,
            checkpoint_count=len(registered),
            average_memory_per_checkpoint=sum(parts.values()) // max(1, len(registered)),
            memory_savings=moved + self._regions.dropped_bytes() + unkept,
            moved_bytes=moved,
            most_accessed=tuple(ranked[:5]),
            least_accessed=tuple(reversed(ranked[-5:])),
        )

    def reset_peak(self) -> None:
        """From now on the peak is that of the memory used from now on."""
        self._require_open()
        with self._lock:
            self._tier.tidy()
            self._account.reset_peak()

    def hold(self, tensor: torch.Tensor, layer_id: str = "") -> Held:
        """Keep a tensor for whoever owns what is returned; dropping that frees it.

        ``layer_id`` is what errors and events call it. ``ValueError`` for what is no tensor. Waits
        if the tier has too much to write.
        """
        _checks.instance("tensor", tensor, torch.Tensor)
        self._require_open()
        return self._tier.hold(tensor, layer_id, lasting=False)

    def watch(self, region: Watched) -> None:
        """Count what a region has dropped as saved for as long as the region lives."""
        self._require_open()
        self._regions.add(region)
        if self._subscribers:
            self._tell("region", region.name, region.dropped_bytes(), region.forward_ms)

    def on_event(self, callback: Callable[[ActivationEvent], object]) -> Callable[[], None]:
        """Call ``callback`` with every event from now on, in the thread in which it happens; the
        function that is returned ends that. An error of the callback is logged."""
        self._require_open()
        return self._subscribers.add(callback)

    def close(self) -> None:
        """Drop everything that is kept and end the threads. Idempotent."""
        with self._lock:
            self._closed = True
            self._layers = KnownLayers()
            self._regions = WatchedRegions()
        self._tier.close()
        if self._owns_engine:
            self._engine.close()

    def __enter__(self) -> Self:
        self._require_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"layers={len(self._layers.registered())}"
        return f"CheckpointManager({'moves' if self.moves else 'in place'}, {state})"

    def _require_open(self) -> None:
        if self._closed:
            raise closed()

    def _find(self, layer_id: str, recompute: Recompute) -> Any:
        """The activation of a layer that is not registered."""
        checked_id("layer_id", layer_id)
        if recompute is not None and not callable(recompute):
            raise ValueError(f"recompute must be a function or None, not {recompute!r:.200}")
        self._require_open()
        layers = self._layers

        def kept() -> Any:
            held = layers.held(layer_id)
            return None if held is None else held.get()

        def keep(tensor: Any, cache: RecomputationCache | None) -> None:
            self._keep(layers, layer_id, tensor, cache)

        found = self._recovery.find(layer_id, recompute, kept=kept, keep=keep)
        if found is None:
            raise CheckpointNotFoundError(
                f"layer {layer_id!r} is not kept and there is no function to recompute it: "
                "register it, pass recompute=, or register a function with the engine"
            )
        if found.elapsed_ms is None:
            layers.count_access(layer_id)
        if self._subscribers:
            kind = "retrieved" if found.elapsed_ms is None else "recomputed"
            self._tell(kind, layer_id, memory_bytes(found.tensor), found.elapsed_ms or 0.0)
        return found.tensor

    def _keep(
        self, layers: KnownLayers, layer_id: str, tensor: Any, cache: RecomputationCache | None
    ) -> None:
        """Cache or register what was recomputed, unless all was cleared meanwhile."""
        if cache is None:
            # Closed meanwhile, there is nothing to keep it for, but whoever asked can have it.
            with contextlib.suppress(ClosedError):
                self._register(layers, layer_id, tensor, told=False)
        elif layers is self._layers:
            layers.meet(layer_id, memory_bytes(tensor))
            cache.add(layer_id, tensor)

    def _register(
        self, layers: KnownLayers, layer_id: str, tensor: Any, *, told: bool = True
    ) -> bool:
        """Whether it was, and not another before it."""
        if layers.held(layer_id) is not None:
            return False
        held = self._tier.hold(tensor, layer_id, lasting=True)
        registered = layers.register(layer_id, held)
        if registered and told:
            self._tell("registered", layer_id, held.size_bytes)
        return registered

    def _tell(self, kind: str, layer_id: str, size_bytes: int, elapsed_ms: float = 0.0) -> None:
        if self._subscribers:
            self._subscribers.tell(
                ActivationEvent(
                    kind=kind, layer_id=layer_id, size_bytes=size_bytes, elapsed_ms=elapsed_ms
                )
            )
