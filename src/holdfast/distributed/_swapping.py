"""Changes of live tensors that can be taken back, without a second copy of the old values.

Works on the memory of this rank. Knows no names, no checkpoints and no other ranks.
"""

import ctypes
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Protocol, final

import numpy as np
import torch

from holdfast._lanes import run_all
from holdfast.distributed._tensors import has_memory

_TRIES: Final = 10

_PIECE_BYTES: Final = 4 * 1024 * 1024
"""How much is exchanged at a time, so how much memory an exchange needs."""

_ONE_THREAD: Final = 32 * 1024
"""Elements that torch copies on the CPU without waking other threads. Larger pieces have them meet
three times for each, which on a machine whose cores are all busy took ten times as long."""

_SHORT_BYTES: Final = 64 * 1024
"""Up to how many bytes a tensor is exchanged together with others: for more, calls are little of
the time."""

_TOGETHER_BYTES: Final = 128 * 1024
"""How many bytes short tensors that are exchanged together have, so that they, what they are
exchanged with and a copy stay in a core's cache. 4 MiB took more than twice as long."""

_CHUNK_BYTES: Final = 512 * 1024
"""Bytes that are exchanged at a time where both are plain memory: what stays in a core's cache. In
smaller ones the interpreter is what takes time, and threads wait for each other."""

_HALVED_BYTES: Final = 4 * 1024 * 1024
"""From how many bytes on two threads exchange a half each: one does not use up the memory's
speed."""


class Action(Protocol):
    """A change that can be taken back."""

    def apply(self) -> None:
        """Change. Called at most once, and not after ``undo``; may raise midway."""
        ...

    def undo(self) -> None:
        """Everything as it was before ``apply``, also after one that raised midway or was never
        called. A second ``undo`` does nothing."""
        ...


