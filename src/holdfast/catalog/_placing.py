"""Between the record's placements and the geometry of grids and boxes. Knows no storage."""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.errors import CorruptedError
from holdfast.format import StoredCut, StoredPlacement, StoredTensor
from holdfast.reshard import Box, Grid, IndexRuns, boxes_met, check_coverage

MOST_PARTS: Final = 250_000
"""The most entries of one file."""


def placement_of_grid(grid: Grid, files: IndexRuns) -> StoredPlacement:
    """How the record writes a grid and the files of its cells."""
    cuts = tuple(
        StoredCut(step=cut) if isinstance(cut, int) else StoredCut(at=cut.runs) for cut in grid.cuts
    )
    return StoredPlacement(cuts=cuts, files=files.runs)


def placement_of_boxes(
    shape: tuple[int, ...], boxes: Sequence[Box], files: IndexRuns
) -> StoredPlacement:
    """As a grid if the boxes are one cut into rows, else box by box."""
    if len(boxes) == 1 and boxes[0].shape == shape:
        return StoredPlacement(cuts=tuple([StoredCut(step=n) for n in shape]), files=files.runs)
    inner = [box.start[0] for box in boxes[1:]]
    if all(box.start[1:] == boxes[0].start[1:] and box.stop[1:] == shape[1:] for box in boxes):
        rows = Grid.of_cuts(shape, [inner, *([] for _ in shape[1:])])
        if [rows.box(cell) for cell in range(rows.cells)] == list(boxes):
            return placement_of_grid(rows, files)
    pairs = tuple(tuple(zip(box.start, box.stop, strict=True)) for box in boxes)
    return StoredPlacement(boxes=pairs, files=files.runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBoxes:
    """The parts of one tensor: which boxes there are, and in which file each is."""

    tensor: StoredTensor
    files: IndexRuns
    grid: Grid | None
    boxes: tuple[Box, ...]

    @classmethod
    def of(cls, tensor: StoredTensor) -> "StoredBoxes":
        placement = tensor.placement
        files = IndexRuns(runs=placement.files)
        if placement.boxes is None:
            cuts = tuple(
                IndexRuns(runs=cut.at or ()) if cut.step is None else cut.step
                for cut in placement.cuts or ()
            )
            return cls(tensor=tensor, files=files, grid=Grid(tensor.shape, cuts), boxes=())
        boxes = tuple(
            Box(tuple(low for low, _ in box), tuple(high for _, high in box))
            for box in placement.boxes
        )
        return cls(tensor=tensor, files=files, grid=None, boxes=boxes)

    def within(self, wanted: Box) -> Iterator[tuple[Box, int]]:
        """Every stored box that shares an element with ``wanted``, and its file's index."""
        return boxes_met(wanted, self.boxes if self.grid is None else self.grid, self.files)

    def in_files(self, among: range, wanted: Container[int]) -> Iterator[tuple[Box, int]]:
        """Every box that is stored in one of the ``wanted`` files, and the file's index. These
        are neighbours, ``among``; boxes in other files cost nothing."""
        cell = 0
        for first, step, count in self.files.runs:
            if step or first in wanted:
                for nth in _members(first, step, count, among):
                    if first + step * nth in wanted:
                        yield self._box(cell + nth), first + step * nth
            cell += count

    def _box(self, cell: int) -> Box:
        return self.boxes[cell] if self.grid is None else self.grid.box(cell)

    def check(self, name: str, path: str) -> None:
        """``CorruptedError`` unless every element is stored exactly once, as it always is in a
        grid, and in files that can hold so many parts. Call this before any other method: work
        and memory are bounded only then."""
        if any(count > MOST_PARTS for _, step, count in self.files.runs if not step):
            raise CorruptedError(
                f"tensor {name!r} has more than {MOST_PARTS} parts in one file, which no file has",
                path=path,
            )
        problem = None if self.grid is not None else check_coverage(self.tensor.shape, self.boxes)
        if problem is not None:
            raise CorruptedError(
                f"tensor {name!r} is not stored exactly once: {problem}", path=path
            )


def _members(first: int, step: int, count: int, wanted: range) -> range:
    """Which members of the run ``first``, ``first + step``, ... are in ``wanted``."""
    if not step:
        return range(count if first in wanted else 0)
    low, high = (wanted.start, wanted.stop - 1) if step > 0 else (wanted.stop - 1, wanted.start)
    return range(max(0, -((first - low) // step)), min(count, (high - first) // step + 1))


def box_bounds(box: Box) -> tuple[tuple[int, int], ...]:
    return tuple(zip(box.start, box.stop, strict=True))
