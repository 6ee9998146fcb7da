"""How much memory a call takes at its worst. Knows tensors and what becomes of their storages, not
what the call is for.

On a CPU nothing keeps that number: the process's own high-water mark is the allocator's, which does
not give memory back (a step with and without checkpointing read 22.4 and 23.0 MB, where its tensors
took 18.0 and 6.8). So every torch call is looked at as it is dispatched, its storages are known by
their identity, and each is watched by a weak reference until it dies. On CUDA the caching allocator
keeps that number itself, and is asked (``_cuda_peak``).
"""

import collections
import functools
import gc
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass_type,
)

from holdfast.activation._measuring.cuda_peak import CudaPeaks, DevicePeak
from holdfast.activation._measuring.gathering import gather, gather_each, visible


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakReport:
    """What a call took, over what was alive when it began.

    ``peak_bytes`` is the most that was alive at once during the call minus what was alive at its
    start; never below 0. ``after_bytes`` is the same at its end, with all that ``value``, what the
    function returned, keeps alive; below 0 if the call freed more than it left. Both are of
    ``device``; ``devices`` has them for every device that was measured.
    """

    peak_bytes: int
    after_bytes: int
    device: str
    devices: tuple[DevicePeak, ...]
    value: Any = field(repr=False, compare=False)


def measure_peak(
    fn: Callable[..., Any],
    /,
    *args: Any,
    device: str | torch.device | None = None,
    **kwargs: Any,
) -> PeakReport:
    """Call ``fn(*args, **kwargs)`` and report what its tensors took. What it raises is raised.

    ``device``: ``"cpu"`` or a CUDA device. Without it both are measured, and the report is of the
    CUDA device on which the call took most, or of the CPU if it took nothing on any. (A ``device``
    that is meant for ``fn`` goes into a ``functools.partial``.)

    Counted are whole storages, each once whatever views it has; those inside wrapper tensors such
    as DTensor and of sparse tensors too. What was there at the start costs nothing, and if it dies
    during the call, the level falls below the start: a step that drops its gradients with
    ``zero_grad(set_to_none=True)`` and makes new ones does not pay for them twice. For that, first
    garbage is collected and every tensor that Python can see is looked up, which takes 0.1 s or so;
    saved tensors of a graph that was built before are found when backward uses them. ``args`` stay
    alive meanwhile.

    What the meter does not see on the CPU:

    - scratch inside a kernel (oneDNN, MKL, im2col), and what Python, NumPy and C++ hold themselves,
      what ``torch.load`` has read and the states of generators among it;
    - what other threads allocate, loaders included. CPU backward runs in the calling thread;
    - code that ``torch.compile`` made: it runs eagerly meanwhile, and is measured so;
    - ``storage.resize_()`` at once: a storage that grew so is seen when a call touches it; one that
      shrank at the next new peak, or the first time some peaks later, and only at the end if no
      call has touched it. Until then the peak may read too high.

    What it changes: while it looks on, autograd adds gradients that meet at one tensor out of
    place, so the peak may read too high by one such gradient. And every torch call takes longer:
    never time and measure in one run. Calls may be nested, but only one thread should measure at a
    time: torch's dispatch modes share flags between threads.

    On CUDA the peak is ``torch.cuda.max_memory_allocated`` after ``reset_peak_memory_stats``, so
    with every thread's allocations and in the allocator's blocks; the caller's own peak statistics
    are reset.
    """
    if not callable(fn):
        raise ValueError(f"fn must be a function, not {fn!r:.200}")  # noqa: TRY004 -- as every refusal
    wanted = None if device is None else _device(device)
    meter = None if wanted is not None and wanted.type == "cuda" else _Meter()
    with CudaPeaks(wanted) as cuda:
        if meter is None:
            value = fn(*args, **kwargs)
        else:
            meter.survey()
            with meter:
                value = fn(*args, **kwargs)
            meter.settle()
        peaks = sorted(cuda.read(), key=lambda each: -each.peak_bytes)
    if meter is not None:
        host = DevicePeak(device="cpu", peak_bytes=meter.peak_bytes, after_bytes=meter.level_bytes)
        used_cuda = any(each.peak_bytes for each in peaks)
        peaks = [*peaks, host] if used_cuda else [host, *peaks]
    return PeakReport(
        peak_bytes=peaks[0].peak_bytes,
        after_bytes=peaks[0].after_bytes,
        device=peaks[0].device,
        devices=tuple(peaks),
        value=value,
    )


def _device(given: str | torch.device) -> torch.device:
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError) as problem:
        raise ValueError(f"device must be 'cpu' or a CUDA device, not {given!r:.200}") from problem
    if device.type not in {"cpu", "cuda"}:
        raise ValueError(f"device must be 'cpu' or a CUDA device, not {given!r:.200}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {given!r:.200} cannot be measured: CUDA is not available here")
    return device


class _Watched(weakref.ref):  # type: ignore[type-arg]
    """A storage, its identity and size as last seen, and whether it counts."""

    __slots__ = ("counts", "key", "size_bytes")

    counts: bool
    key: int
    size_bytes: int

    def resized(self) -> Any:
        """The storage, if it is alive and of another size by now."""
        storage = self()
        return storage if storage is not None and storage.nbytes() != self.size_bytes else None


