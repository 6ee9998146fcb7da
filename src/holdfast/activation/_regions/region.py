"""One checkpointed call: what it was given, what it ran under, and what autograd saved in it.
Knows its forward; ``_replay`` knows how it is run again.

A region is owned by the saved tensors autograd holds (``Saved``), which it knows only weakly, so
that an abandoned graph is freed at once, region and all. Nothing in it refers to what the call
returned.
"""

import contextlib
import functools
import threading
import time
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from holdfast.activation._keeping.manager import CheckpointManager
from holdfast.activation._regions.bindings import bindings
from holdfast.activation._regions.buffers import copies, sorted_out
from holdfast.activation._regions.changes import digests, steps
from holdfast.activation._regions.digests import LATE, Digests, digest
from holdfast.activation._regions.found import Parameter, as_found, storage_of
from holdfast.activation._regions.inputs import HeldInput, Input, Path, kept, leaves
from holdfast.activation._regions.options import RegionOptions
from holdfast.activation._regions.place import stack_level
from holdfast.activation._regions.reach import reach
from holdfast.activation._regions.replay import Replay, Rerun
from holdfast.activation._regions.saved import Alias, Saved, unpack
from holdfast.activation._regions.streams import Stream, advanced, default_streams, marks, stream_of
from holdfast.activation._storages import storages
from holdfast.activation._surroundings import surroundings
from holdfast.errors import ClosedError, RecomputationError

if TYPE_CHECKING:
    from holdfast.activation._regions.debug import OperatorLog

_NOTHING = contextlib.nullcontext()


