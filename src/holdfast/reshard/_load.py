"""Decides what is read for a wanted box, and into which reads it is gathered. Reads nothing."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from holdfast.reshard._box import Box
from holdfast.reshard._coalesce import chunk_spans, coalesce
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Where the ``nbytes`` raw bytes of a stored box are in a file, and which are wanted."""

    file: int
    offset: int
    nbytes: int
    wanted: ByteRuns


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRun:
    """Chunks ``first`` up to, not including, ``last`` of the stored box number ``item``."""

    item: int
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """Bytes ``start`` to ``stop`` of a file, read at once, and the whole chunks in them."""

    file: int
    start: int
    stop: int
    chunks: tuple[ChunkRun, ...]


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


def plan_reads(
    items: Sequence[Stored], *, chunk_bytes: int, max_gap: int, max_bytes: int
) -> list[Read]:
    """Everything wanted, of many tensors, as few reads, by file and then by offset.

    Chunks are what can be verified, so they are read whole; a read holds no part of one, except
    bytes it only reads over. None is longer than ``max_bytes``, which is at least a chunk.
    """
    if max_bytes < chunk_bytes:
        raise ValueError(f"max_bytes={max_bytes} is less than chunk_bytes={chunk_bytes}")
    most = max_bytes // chunk_bytes
    by_file: dict[int, list[tuple[int, int, ChunkRun]]] = {}
    for number, item in enumerate(items):
        # A gap shorter than a chunk holds no whole one, so the chunks touched stay the same.
        runs = item.wanted.merged(chunk_bytes - 1)
        for begin, end in chunk_spans(item.nbytes, chunk_bytes, runs):
            for first in range(begin, end, most):
                last = min(first + most, end)
                low, high = first * chunk_bytes, min(last * chunk_bytes, item.nbytes)
                run = ChunkRun(item=number, first=first, last=last)
                by_file.setdefault(item.file, []).append((item.offset + low, high - low, run))
    return [
        Read(
            file=file,
            start=span.start,
            stop=span.stop,
            chunks=tuple(found[member][2] for member in span.members),
        )
        for file, found in sorted(by_file.items())
        for span in coalesce(
            [(offset, nbytes) for offset, nbytes, _ in found],
            max_gap=max_gap,
            max_bytes=max_bytes,
        )
    ]