class _Meter(TorchDispatchMode):  # type: ignore[misc]
    """The level of bytes alive over those at the start, and its peak.

    Not thread-safe, and need not be: a mode is of one thread. Only the deaths of storages come from
    any thread and at any moment, so they are queued, and settled when the level is next needed.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.level_bytes = 0
        self.peak_bytes = 0
        self._watched: dict[int, _Watched] = {}
        self._dead: collections.deque[_Watched] = collections.deque()
        self._touched: dict[int, _Watched] = {}
        self._unchecked = 0
        self._resized_by_hand = False
        self._note: Callable[[int], None] | None = None

    def survey(self) -> None:
        """Get to know what is there already."""
        self.know(residents())

    def know(self, there: Iterable[weakref.ref[Any]]) -> None:
        """Get to know what was there at the start, as far as it still is."""
        for reference in there:
            storage = reference()
            if storage is not None:
                self._look(storage, fresh=False, resident=True)

    def settle(self) -> None:
        """Bring the level up to date."""
        self._bury()
        self._check(self._watched)
        self.peak_bytes = max(self.peak_bytes, self.level_bytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # the wrapper acts first, and its inner calls come here
        self._bury()
        given: list[Any] = []
        gather_each(args, given)
        if kwargs:
            gather(kwargs, given)
        made_unseen = func in _MADE_BEFORE_SEEN
        in_backward = torch._C._current_graph_task_id() != -1  # noqa: SLF001
        for storage in given:
            self._touch(storage, made_unseen, in_backward)
        result = func(*args, **kwargs) if kwargs else func(*args)
        if _may_write(func):
            for storage in given:  # which the call may have resized
                self._touch(storage, fresh=False, resident=False)
        made: list[Any] = []
        gather(result, made)
        for storage in made:
            self._touch(storage, fresh=True, resident=False)
        if self.level_bytes > self.peak_bytes:
            self._rise()
        if self._note is not None:
            self._note(self.level_bytes)
        return result

    def _rise(self) -> None:
        """Note a new peak, after checking it if that is due: always once a storage was resized by
        hand, else so seldom that it costs little with very many storages."""
        self._unchecked += 1
        if self._resized_by_hand or self._unchecked * _CHECKED_PER_PEAK >= len(self._touched):
            self._check(self._touched)
        self.peak_bytes = max(self.peak_bytes, self.level_bytes)

    def _touch(self, storage: Any, fresh: bool, resident: bool) -> None:
        """Look at what a call was given or has made."""
        key, size_bytes = storage._cdata, storage.nbytes()  # noqa: SLF001 -- the identity of a storage
        watched = self._watched.get(key)
        if watched is None or watched.size_bytes != size_bytes or watched() is not storage:
            watched = self._look(storage, fresh, resident)
        self._touched[key] = watched

    def _look(self, storage: Any, fresh: bool, resident: bool) -> _Watched:
        """Count a storage as it is now. One not seen before was made just now if ``fresh``, was
        there at the start if ``resident``; else by something out of sight, whose it stays: then
        neither its bytes nor its death count."""
        key, size_bytes = storage._cdata, storage.nbytes()  # noqa: SLF001 -- the identity of a storage
        watched = self._watched.get(key)
        # A storage may be made where one has died that is not buried yet.
        if watched is not None and watched() is storage:
            if watched.size_bytes != size_bytes:
                if watched.counts:
                    self.level_bytes += size_bytes - watched.size_bytes
                watched.size_bytes = size_bytes
            return watched
        watched = _Watched(storage, self._dead.append)
        watched.key, watched.size_bytes = key, size_bytes
        # Memory that torch cannot resize is not torch's: NumPy's, or a mapped file.
        mine = storage.device.type == "cpu" and storage.resizable()
        watched.counts = mine and (fresh or resident)
        self._watched[key] = watched
        if watched.counts and fresh:
            self.level_bytes += size_bytes
        return watched

    def _bury(self) -> None:
        while self._dead:
            watched = self._dead.popleft()
            if self._watched.get(watched.key) is watched:
                del self._watched[watched.key]
                self._touched.pop(watched.key, None)
            if watched.counts:
                self.level_bytes -= watched.size_bytes

    def _check(self, among: dict[int, _Watched]) -> None:
        """See what was resized by hand, with ``storage.resize_()``, as FSDP frees what it has
        gathered: no call tells of it. Until then it counts as it was, so a peak may be too high."""
        looked = map(_Watched.resized, tuple(among.values()))
        changed = [storage for storage in looked if storage is not None]
        self._resized_by_hand |= bool(changed)
        for storage in changed:
            self._look(storage, fresh=False, resident=False)
        self._unchecked = 0


def residents() -> list[weakref.ref[Any]]:
    """Every storage that Python can see, weakly. First garbage is collected: of before, freed by
    chance during a call, it would hide a peak."""
    if not any(isinstance(mode, _Meter) for mode in _get_current_dispatch_mode_stack()):
        gc.collect()
    found: list[Any] = []
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 -- torch has no other name for it
        for seen in visible():
            gather(seen, found)
    return list(map(weakref.ref, found))


class LevelMeter(_Meter):
    """A meter that notes the level after every call."""

    def __init__(self) -> None:
        super().__init__()
        self.levels: list[int] = []
        self._note = self.levels.append

    def level_now(self) -> int:
        self._bury()
        if self._resized_by_hand:
            self._check(self._touched)
        return self.level_bytes


_CHECKED_PER_PEAK = 64

# What these are given was made just now, past the dispatcher: by torch.tensor, by torch.load.
_MADE_BEFORE_SEEN = frozenset(
    {
        torch.ops.aten.lift_fresh.default,
        torch.ops.aten.set_.source_Storage,
        torch.ops.aten.set_.source_Storage_storage_offset,
    }
)


@functools.cache
def _may_write(func: Any) -> bool:
    """Whether an operation may change what it is given, its size too."""
    schema = getattr(func, "_schema", None)
    return schema is None or bool(schema.is_mutable)