class Region:
    """Made before the forward, completed by it, replayed in backward as often as needed.

    Thread-safe: backward may ask from several threads, and a replay serves all that wait for it.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: RegionOptions,
        manager: CheckpointManager,
    ) -> None:
        self.fn = fn
        self.name = options.name or name_of(fn)
        self.options = options
        self.context: Any = _NOTHING  # what the replay runs in
        self.log: OperatorLog | None = None
        self._manager = manager
        self._lock = threading.RLock()
        self.saved: list[weakref.ref[Saved]] = []
        self.described: list[tuple[Any, Any, Any]] = []  # shape, dtype, device of each
        self.digests = Digests() if options.determinism_check == "values" else None
        self._dropped_bytes = 0
        self._holding: deque[tuple[Saved, Any, int]] = deque()
        self.forward_ms = 0.0
        self.finished = False

        given = leaves((args, kwargs))
        self._tensors = [item for item in given if isinstance(item, torch.Tensor)]
        self.reached = reach(fn, given, options.modules)
        self.reached.label = options.name
        self.bindings = bindings(fn)
        self.epoch = steps.care(id(self))
        self.watched = digests(self.reached.parameters) if options.check == "digest" else {}
        self.buffers = copies(self.reached.buffers)
        self.untouched: list[Parameter] = []
        self.surroundings = surroundings()
        self.streams: list[Stream] = []
        if options.preserve_rng_state:
            self.streams += default_streams(_accelerators(self._tensors))
            self.streams += map(stream_of, options.generators)
        self.marks = marks(self.streams)
        # Last, for here an enclosing region's replay may stop: these tensors may be all it needs.
        self.inputs: list[Input | HeldInput] = []
        memo: dict[int, Any] = {}
        self.arguments = (
            kept(args, self._keep, ("args",), memo),
            kept(kwargs, self._keep, ("kwargs",), memo),
        )

    def __del__(self) -> None:
        steps.forget(id(self))

    def forward(self, context: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call itself, with what it saves for backward dropped or held."""
        began = time.perf_counter_ns()
        result = unfinished = object()
        try:
            with context, saved_tensors_hooks(self._packer(), unpack):
                result = self.fn(*args, **kwargs)
            if result is unfinished:
                raise RuntimeError(
                    f"the forward context of context_fn suppressed an exception raised in region "
                    f"{self.name!r}, which has no result then"
                )
            while self._holding:
                self._hold(*self._holding.popleft())
        finally:
            self._holding.clear()  # after an error: it would hold the region in a cycle
        self.forward_ms = (time.perf_counter_ns() - began) / 1e6
        self.reached.renew_own_doing()
        self.marks = advanced(self.marks)
        self.buffers, self.untouched = sorted_out(self.buffers)
        if self.options.check == "digest":
            self.watched |= digests([*map(as_found, self.reached.renormed), *self.untouched])
        if self.digests is not None:
            self.digests.all()
        self.finished = True
        self._manager.watch(self)
        return result

    def dropped_bytes(self) -> int:
        """What autograd would hold on account of this call if it were not checkpointed."""
        return self._dropped_bytes

    def retrieve(self, saved: Saved) -> Any:
        """The value of one saved tensor: held, or replayed together with the others."""
        try:
            return self._retrieve(saved)
        except ClosedError as error:
            raise ClosedError(
                f"region {self.name!r} needs its CheckpointManager in backward, but that was "
                "closed after the forward: call backward() first"
            ) from error

    def _retrieve(self, saved: Saved) -> Any:
        if saved.held is not None:
            saved.require_unchanged()
            return saved.held.get()
        with self._lock:
            value = saved.take()
            if value is None:
                value = self._replay(saved)
            if value is None:
                raise RecomputationError(
                    f"region {self.name!r} was replayed, but a tensor its forward saved was not "
                    "saved again: the region does not do the same thing twice",
                    layer_id=self.name,
                )
            return value

    def replay_whole(self) -> list[Any]:
        """Run the region again to its end, with all that it saved filled, for the tensors it
        returned."""
        with self._lock:
            replay = Replay(self, None)
            self._engaged(replay)
            return replay.outputs

    def run_again(self) -> list[Any]:
        """Run the region again for the tensors it returned; nothing that it saves is kept."""
        with self._lock:
            rerun = Rerun(self)
            self._engaged(rerun)
            return rerun.outputs

    def _replay(self, asked: Saved) -> Any:
        replay = Replay(self, asked)
        self._engaged(replay)
        return replay.answer.take()

    def _engaged(self, replay: Replay) -> None:
        """Have the engine run a replay, which counts and times it."""
        try:
            self._manager.engine.run(self.name, replay.run)
        except RecomputationError:
            if replay.error is None:
                raise
        else:
            return
        # What was raised comes through as itself, as it would from a plain call: a loop that
        # catches OutOfMemoryError must still catch it here.
        error, replay.error = replay.error, None
        if not isinstance(error, RecomputationError):
            error.add_note(f"raised while holdfast replayed region {self.name!r} in backward")
        try:
            raise error
        finally:
            del error  # with its traceback it would hold this frame, and the region, in a cycle

    def _keep(self, tensor: Any, path: Path) -> Input | HeldInput:
        known = digest(tensor) if self.options.check == "digest" else None
        kept_as: Input | HeldInput
        if self._manager.moves and not tensor.is_leaf and not _within_hooks():
            held = self._manager.hold(tensor, self.name)
            kept_as = HeldInput(held, tensor, path, self.name, known)
        else:
            kept_as = Input(tensor, path, self.name, known)
        self.inputs.append(kept_as)
        return kept_as

    def _packer(self) -> Callable[[Any], Saved]:
        manager = self._manager
        saved, described = self.saved, self.described
        keep, digests = self.options.keep, self.digests
        known = {id(item.tensor): item for item in self.reached.parameters}
        account = _Account(self.reached.parameters, self._tensors)
        self._tensors = []
        # What moves is held a little late: an operator may save noise and draw it then.
        holding, late = self._holding, (LATE if manager.moves else 0)

        # Autograd keeps this function as long as the graph: it must not hold a tensor.
        def pack(tensor: Any) -> Saved:
            handle = Saved(self)
            if digests is not None:
                digests.add(len(saved), tensor)
            saved.append(weakref.ref(handle))
            described.append((tensor.shape, tensor.dtype, tensor.device))
            base = tensor._base  # noqa: SLF001
            owner = tensor if base is None else base
            is_parameter = owner.__class__ is torch.nn.Parameter
            if is_parameter and id(owner) not in known:
                known[id(owner)] = self._unknown(owner)
            if keep is not None and is_parameter:
                # It lives anyway, and must not force a replay of what is kept.
                handle.held = Alias(tensor, known[id(owner)], self)
            elif keep is not None and self._is_kept(keep, tensor):
                holding.append((handle, tensor, tensor._version))  # noqa: SLF001
                if len(holding) > late:
                    self._hold(*holding.popleft())
            elif not is_parameter:
                self._dropped_bytes += account.new_bytes(tensor)
            return handle

        return pack

    def _hold(self, saved: Saved, tensor: Any, version: int) -> None:
        saved.held = self._manager.hold(tensor, self.name)
        saved.changed = tensor._version != version  # noqa: SLF001

    def _is_kept(self, keep: Callable[[Any], bool], tensor: Any) -> bool:
        try:
            return bool(keep(tensor))
        except Exception as error:
            error.add_note(f"raised by keep, for region {self.name!r} of holdfast.checkpoint")
            raise

    def _unknown(self, leaf: Any) -> Parameter:
        """A parameter the region uses and no module found has: watched from now on."""
        item = as_found(leaf)
        self.reached.parameters.append(item)
        if self.options.check == "digest":
            self.watched[id(leaf)] = digest(leaf)
        if self.reached.name_of(leaf) is None:  # a lazy module's is known now
            _warn_once(self.name, tuple(leaf.shape))
        return item


