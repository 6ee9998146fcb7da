"""How tensors are cut into blocks that fit a cache. Knows sizes and memory, and no optimizer.

A block is cast to FP32 into one scratch that is used again for the next, and everything that is to
be done with it is done while it is there: no FP32 copy of all gradients ever exists.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import torch

BLOCK: Final = 1 << 19
"""Elements of a block: what Adam touches of it is 11 MiB, which a last cache holds. Of smaller
ones the calls cost more than a nearer cache gains."""

FUSED_BLOCK: Final = 2 * BLOCK
"""The same where torch's kernels step, each of which touches a block once: those lose less to a
farther cache than they gain by fewer calls."""

LANES: Final = 64
"""Elements that any kernel takes at once, or a multiple of them."""


Tensors = list[torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Some elements of one tensor of a list."""

    item: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@functools.lru_cache(maxsize=64)  # the sizes are the same in every step
def blocks_of(sizes: tuple[int, ...], limit: int = BLOCK) -> list[tuple[Span, ...]]:
    """All elements of tensors of these sizes, in order, as blocks of at most ``limit``: large
    tensors are cut, small ones are put together.

    A cut is a multiple of ``LANES`` from the tensor's beginning: what a kernel does one by one at
    the end of a part, with other bits, is done so at the end of the tensor only, as without cuts.
    """
    blocks: list[tuple[Span, ...]] = []
    held: list[Span] = []
    room = limit
    for item, size in enumerate(sizes):
        start = 0
        while start < size:
            taken = size - start if size - start <= room else room - room % LANES
            if not taken:
                blocks.append(tuple(held))
                held, room = [], limit
                continue
            held.append(Span(item=item, start=start, stop=start + taken))
            start += taken
            room -= taken
    return [*blocks, tuple(held)] if held else blocks


def cut(tensors: Sequence[torch.Tensor], blocks: Sequence[Sequence[Span]]) -> list[Tensors]:
    """The parts of flat tensors that are in each block."""
    sizes: list[list[int]] = [[] for _ in tensors]
    for spans in blocks:
        for span in spans:
            sizes[span.item].append(span.size)
    parts: list[torch.Tensor] = []
    for tensor, own in zip(tensors, sizes, strict=True):
        if len(own) == 1:
            parts.append(tensor)
        elif own:
            parts += torch.split_with_sizes(tensor, own)
    following = iter(parts)
    return [[next(following) for _ in spans] for spans in blocks]


def part(tensor: torch.Tensor, span: Span) -> torch.Tensor:
    """That part of a flat tensor, as a view."""
    return tensor[span.start : span.stop]


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements lie in memory without gaps or overlaps, in whatever order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in the order of memory, as a view."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def laid_as(tensor: torch.Tensor, pattern: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of it, whose elements lie in memory as those of ``pattern``."""
    if tensor.stride() == pattern.stride():
        return tensor
    copy = torch.empty_strided(
        pattern.shape, pattern.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return copy.copy_(tensor)


@final
class Scratch:
    """FP32 memory that is used again and again. What it held is gone with the next ``take``."""

    def __init__(self) -> None:
        self._held: dict[torch.device, torch.Tensor] = {}

    def take(self, spans: Sequence[Span], device: torch.device) -> Tensors:
        """Memory for each span, one after the other."""
        sizes = [span.size for span in spans]
        held = self.all(sum(sizes), device)
        return [held] if len(sizes) == 1 else list(torch.split_with_sizes(held, sizes))

    def all(self, size: int, device: torch.device) -> torch.Tensor:
        """Memory for so many elements; what ``take`` gave for as many, in one."""
        held = self._held.get(device)
        if held is None or held.numel() < size:
            held = self._held[device] = torch.empty(size, dtype=torch.float32, device=device)
        return held if held.numel() == size else held[:size]
