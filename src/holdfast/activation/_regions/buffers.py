"""The buffers and parameters a module held in a region's forward. Knows how to swap them in for
a replay, so that what it holds now is neither seen nor touched by it.

A parameter that was replaced since (by ``setattr``, or because ``functional_call`` had put it
there for the forward) is swapped in as it is; of a buffer, a copy of its value. Buffers that lie
in the same memory are copied as one: what is written to one is seen in the other.

BatchNorm writes its running statistics without moving their version counter, so a change is
found by comparing bits. Small buffers are not compared after the forward: their copy is kept and
used. Regions that find a small buffer unchanged share one copy. On accelerators a comparison
would wait for the device; there a large buffer's copy is kept only if its version counter moved,
and copies are not shared.
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from holdfast.activation._regions.found import (
    Buffer,
    Parameter,
    as_found,
    same_memory,
    storage_of,
    version_of,
)

SMALL_BYTES = 64 * 1024

_ABSENT = object()


class _Value:
    """The copied memory of one or more buffers. Regions that found the same bits share it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor


class Copy(NamedTuple):
    """Buffers in one memory, as they were found, and a copy of it."""

    buffers: tuple[Buffer, ...]
    found: tuple[Parameter, ...]  # empty: the module had the name, but nothing under it
    value: _Value | None
    start: int  # where the copied memory begins in the storage, in elements

    def fresh(self) -> Iterator[tuple[Buffer, Any]]:
        """The buffers, with values that a replay may write to."""
        if self.value is None:
            yield from ((buffer, None) for buffer in self.buffers)
            return
        memory = self.value.tensor.clone()
        if len(self.buffers) == 1:
            yield self.buffers[0], memory
            return
        for buffer in self.buffers:
            tensor = buffer.tensor
            place = tensor.storage_offset() - self.start
            yield buffer, memory.as_strided(tensor.size(), tensor.stride(), place)


def copies(buffers: Sequence[Buffer]) -> list[Copy]:
    """Of the buffers as they are now."""
    if not buffers:
        return []
    with torch.no_grad():
        return [_copy(together) for together in _by_memory(buffers)]


def _by_memory(buffers: Iterable[Buffer]) -> Iterator[tuple[Buffer, ...]]:
    groups: dict[Any, list[Buffer]] = {}
    for buffer in buffers:
        memory = 0 if buffer.tensor is None else storage_of(buffer.tensor)
        key = (memory, buffer.tensor.dtype) if memory else (id(buffer.owner), buffer.key)
        groups.setdefault(key, []).append(buffer)
    return (tuple(group) for group in groups.values())


def _copy(together: tuple[Buffer, ...]) -> Copy:
    first = together[0].tensor
    if first is None:
        return Copy(together, (), None, 0)
    found = tuple(as_found(each.tensor, each.owner, each.key) for each in together)
    if len(together) == 1:
        return Copy(together, found, _shared(first), 0)
    start = min(each.tensor.storage_offset() for each in together)
    stop = max(_end(each.tensor) for each in together)
    return Copy(together, found, _Value(_span(first, start, stop).clone()), start)


def _end(tensor: Any) -> int:
    steps = zip(tensor.size(), tensor.stride(), strict=True)
    return int(tensor.storage_offset() + 1 + sum((size - 1) * step for size, step in steps))


def _span(tensor: Any, start: int, stop: int) -> Any:
    return tensor.as_strided((stop - start,), (1,), start)


_newest: dict[int, tuple[weakref.ref[Any], weakref.ref[_Value]]] = {}
"""The newest copy of each small buffer, by its identity. Neither is kept alive by this."""


def _shared(tensor: Any) -> _Value:
    if not (_is_small(tensor) and _comparable(tensor)):
        return _Value(tensor.clone())
    known = _newest.get(id(tensor))
    if known is not None and known[0]() is tensor:
        value = known[1]()
        if value is not None and _same_bits(tensor, value.tensor):
            return value
    key, value = id(tensor), _Value(tensor.clone())
    _newest[key] = (weakref.ref(tensor, lambda _: _newest.pop(key, None)), weakref.ref(value))
    return value


def sorted_out(before: Sequence[Copy]) -> tuple[list[Copy], list[Parameter]]:
    """The copies a replay needs, and the buffers that need none because the forward left them
    alone: those must stay as they are until the replay."""
    needed: list[Copy] = []
    untouched: list[Parameter] = []
    for copy in before:
        if copy.value is None or _is_small(copy.value.tensor) or _changed(copy):
            needed.append(copy)
        else:
            untouched.extend(copy.found)
    return needed, untouched


def _changed(copy: Copy) -> bool:
    if copy.value is None or any(
        item.owner.get(item.key) is not item.tensor or version_of(item.tensor) != item.version
        for item in copy.found
    ):
        return True
    first = copy.found[0].tensor
    if first.device.type != "cpu":
        return False
    if not _comparable(first):
        return True
    if len(copy.found) > 1:
        first = _span(first, copy.start, copy.start + copy.value.tensor.numel())
    return not _same_bits(first, copy.value.tensor)


def _is_small(tensor: Any) -> bool:
    return not storage_of(tensor) or tensor.nbytes <= SMALL_BYTES


def _comparable(tensor: Any) -> bool:
    return bool(
        storage_of(tensor)
        and tensor.device.type == "cpu"
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _same_bits(one: Any, other: Any) -> bool:
    # torch.equal takes -0.0 for 0.0, and no NaN for another: bits are what a replay reads.
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    with torch.no_grad():
        one, other = one.detach().contiguous(), other.detach().contiguous()
    return same_memory(one, other)


@contextmanager
def swapped_in(needed: Sequence[Copy], parameters: Sequence[Parameter]) -> Iterator[None]:
    """Within, the modules hold fresh copies of the buffers from before the forward, and the
    parameters they held then."""
    held: list[tuple[Any, str, Any]] = []
    try:
        with torch.no_grad():
            for copy in needed:
                for buffer, tensor in copy.fresh():
                    _swap(buffer.owner, buffer.key, tensor, held)
        for item in parameters:
            if item.owner is not None and _was_replaced(item, item.owner.get(item.key)):
                _swap(item.owner, item.key, item.tensor, held)
        yield
    finally:
        for owner, key, tensor in reversed(held):
            if tensor is _ABSENT:
                del owner[key]
            else:
                owner[key] = tensor


def _swap(owner: Any, key: str, tensor: Any, held: list[tuple[Any, str, Any]]) -> None:
    held.append((owner, key, owner.get(key, _ABSENT)))
    owner[key] = tensor


def _was_replaced(item: Parameter, now: Any) -> bool:
    # FSDP holds the sharded parameter outside and the whole one inside of forward and backward:
    # what is there now is right, and what was there is empty.
    sharded = hasattr(now, "to_local") or hasattr(item.tensor, "to_local")
    return now is not item.tensor and not sharded