class _Account:
    """The bytes autograd would hold on account of a region: each storage once, without those of
    parameters and arguments, which live anyway."""

    def __init__(self, parameters: Iterable[Parameter], arguments: Iterable[Any]) -> None:
        self._living = {item.storage for item in parameters}
        self._living.update(map(storage_of, arguments))
        self._counted: dict[int, Any] = {}

    def new_bytes(self, tensor: Any) -> int:
        if tensor.__class__ is not torch.Tensor or tensor.layout is not torch.strided:
            return sum(storage.nbytes() for storage in storages(tensor))
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001
        if key in self._living:
            return 0
        counted = self._counted.get(key)
        if counted is not None and counted() is storage:
            return 0
        # Weakly, and compared: the address of a dropped storage is soon another's.
        self._counted[key] = weakref.ref(storage)
        nbytes: int = storage.nbytes()
        return nbytes


def name_of(fn: Any) -> str:
    """What a person would call the function."""
    if isinstance(fn, torch.nn.Module):
        return type(fn).__name__
    while isinstance(fn, functools.partial):
        fn = fn.func
    belongs = getattr(fn, "__self__", None)
    if isinstance(belongs, torch.nn.Module):
        name = getattr(fn, "__name__", "")
        kind = type(belongs).__name__
        return (
            kind
            if name in {"forward", "__call__", "_call_impl", "_wrapped_call_impl"}
            else f"{kind}.{name}"
        )
    if isinstance(fn, types.FunctionType | types.MethodType):
        return fn.__qualname__
    return str(getattr(fn, "__name__", type(fn).__name__))


@functools.lru_cache(maxsize=1024)
def _warn_once(name: str, shape: tuple[int, ...]) -> None:
    warnings.warn(
        f"holdfast.checkpoint: region {name!r} uses a parameter of shape {shape} that belongs to "
        "no module found from the function or its arguments. If its module has buffers, a replay "
        "would update them twice: pass modules=(the_module,).",
        stacklevel=stack_level(),
    )


def _accelerators(tensors: Iterable[Any]) -> Iterable[Any]:
    return {tensor.device for tensor in tensors if tensor.device.type not in {"cpu", "meta"}}


def _within_hooks() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None  # noqa: SLF001
