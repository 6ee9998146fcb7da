"""The buffers and parameters a module held in a region's forward. Knows how to swap them in for
a replay, so that what it holds now is neither seen nor touched by it.

A parameter that was replaced since (by ``setattr``, or because ``functional_call`` had put it
there for the forward) is swapped in as it is; of a buffer, a copy of its value.

BatchNorm writes its running statistics without moving their version counter, so a change is
found by comparing bits. Small buffers are not compared at all: their copy is kept and used.
On accelerators a comparison would wait for the device; there a large buffer's copy is kept
only if its version counter moved.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from holdfast.activation._regions.reach import Buffer, Parameter, as_found, version_of

SMALL_BYTES = 64 * 1024


class Copy(NamedTuple):
    """A buffer, as it was found, and its value then."""

    buffer: Buffer
    found: Parameter | None  # None: the module had the name, but nothing under it
    value: Any


def copies(buffers: Sequence[Buffer]) -> list[Copy]:
    """Of the buffers as they are now."""
    if not buffers:
        return []
    with torch.no_grad():
        return [
            Copy(buffer, None, None)
            if buffer.tensor is None
            else Copy(
                buffer, as_found(buffer.tensor, buffer.owner, buffer.key), buffer.tensor.clone()
            )
            for buffer in buffers
        ]


def sorted_out(before: Sequence[Copy]) -> tuple[list[Copy], list[Parameter]]:
    """The copies a replay needs, and the buffers that need none because the forward left them
    alone: those must stay as they are until the replay."""
    needed: list[Copy] = []
    untouched: list[Parameter] = []
    for copy in before:
        if copy.found is None or copy.value.nbytes <= SMALL_BYTES or _changed(copy, copy.found):
            needed.append(copy)
        else:
            untouched.append(copy.found)
    return needed, untouched


def _changed(copy: Copy, found: Parameter) -> bool:
    now = copy.buffer.owner.get(copy.buffer.key)
    if now is not found.tensor or version_of(now) != found.version:
        return True
    return now.device.type == "cpu" and not _same_bits(now, copy.value)


def _same_bits(one: Any, other: Any) -> bool:
    # torch.equal takes -0.0 for 0.0, and no NaN for another: bits are what a replay reads.
    with torch.no_grad():
        return one.layout is torch.strided and bool(torch.equal(_bits(one), _bits(other)))


def _bits(tensor: Any) -> Any:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@contextmanager
def swapped_in(needed: Sequence[Copy], parameters: Sequence[Parameter]) -> Iterator[None]:
    """Within, the modules hold fresh copies of the buffers from before the forward, and the
    parameters they held then."""
    held: list[tuple[Any, str, Any]] = []
    try:
        with torch.no_grad():
            for copy in needed:
                fresh = None if copy.value is None else copy.value.clone()
                _swap(copy.buffer.owner, copy.buffer.key, fresh, held)
        for item in parameters:
            if item.owner is not None and _was_replaced(item, item.owner.get(item.key)):
                _swap(item.owner, item.key, item.tensor, held)
        yield
    finally:
        for owner, key, tensor in reversed(held):
            owner[key] = tensor


def _swap(owner: Any, key: str, tensor: Any, held: list[tuple[Any, str, Any]]) -> None:
    held.append((owner, key, owner.get(key)))
    owner[key] = tensor


def _was_replaced(item: Parameter, now: Any) -> bool:
    # FSDP holds the sharded parameter outside and the whole one inside of forward and backward:
    # what is there now is right, and what was there is empty.
    sharded = hasattr(now, "to_local") or hasattr(item.tensor, "to_local")
    return now is not item.tensor and not sharded
