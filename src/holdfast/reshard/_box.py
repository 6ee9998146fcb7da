"""Knows a box, the half-open ranges of one block of an array. Knows no tensors and no bytes."""

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Box:
    """The elements from ``start`` up to, not including, ``stop``, dimension by dimension.

    A box of no dimensions is one element, as a 0-d array is.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        start, stop = self.start, self.stop
        if type(start) is tuple and type(stop) is tuple and len(start) == len(stop):
            for low, high in zip(start, stop, strict=True):
                if type(low) is not int or type(high) is not int or not 0 <= low <= high:
                    break
            else:
                return
        _check_bounds(start, stop)

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Self:
        """All of an array of that shape."""
        return cls((0,) * len(shape), shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(operator.sub, self.stop, self.start))

    @property
    def size(self) -> int:
        """How many elements."""
        return math.prod(self.shape)

    @property
    def is_empty(self) -> bool:
        for low, high in zip(self.start, self.stop, strict=True):  # noqa: SIM110 -- often called
            if low == high:
                return True
        return False

    def intersect(self, other: "Box") -> "Box | None":
        """The elements in both, or ``None`` if there are none."""
        self._same_dimensions(other)
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        for low, high in zip(start, stop, strict=True):
            if low >= high:
                return None
        return Box(start, stop)

    def contains(self, other: "Box") -> bool:
        """Whether ``other`` lies within the bounds of this box; an empty one must, too."""
        self._same_dimensions(other)
        for low, inner_low, inner_high, high in zip(
            self.start, other.start, other.stop, self.stop, strict=True
        ):
            if inner_low < low or high < inner_high:
                return False
        return True

    def relative_to(self, outer: "Box") -> "Box":
        """This box counted from the start of ``outer``, which must contain it."""
        if not outer.contains(self):
            raise ValueError(f"{self} is not within {outer}")
        return Box(
            tuple(map(operator.sub, self.start, outer.start)),
            tuple(map(operator.sub, self.stop, outer.start)),
        )

    def _same_dimensions(self, other: "Box") -> None:
        if len(self.start) != len(other.start):
            raise ValueError(f"{self} and {other} differ in dimensions")


def positions(*named: tuple[str, object]) -> None:
    """Refuse what is not a tuple of whole numbers, 0 or more."""
    for name, values in named:
        if not isinstance(values, tuple) or not all(map(_is_position, values)):
            raise ValueError(f"{name} must be a tuple of whole numbers >= 0, not {values!r}")


def _is_position(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_bounds(start: tuple[int, ...], stop: tuple[int, ...]) -> None:
    positions(("start", start), ("stop", stop))
    if len(start) != len(stop):
        raise ValueError(f"start={start} and stop={stop} differ in dimensions")
    for low, high in zip(start, stop, strict=True):
        if low > high:
            raise ValueError(f"start={start} is past stop={stop}")


def split_box(box: Box, max_elements: int) -> list[Box]:
    """``box`` in pieces of at most ``max_elements``, in row-major order.

    Every piece is contiguous in the row-major storage of ``box``, and one follows the other:
    together they are the storage. A box that is small enough, or empty, is its own one piece.
    """
    if max_elements < 1:
        raise ValueError(f"max_elements must be at least 1, not {max_elements!r}")
    return list(_pieces(box, max_elements))


def _pieces(box: Box, max_elements: int) -> Iterator[Box]:
    if box.size <= max_elements:
        yield box
        return
    dim = next(d for d, extent in enumerate(box.shape) if extent > 1)
    row = box.size // box.shape[dim]
    rows = max(1, max_elements // row)
    low, high = box.start[dim], box.stop[dim]
    for first in range(low, high, rows):
        piece = Box(
            (*box.start[:dim], first, *box.start[dim + 1 :]),
            (*box.stop[:dim], min(first + rows, high), *box.stop[dim + 1 :]),
        )
        yield from _pieces(piece, max_elements)
