"""Decides which bytes of stored boxes make up a wanted box. Knows no chunks, and reads nothing."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from holdfast.reshard._box import Box
from holdfast.reshard._grid import Grid
from holdfast.reshard._mesh import Part
from holdfast.reshard._ranges import ByteRuns, CopyRuns, copy_to_part
from holdfast.reshard._runs import IndexRuns


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Of the stored box ``stored`` of ``file``, ``piece`` is wanted; ``copy`` puts it in place."""

    file: int
    stored: Box
    piece: Box
    copy: CopyRuns

    @property
    def source(self) -> ByteRuns:
        """The bytes of the stored box that are wanted."""
        return ByteRuns(
            offset=self.copy.src_offset,
            nbytes=self.copy.nbytes,
            counts=self.copy.counts,
            strides=self.copy.src_strides,
        )


def plan_load(
    wanted: Part, stored: Grid | Sequence[Box], files: IndexRuns, *, itemsize: int
) -> list[Load]:
    """What to read of a tensor for the part ``wanted`` of a rank's array.

    ``stored`` and ``files`` are its placement: boxes, and the file of each. Of a grid only the
    cells that ``wanted`` meets are looked at.
    """
    boxes = stored.cells if isinstance(stored, Grid) else len(stored)
    if boxes != len(files):
        raise ValueError(f"there are {boxes} boxes and files for {len(files)}")
    return [
        Load(
            file=files[index],
            stored=box,
            piece=piece,
            copy=copy_to_part(piece, box, wanted, itemsize),
        )
        for index, box in _met(wanted.box, stored)
        if (piece := box.intersect(wanted.box)) is not None
    ]


def _met(wanted: Box, stored: Grid | Sequence[Box]) -> Iterator[tuple[int, Box]]:
    if isinstance(stored, Grid):
        for cell in stored.cells_in(wanted):
            yield cell, stored.box(cell)
    else:
        yield from enumerate(stored)
