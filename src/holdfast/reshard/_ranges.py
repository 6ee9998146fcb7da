"""Knows where a box lies in the row-major bytes of another. Reads and copies nothing."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.reshard._box import Box
from holdfast.reshard._mesh import Part, row_major
from holdfast.reshard._runs import sums


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteRuns:
    """Equal runs of ``nbytes``, as nested loops of ``counts``, outermost first, ``strides`` apart.

    Iterates over ``(offset, nbytes)``, ascending; ``len`` is how many. Neighbours are merged, so
    a box that is contiguous is one run.
    """

    offset: int
    nbytes: int
    counts: tuple[int, ...]
    strides: tuple[int, ...]

    def __len__(self) -> int:
        return math.prod(self.counts)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for offset in _offsets(self.offset, self.counts, self.strides):
            yield offset, self.nbytes

    def merged(self, max_gap: int) -> "ByteRuns":
        """Runs that also take in the gaps of at most ``max_gap`` bytes between these."""
        nbytes = self.nbytes
        counts, strides = list(self.counts), list(self.strides)
        while counts and counts[-1] and strides[-1] - nbytes <= max_gap:
            nbytes += (counts.pop() - 1) * strides.pop()
        return ByteRuns(
            offset=self.offset, nbytes=nbytes, counts=tuple(counts), strides=tuple(strides)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRuns:
    """Equal runs to be copied from one buffer to another, nested as in ``ByteRuns``.

    Iterates over ``(src_offset, dst_offset, nbytes)``. Where runs are many and short, copy by
    strided views of both buffers instead: counts and strides describe them.
    """

    src_offset: int
    dst_offset: int
    nbytes: int
    counts: tuple[int, ...]
    src_strides: tuple[int, ...]
    dst_strides: tuple[int, ...]

    def __len__(self) -> int:
        return math.prod(self.counts)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        for src, dst in zip(
            _offsets(self.src_offset, self.counts, self.src_strides),
            _offsets(self.dst_offset, self.counts, self.dst_strides),
            strict=True,
        ):
            yield src, dst, self.nbytes


def row_runs(box: Box, within: Box, itemsize: int) -> ByteRuns:
    """Where ``box`` lies in the row-major bytes of ``within``, which must contain it."""
    start, strides = _seen_from(box.relative_to(within), within.shape, itemsize)
    nbytes, counts, (nested,) = _nest(box.shape, itemsize, strides)
    return ByteRuns(offset=start, nbytes=nbytes, counts=counts, strides=nested)


def copy_to_part(piece: Box, src: Box, dst: Part, itemsize: int) -> CopyRuns:
    """How ``piece`` goes from the bytes of the box ``src`` to those of the array that ``dst`` is a
    part of; both contain it."""
    inner = piece.relative_to(dst.box)
    local = Box(
        tuple(a + b for a, b in zip(inner.start, dst.local.start, strict=True)),
        tuple(a + b for a, b in zip(inner.stop, dst.local.start, strict=True)),
    )
    src_start, src_strides = _seen_from(piece.relative_to(src), src.shape, itemsize)
    dst_start, dst_strides = _seen_from(local, dst.array_shape, itemsize)
    nbytes, counts, nested = _nest(piece.shape, itemsize, src_strides, dst_strides)
    return CopyRuns(
        src_offset=src_start,
        dst_offset=dst_start,
        nbytes=nbytes,
        counts=counts,
        src_strides=nested[0],
        dst_strides=nested[1],
    )


def _seen_from(box: Box, shape: tuple[int, ...], itemsize: int) -> tuple[int, list[int]]:
    """Byte offset of the box's first element, and the strides of an array of that shape."""
    if itemsize < 1:
        raise ValueError(f"itemsize must be at least 1, not {itemsize!r}")
    strides = [itemsize * step for step in row_major(shape)]
    return sum(at * stride for at, stride in zip(box.start, strides, strict=True)), strides


def _nest(
    shape: tuple[int, ...], itemsize: int, *arrays: list[int]
) -> tuple[int, tuple[int, ...], list[tuple[int, ...]]]:
    """The fewest loops over a box of that shape: bytes of a run, counts, strides per array.

    Two dimensions are one loop where, in every array, the outer one steps on exactly where the
    inner one ends.
    """
    if 0 in shape:
        return 0, (0,), [(0,) for _ in arrays]
    loops: list[tuple[int, tuple[int, ...]]] = [(1, (itemsize,) * len(arrays))]
    for extent, strides in zip(
        reversed(shape), zip(*map(reversed, arrays), strict=True), strict=True
    ):
        count, inner = loops[-1]
        if extent == 1:
            continue
        if all(stride == count * step for stride, step in zip(strides, inner, strict=True)):
            loops[-1] = (extent * count, inner)
        else:
            loops.append((extent, strides))
    outer = loops[:0:-1]
    counts = tuple(count for count, _ in outer)
    nested = [tuple(strides[i] for _, strides in outer) for i in range(len(arrays))]
    return loops[0][0] * itemsize, counts, nested


def _offsets(first: int, counts: tuple[int, ...], strides: tuple[int, ...]) -> Iterator[int]:
    if 0 in counts:
        return
    loops = [
        range(0, count * stride, stride) for count, stride in zip(counts, strides, strict=True)
    ]
    yield from sums(first, loops)