@final
class Swap:
    """Exchanges the contents of two tensors of one shape and dtype: ``live`` then has the values
    of ``staged``, and ``staged`` keeps the former ones for ``undo``.

    Any strides, any two devices. Takes 4 MiB more and no copy of the whole. ``ValueError`` at
    once if the two cannot be exchanged.
    """

    __slots__ = ("_bytes", "_done", "_held", "_live", "_staged")

    def __init__(self, live: torch.Tensor, staged: torch.Tensor) -> None:
        _check_shapes(live, staged)
        if live.dtype != staged.dtype:
            raise ValueError(f"staged must be of dtype {live.dtype}, not {staged.dtype}")
        self._live = live.detach()
        self._staged = staged.detach() if staged.requires_grad else staged
        self._done = 0
        # A piece of live and its old values, while they are exchanged.
        self._held: tuple[torch.Tensor, torch.Tensor] | None = None
        self._bytes: Sequence[_ByteSwap] = ()

    def apply(self) -> None:
        if self._live.numel() <= _piece(self._live, self._staged):
            self._exchange(self._live, self._staged, self._live.clone())
            return
        if _is_plain(self._live) and _is_plain(self._staged):
            torch.autograd.graph.increment_version(self._live)  # as what torch copies to
            self._bytes = _byte_swaps(self._live, self._staged)
            run_all(self._bytes, _ByteSwap.apply, lanes=len(self._bytes))
            return
        scratch: torch.Tensor | None = None
        for live, staged in self._pieces():
            if scratch is None:  # no later piece is larger
                scratch = torch.empty(live.numel(), dtype=live.dtype, device=live.device)
            held = scratch[: live.numel()].view(live.shape)
            self._exchange(live, staged, held.copy_(live))

    def undo(self) -> None:
        if any(each.is_changed for each in self._bytes):
            torch.autograd.graph.increment_version(self._live)
        for each in self._bytes:
            each.undo()
        if self._held is not None:
            _put_back(*self._held)
            self._held = None
        for live, staged in itertools.islice(self._pieces(), self._done):
            _put_back(live, staged)
        self._done = 0

    def _exchange(self, live: torch.Tensor, staged: torch.Tensor, held: torch.Tensor) -> None:
        self._held = (live, held)
        live.copy_(staged)
        staged.copy_(held)
        self._done += 1
        self._held = None

    def _pieces(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return _cut(self._live, self._staged, _piece(self._live, self._staged))


@final
class _ShortSwaps:
    """The same for many short tensors in this process's memory, by a few calls for all of them.
    The former values are copied while that lasts."""

    __slots__ = ("_lives", "_old", "_stageds")

    def __init__(self, lives: Sequence[torch.Tensor], stageds: Sequence[torch.Tensor]) -> None:
        self._lives = lives
        self._stageds = stageds
        self._old: Sequence[torch.Tensor] | None = None

    def apply(self) -> None:
        self._old = old = [live.clone() for live in self._lives]
        torch._foreach_copy_(self._lives, self._stageds)
        torch._foreach_copy_(self._stageds, old)
        self._old = self._stageds

    def undo(self) -> None:
        failure: Exception | None = None
        for live, old in zip(self._lives, self._old or (), strict=False):
            try:
                _put_back(live, old)
            except Exception as error:  # noqa: BLE001 -- raised below, once the rest is undone
                failure = failure or error
        self._old = None
        if failure is not None:
            raise failure


@final
class _ByteSwap:
    """Exchanges some bytes of two plain tensors. Keeps no address: a tensor that was resized has
    its memory elsewhere."""

    def __init__(self, live: torch.Tensor, staged: torch.Tensor, here: slice) -> None:
        self._live = live
        self._staged = staged
        self._here = here
        self._done = 0
        self._held: tuple[slice, Any] | None = None  # old values, while they are exchanged

    def apply(self) -> None:
        lives, stageds = self._memory()
        scratch = np.empty(min(_CHUNK_BYTES, len(lives)), np.uint8)
        while self._done < len(lives):
            here = slice(self._done, self._done + _CHUNK_BYTES)
            live, staged = lives[here], stageds[here]
            held = scratch[: len(live)]
            held[:] = live
            self._held = here, held
            live[:] = staged
            staged[:] = held
            self._done += len(live)
            self._held = None

    @property
    def is_changed(self) -> bool:
        return self._held is not None or self._done > 0

    def undo(self) -> None:
        if not self.is_changed:
            return
        lives, stageds = self._memory()
        if self._held is not None:
            here, held = self._held
            lives[here] = held
            self._held = None
        lives[: self._done] = stageds[: self._done]
        self._done = 0

    def _memory(self) -> tuple[Any, Any]:
        return _bytes_of(self._live)[self._here], _bytes_of(self._staged)[self._here]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its values are its bytes, one after the other, in this process's memory."""
    return (
        type(tensor) is torch.Tensor
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _bytes_of(tensor: torch.Tensor) -> Any:
    """The memory of a plain tensor, where it is now, which must be kept. Its own ``numpy`` would
    have torch refuse for ever to resize it."""
    _check_memory(tensor)
    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    return np.frombuffer(memory, np.uint8)


def _put_back(live: torch.Tensor, old: torch.Tensor) -> None:
    _check_memory(live)
    live.copy_(old)


def _check_memory(tensor: torch.Tensor) -> None:
    """Whoever else changes the state may have given memory of it back, and to write to what is not
    there ends the process."""
    if not has_memory(tensor):
        raise RuntimeError("the memory of a tensor was given back while it was loaded")


def _byte_swaps(live: torch.Tensor, staged: torch.Tensor) -> list[_ByteSwap]:
    """What exchanges these, to be run at once."""
    if live.nbytes < _HALVED_BYTES:
        return [_ByteSwap(live, staged, slice(None))]
    half = live.nbytes // 2
    return [_ByteSwap(live, staged, here) for here in (slice(half), slice(half, None))]


@final
class Fill:
    """Copies ``staged`` into ``live``, casting to its dtype, and keeps a copy of what was there.

    ``ValueError`` at once if the shapes differ.
    """

    __slots__ = ("_live", "_old", "_staged")

    def __init__(self, live: torch.Tensor, staged: torch.Tensor) -> None:
        _check_shapes(live, staged)
        self._live = live.detach()
        self._staged = staged.detach()
        self._old: torch.Tensor | None = None

    def apply(self) -> None:
        self._old = self._live.clone()
        with torch.no_grad():
            self._live.copy_(self._staged)

    def undo(self) -> None:
        if self._old is not None:
            with torch.no_grad():
                _put_back(self._live, self._old)
            self._old = None


@final
class Keep:
    """Changes nothing, and keeps a copy of ``live``, which others may change: ``undo`` puts it
    back."""

    __slots__ = ("_live", "_old")

    def __init__(self, live: torch.Tensor) -> None:
        self._live = live.detach()
        self._old: torch.Tensor | None = None

    def apply(self) -> None:
        self._old = self._live.clone()

    def undo(self) -> None:
        if self._old is not None:
            with torch.no_grad():
                _put_back(self._live, self._old)
            self._old = None


def swap(live: torch.Tensor, staged: torch.Tensor) -> None:
    """Exchange the contents of two tensors; see ``Swap``."""
    Swap(live, staged).apply()


def replacing(live: torch.Tensor, staged: torch.Tensor) -> Action:
    """What puts the values of ``staged`` into ``live``: by exchange if the dtypes agree."""
    return Swap(live, staged) if live.dtype == staged.dtype else Fill(live, staged)


def replacing_all(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[Action]:
    """The same for many, in their order: short ones that follow each other are one action."""
    lives: list[torch.Tensor] = []
    stageds: list[torch.Tensor] = []
    nbytes = 0
    for live, staged in pairs:
        is_short = _is_short(live, staged)
        if lives and (not is_short or nbytes + live.nbytes > _TOGETHER_BYTES):
            yield _ShortSwaps(lives, stageds)
            lives, stageds, nbytes = [], [], 0
        if is_short:
            _check_shapes(live, staged)
            lives.append(live)
            stageds.append(staged)
            nbytes += live.nbytes
        else:
            yield replacing(live, staged)
    if lives:
        yield _ShortSwaps(lives, stageds)


def _is_short(live: torch.Tensor, staged: torch.Tensor) -> bool:
    """Whether two can be exchanged together with others, as they are."""
    return (
        live.nbytes <= _SHORT_BYTES
        and live.dtype == staged.dtype
        and _is_plain(live)
        and _is_plain(staged)
        and not (live.requires_grad or staged.requires_grad or live.is_inference())
    )


def undo_all(actions: Sequence[Action]) -> None:
    """Undo all of them, the last first. If some fail the rest are undone all the same, and what
    failed first is raised. What interrupts one does not end it: it is begun again."""
    failure: BaseException | None = None
    for action in reversed(actions):
        for _ in range(_TRIES):
            try:
                action.undo()
            except Exception as error:  # noqa: BLE001 -- raised below, once the rest is undone
                failure = failure or error
            except BaseException as interrupt:  # noqa: BLE001 -- likewise
                failure = failure or interrupt
                continue
            break
    if failure is not None:
        raise failure


def strided_as(tensor: torch.Tensor, pattern: torch.Tensor) -> torch.Tensor:
    """``tensor``, or a copy of it whose elements lie in memory in the order of ``pattern``'s, which
    has the same shape. Fused optimizers refuse a state that lies otherwise than its parameter."""
    if tensor.stride() == pattern.stride() or tensor.layout is not torch.strided:
        return tensor
    laid = torch.empty_like(pattern, dtype=tensor.dtype, device=tensor.device, requires_grad=False)
    return tensor if laid.stride() == tensor.stride() else laid.copy_(tensor.detach())


def _check_shapes(live: torch.Tensor, staged: torch.Tensor) -> None:
    if live.shape != staged.shape:
        raise ValueError(f"staged must be of shape {tuple(live.shape)}, not {tuple(staged.shape)}")
    if torch._debug_has_internal_overlap(live) == 1:  # noqa: SLF001 -- nothing public tells
        raise ValueError(
            "live must have memory for each of its elements, and is an expanded tensor; "
            "make it by .clone() instead"
        )


def _piece(live: torch.Tensor, staged: torch.Tensor) -> int:
    """How many elements are exchanged at a time."""
    if live.is_cpu and staged.is_cpu:
        return _ONE_THREAD
    return int(_PIECE_BYTES // live.element_size())


def _cut(
    live: torch.Tensor, staged: torch.Tensor, most: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The two cut alike into views of at most so many elements, always in the same way."""
    count = live.numel()
    if count <= most:
        if count:
            yield live, staged
        return
    rows = most * live.shape[0] // count
    if rows == 0:
        for one, other in zip(live, staged, strict=True):
            yield from _cut(one, other, most)
        return
    for start in range(0, live.shape[0], rows):
        here = min(rows, live.shape[0] - start)
        yield live.narrow(0, start, here), staged.narrow(0, start, here)
