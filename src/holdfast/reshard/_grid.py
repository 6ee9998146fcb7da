"""Knows how a tensor is cut into a grid of cells. Knows not who holds or where lies a cell."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from holdfast.reshard._box import Box, positions
from holdfast.reshard._runs import IndexRuns, Ints, sums

Cut = int | IndexRuns
"""How one dimension is cut: every ``step`` elements, or at these inner positions, which rise."""


@dataclass(frozen=True, slots=True)
class Grid:
    """A tensor of ``shape`` cut across every dimension; cells are numbered in row-major order.

    A dimension with one cell has its own size as step. A tensor without elements has one cell.
    Every element is in exactly one cell: that is all a grid can say, whatever its cuts. Cuts are
    never expanded: what is done with a grid costs by its runs, not by its cells.
    """

    shape: tuple[int, ...]
    cuts: tuple[Cut, ...]

    def __post_init__(self) -> None:
        positions(("shape", self.shape))
        if len(self.shape) != len(self.cuts):
            raise ValueError(f"cuts={self.cuts} do not fit the dimensions of shape={self.shape}")
        for size, cut in zip(self.shape, self.cuts, strict=True):
            _check_cut(size, cut)
        if 0 in self.shape and self.cells != 1:
            raise ValueError(f"shape={self.shape} has no elements and so one cell, not several")

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Self:
        """One cell."""
        return cls(shape, shape)

    @classmethod
    def of_cuts(cls, shape: tuple[int, ...], at: Sequence[Ints | list[int]]) -> Self:
        """The grid with these inner cut positions per dimension, in the form that records have:
        equal ones are a step, others the runs of ``IndexRuns.of``."""
        return cls(shape, tuple(map(_plainest, shape, at)))

    @property
    def counts(self) -> tuple[int, ...]:
        """How many cells along each dimension."""
        return tuple(map(_count, self.shape, self.cuts))

    @property
    def cells(self) -> int:
        """How many cells in all. Costs nothing, however many there are."""
        return math.prod(self.counts)

    def box(self, cell: int) -> Box:
        """The elements of a cell."""
        if not 0 <= cell < self.cells:
            raise IndexError(f"cell {cell} is not one of {self.cells}")
        bounds = []
        for dim in reversed(range(len(self.shape))):
            cell, index = divmod(cell, _count(self.shape[dim], self.cuts[dim]))
            bounds.append(self._bounds(dim, index))
        bounds.reverse()
        return Box(tuple(low for low, _ in bounds), tuple(high for _, high in bounds))

    def cells_in(self, box: Box) -> Iterator[int]:
        """The cells that share an element with ``box``, ascending; no other cell is looked at."""
        if not Box.whole(self.shape).contains(box):
            raise ValueError(f"{box} is not within shape={self.shape}")
        if box.is_empty:
            return
        first_cell, stride = 0, 1
        loops: list[range] = []
        for dim in reversed(range(len(self.shape))):
            first, last = self._touched(dim, box.start[dim], box.stop[dim])
            if last - first == 1:
                first_cell += first * stride
            else:
                loops.insert(0, range(first * stride, last * stride, stride))
            stride *= _count(self.shape[dim], self.cuts[dim])
        yield from sums(first_cell, loops)

    def _bounds(self, dim: int, index: int) -> tuple[int, int]:
        size, cut = self.shape[dim], self.cuts[dim]
        if isinstance(cut, int):
            return index * cut, min((index + 1) * cut, size)
        return (cut[index - 1] if index else 0), (cut[index] if index < len(cut) else size)

    def _touched(self, dim: int, start: int, stop: int) -> tuple[int, int]:
        cut = self.cuts[dim]
        if isinstance(cut, int):
            return start // cut, (stop - 1) // cut + 1
        return cut.below(start + 1), cut.below(stop) + 1


def _check_cut(size: int, cut: Cut) -> None:
    if isinstance(cut, int):
        if not min(size, 1) <= cut <= size:
            raise ValueError(f"a dimension of {size} cannot be cut every {cut} elements")
        return
    if not isinstance(cut, IndexRuns):
        raise ValueError(f"a cut is a step or IndexRuns, not {cut!r}")  # noqa: TRY004 -- as below
    low, high = cut.bounds
    if cut.runs and not (low > 0 and high < size and cut.rises):
        raise ValueError(f"cut positions must rise, between 0 and {size}, not be {cut.runs}")


def _count(size: int, cut: Cut) -> int:
    if isinstance(cut, int):
        return -(-size // cut) if cut else 1
    return len(cut) + 1


def _plainest(size: int, at: Ints | list[int]) -> Cut:
    cut = IndexRuns.of(at)
    match cut.runs:
        case ():
            return size
        case ((first, step, count),) if count == 1 or step == first:
            if first * count < size <= first * (count + 1):
                return first
    return cut
