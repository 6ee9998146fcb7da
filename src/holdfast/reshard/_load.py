"""Decides which bytes of stored boxes make up a wanted box. Knows no chunks, and reads nothing."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from holdfast.reshard._box import Box
from holdfast.reshard._grid import Grid
from holdfast.reshard._mesh import Part
from holdfast.reshard._ranges import CopyRuns, copy_to_part
from holdfast.reshard._runs import IndexRuns


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Of the stored box ``stored`` of ``file``, ``piece`` is wanted; ``copy`` puts it in place."""

    file: int
    stored: Box
    piece: Box
    copy: CopyRuns


def plan_load(
    wanted: Part, stored: Grid | Sequence[Box], files: IndexRuns, *, itemsize: int
) -> list[Load]:
    """What to read of a tensor for the part ``wanted`` of a rank's array.

    ``stored`` and ``files`` are its placement: boxes, and the file of each. Of a grid only the
    cells that ``wanted`` meets are looked at.
    """
    return [
        Load(file=file, stored=box, piece=piece, copy=copy_to_part(piece, box, wanted, itemsize))
        for box, file in boxes_met(wanted.box, stored, files)
        if (piece := box.intersect(wanted.box)) is not None
    ]


def boxes_met(
    wanted: Box, stored: Grid | Sequence[Box], files: IndexRuns
) -> Iterator[tuple[Box, int]]:
    """The stored boxes that share an element with ``wanted``, and the file of each."""
    boxes = stored.cells if isinstance(stored, Grid) else len(stored)
    if boxes != len(files):
        raise ValueError(f"there are {boxes} boxes and files for {len(files)}")
    if isinstance(stored, Grid):
        for cell in stored.cells_in(wanted):
            yield stored.box(cell), files[cell]
    else:
        for box, file in zip(stored, files, strict=True):
            if box.intersect(wanted) is not None:
                yield box, file
