"""The level of live bytes over the course of a call, cut into stretches by marks. Knows when it is
told of a mark, not what the mark means.

On the CPU the level is known after every torch call, on CUDA at the marks: its allocator keeps the
peak between two of them.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.activation._measuring.meter import LevelMeter, residents

What = tuple[str, int] | str
"""What a mark is: an event and whose, or just an event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """What lies between two marks: the one that ends it, the highest level, the level at its end,
    and how many levels were noted until then."""

    ends_at: What
    peak_bytes: int
    level_bytes: int
    noted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """A call's stretches in order, and every level that was noted; over the level at its start."""

    stretches: tuple[Stretch, ...]
    levels: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        return max((each.peak_bytes for each in self.stretches), default=0)


END = "end"
"""The mark that ends the last stretch."""

Marker = Callable[[What], None]


def record_course(
    call: Callable[[Marker], object], device: Any, there: Iterable[weakref.ref[Any]] | None = None
) -> Course:
    """Run ``call(mark)``; each ``mark(what)`` ends a stretch. ``there`` is what ``residents`` found
    before, if that was not long ago: looking around takes its time."""
    found: list[Stretch] = []
    with _on_cuda(device) if device.type == "cuda" else _on_cpu(there) as (read, levels):

        def mark(what: What) -> None:
            peak, level = read()
            found.append(
                Stretch(ends_at=what, peak_bytes=peak, level_bytes=level, noted=len(levels))
            )

        call(mark)
        mark(END)
    return Course(stretches=tuple(found), levels=tuple(levels))


Reading = tuple[Callable[[], tuple[int, int]], list[int]]


@contextlib.contextmanager
def _on_cpu(there: Iterable[weakref.ref[Any]] | None) -> Iterator[Reading]:
    meter = LevelMeter()
    meter.know(residents() if there is None else there)
    levels = meter.levels
    seen = 0

    def read() -> tuple[int, int]:
        nonlocal seen
        level = meter.level_now()
        peak = max([level, *levels[seen:]])
        seen = len(levels)
        return peak, level

    with meter:
        yield read, levels


@contextlib.contextmanager
def _on_cuda(device: Any) -> Iterator[Reading]:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    start = torch.cuda.memory_allocated(device)
    levels: list[int] = []

    def read() -> tuple[int, int]:
        peak = torch.cuda.max_memory_allocated(device) - start
        level = torch.cuda.memory_allocated(device) - start
        torch.cuda.reset_peak_memory_stats(device)
        levels.extend((peak, level))
        return peak, level

    yield read, levels
