"""Which chunks a wanted box needs, and how its elements get from them to the caller's memory. Pure.

Chunks are read whole, because only whole chunks can be verified; nothing else is read.
"""

from collections.abc import Iterator
from typing import Final

import msgspec

from holdfast.format import CHUNK_BYTES
from holdfast.reshard import Box, CopyRuns, Part, chunk_spans, copy_to_part, row_runs

BATCH_BYTES: Final = 8 * 1024 * 1024
"""About how much is read at once by one thread, and so how much scratch memory each needs."""

_CHUNKS: Final = BATCH_BYTES // CHUNK_BYTES


class Piece(msgspec.Struct, frozen=True, gc=False):
    """Chunks ``first`` to ``last``, the latter not included, of one entry, to be read together.

    Without ``copy`` they belong as they are at ``dst_offset`` of the wanted box's memory.
    Otherwise they are read into scratch memory that starts where the first chunk does, and
    copied. There are very many.
    """

    first: int
    last: int
    dst_offset: int
    copy: CopyRuns | None = None


def plan_box(raw_bytes: int, stored: Box, wanted: Part, itemsize: int) -> Iterator[Piece]:
    """How the elements that ``stored`` and ``wanted`` share are read from the entry that holds
    ``stored`` in ``raw_bytes``."""
    if (stored is wanted.box or stored == wanted.box) and stored.shape == wanted.array_shape:
        chunks = -(-raw_bytes // CHUNK_BYTES)
        for at in range(0, chunks, _CHUNKS):
            last = min(at + _CHUNKS, chunks)
            yield Piece(at, last, at * CHUNK_BYTES)
        return
    shared = stored.intersect(wanted.box)
    if shared is None:
        return
    whole = copy_to_part(shared, stored, wanted, itemsize)
    if len(whole) == 1:
        yield from _contiguous(raw_bytes, whole)
        return
    for block, run in _blocks(shared, stored, itemsize):
        ((first, last),) = chunk_spans(raw_bytes, CHUNK_BYTES, [run])
        yield Piece(
            first=first,
            last=last,
            dst_offset=0,
            copy=copy_to_part(block, stored, wanted, itemsize),
        )


def _contiguous(raw_bytes: int, whole: CopyRuns) -> Iterator[Piece]:
    start, stop = whole.src_offset, whole.src_offset + whole.nbytes
    to_dst = whole.dst_offset - start
    ((first, last),) = chunk_spans(raw_bytes, CHUNK_BYTES, [(start, whole.nbytes)])
    if start % CHUNK_BYTES and first + 1 < last:
        yield _edge(start, (first + 1) * CHUNK_BYTES, to_dst)
        first, start = first + 1, (first + 1) * CHUNK_BYTES
    full_stop = stop if stop == raw_bytes else stop // CHUNK_BYTES * CHUNK_BYTES
    if start % CHUNK_BYTES == 0 and full_stop > start:
        full_last = -(-full_stop // CHUNK_BYTES)
        for at in range(first, full_last, _CHUNKS):
            last = min(at + _CHUNKS, full_last)
            yield Piece(first=at, last=last, dst_offset=at * CHUNK_BYTES + to_dst)
        start = full_stop
    if start < stop:
        yield _edge(start, stop, to_dst)


def _edge(start: int, stop: int, to_dst: int) -> Piece:
    """Some of the bytes of one chunk."""
    chunk = start // CHUNK_BYTES
    return Piece(
        first=chunk,
        last=chunk + 1,
        dst_offset=0,
        copy=CopyRuns(
            src_offset=start,
            dst_offset=start + to_dst,
            nbytes=stop - start,
            counts=(),
            src_strides=(),
            dst_strides=(),
        ),
    )


def _blocks(box: Box, stored: Box, itemsize: int) -> Iterator[tuple[Box, tuple[int, int]]]:
    """``box`` in parts, and the bytes ``(offset, nbytes)`` of the stored box that each lies in:
    at most ``BATCH_BYTES`` of them, and no chunk that is not needed."""
    runs = row_runs(box, stored, itemsize).merged(CHUNK_BYTES - 1)
    if (len(runs) == 1 and runs.nbytes <= BATCH_BYTES) or box.size == 1:
        yield box, (runs.offset, runs.nbytes)
        return
    dim = next(dim for dim, size in enumerate(box.shape) if size > 1)
    middle = (box.start[dim] + box.stop[dim]) // 2
    yield from _blocks(
        Box(box.start, (*box.stop[:dim], middle, *box.stop[dim + 1 :])), stored, itemsize
    )
    yield from _blocks(
        Box((*box.start[:dim], middle, *box.start[dim + 1 :]), box.stop), stored, itemsize
    )
