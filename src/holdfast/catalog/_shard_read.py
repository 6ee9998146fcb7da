"""Opens a shard that may be anything, and reads chunks that are proven to be what was written.

Knows one file at a time; which chunks are wanted is decided elsewhere.
"""

import contextlib
import itertools
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from holdfast.contracts import ReadRange, Storage
from holdfast.errors import CorruptedError, LoadError
from holdfast.format import (
    CHUNK_BYTES,
    ChunkTable,
    PlacedEntry,
    ShardLayout,
    StoredFile,
    decompress_chunk,
    digest,
    file_digest,
    header_bytes_needed,
    parse_shard_header,
    parse_table,
)
from holdfast.storage._pages import Buffers

MAX_TABLE_BYTES: Final = 256 * 1024 * 1024
"""The most that is read of a chunk table: that of a file of 4 TiB."""

_FIRST_BYTES: Final = 64 * 1024
_LONG_BYTES: Final = 64 * 1024
_BUFFER_FROM_BYTES: Final = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenShard:
    """A shard whose header and table are the ones the commit record names."""

    key: str
    layout: ShardLayout
    table: ChunkTable = field(repr=False)


def open_shard(storage: Storage, key: str, expected: StoredFile) -> OpenShard:
    """``CorruptedError`` if the file is of another size, or its header or table are not what the
    commit record says they were. ``ObjectNotFoundError`` if it, or its table beside it, is
    missing, ``LoadError`` if there is no memory for its header or table."""
    size = storage.stat(key).size_bytes
    if size != expected.size_bytes:
        raise CorruptedError(
            f"a file of the checkpoint has {size} bytes, but {expected.size_bytes} were written; "
            "load another checkpoint",
            path=key,
        )
    header = read_bytes(storage, key, 0, min(size, _FIRST_BYTES))
    needed = header_bytes_needed(header, size, path=key)
    if needed > len(header):
        header += read_bytes(storage, key, len(header), needed - len(header))
    layout = parse_shard_header(header[:needed], size, path=key)
    if not layout.is_holdfast:
        raise CorruptedError(
            "this file was not written by holdfast; load another checkpoint", path=key
        )
    if layout.table_bytes > MAX_TABLE_BYTES:
        raise LoadError(
            f"the chunk table of a file is said to have {layout.table_bytes} bytes; at most "
            f"{MAX_TABLE_BYTES} are read",
            path=key,
        )
    table_key = _table_key(storage, key, layout, expected)
    table = read_bytes(storage, table_key, layout.table_offset, layout.table_bytes)
    if file_digest(layout.header, table).hex() != expected.digest:
        raise CorruptedError(
            "the header or chunk table of a file is not the one that was written; load another "
            "checkpoint",
            path=key,
        )
    return OpenShard(key=key, layout=layout, table=parse_table(layout, table, path=key))


def _table_key(storage: Storage, key: str, layout: ShardLayout, expected: StoredFile) -> str:
    """The object that holds the table, the file itself or the one that the record names."""
    if layout.table_beside is not (expected.table is not None):
        raise CorruptedError(
            "the header of a file and the commit record do not agree on where its chunk table is; "
            "load another checkpoint",
            path=key,
        )
    if expected.table is None:
        return key
    table_key = f"{key.rpartition('/')[0]}/{expected.table}"
    size = storage.stat(table_key).size_bytes
    if size != layout.table_bytes:
        raise CorruptedError(
            f"the chunk table of a file has {size} bytes, but {layout.table_bytes} were written; "
            "load another checkpoint",
            path=table_key,
        )
    return table_key


def read_bytes(storage: Storage, key: str, start: int, nbytes: int) -> bytearray:
    try:
        data = bytearray(nbytes)
    except MemoryError as error:
        raise LoadError(
            f"there is no memory for the {nbytes} bytes that describe a file", path=key
        ) from error
    storage.read_into(key, [ReadRange(start=start, into=memoryview(data))])
    return data


class ChunkRun(msgspec.Struct, frozen=True, gc=False):
    """Chunks ``first`` to ``last``, the latter not included, of an entry, and the memory that is
    to hold their raw bytes, if they are wanted and not only to be looked at. There are very
    many."""

    shard: OpenShard
    placed: PlacedEntry
    first: int
    last: int
    into: memoryview | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BadChunk:
    """A chunk whose bytes are not the ones that were written."""

    key: str
    entry: str
    tensor: str
    start: int
    stop: int
    problem: str

    @property
    def description(self) -> str:
        return f"bytes {self.start} to {self.stop} of {self.entry!r} {self.problem}"

    def error(self) -> CorruptedError:
        return CorruptedError(
            f"tensor {self.tensor!r} is damaged: {self.description}; load another checkpoint",
            path=self.key,
        )


def run_bytes(placed: PlacedEntry, first: int, last: int) -> int:
    """How many raw bytes these chunks of an entry have."""
    return min(last * CHUNK_BYTES, placed.raw_bytes) - first * CHUNK_BYTES


def read_runs(
    storage: Storage, runs: Sequence[ChunkRun], buffers: Buffers | None = None
) -> list[BadChunk]:
    """Fill every run, all of one shard, in one request to the storage. Returns the chunks that
    are damaged; what is in memory for those is not to be used.

    Long runs that are wanted are read to where they belong. Short ones, frames, and what is only
    looked at are read together with their neighbours in the file: thousands of short ranges are
    work for a storage. That takes memory: one of ``buffers`` for the first that is long, so that no
    batch takes more than one.
    """
    spans = [_stored_span(run) for run in runs]
    wanted: list[ReadRange] = []
    stored: list[memoryview | None] = []
    with contextlib.ExitStack() as lent:
        for first, last in _neighbours(spans):
            start, stop = spans[first].start, spans[last - 1].stop
            into = runs[first].into
            if spans[first].direct and into is not None:  # the latter for mypy: both say the same
                memory = into
                stored.append(None)
            else:
                memory, buffers = _scratch(start, stop, buffers, lent)
                stored += [memory[low - start : high - start] for low, high, _ in spans[first:last]]
            wanted.append(ReadRange(start=start, into=memory))
        storage.read_into(runs[0].shard.key, wanted)
        bad: list[BadChunk] = []
        for run, read in zip(runs, stored, strict=True):
            bad += _check(run, _raw(run, read), read)
        return bad


def _scratch(
    start: int, stop: int, buffers: Buffers | None, lent: contextlib.ExitStack
) -> tuple[memoryview, Buffers | None]:
    """Memory for these bytes of a file, and where the next may be taken from. That of a buffer lies
    to its pages as they to the file's, so that a disk can be read straight to it."""
    skipped = start % mmap.PAGESIZE
    if buffers is None or not _BUFFER_FROM_BYTES <= stop - start <= buffers.nbytes - skipped:
        return memoryview(bytearray(stop - start)), buffers
    buffer = buffers.take()
    lent.callback(buffers.give, buffer)
    return buffer[skipped : skipped + stop - start], None


def _raw(run: ChunkRun, stored: memoryview | None) -> memoryview:
    """Where the raw bytes of a run are, or are to be decompressed to."""
    if run.placed.codec is not None or stored is None:
        if run.into is not None:
            return run.into
        return memoryview(bytearray(run_bytes(run.placed, run.first, run.last)))
    if run.into is None:
        return stored
    run.into[:] = stored
    return run.into


class _Span(NamedTuple):
    """Where a run is stored in the file, and whether it is read to where it belongs."""

    start: int
    stop: int
    direct: bool


def _stored_span(run: ChunkRun) -> _Span:
    if run.placed.codec is None:
        start = run.placed.offset + run.first * CHUNK_BYTES
        size = run_bytes(run.placed, run.first, run.last)
        return _Span(start, start + size, size >= _LONG_BYTES and run.into is not None)
    offsets = run.shard.table.frame_offsets_of(run.placed)
    return _Span(offsets[run.first], offsets[run.last], False)


def _neighbours(spans: Sequence[_Span]) -> Iterator[tuple[int, int]]:
    """The numbers, from the first up to the last, of runs to be read together."""
    first = 0
    for nth, (before, span) in enumerate(itertools.pairwise(spans), 1):
        if span.start != before.stop or span.direct or before.direct:
            yield first, nth
            first = nth
    yield first, len(spans)


def _check(run: ChunkRun, into: memoryview, stored: memoryview | None) -> list[BadChunk]:
    """The chunks that are damaged. Frames, which are in ``stored``, are decompressed to where the
    others are."""
    table, placed = run.shard.table, run.placed
    sizes = table.frames_of(placed)
    bad = []
    at = 0
    for chunk in range(run.first, run.last):
        start = (chunk - run.first) * CHUNK_BYTES
        raw = into[start : start + CHUNK_BYTES]
        problem = None
        if sizes and stored is not None:
            problem = _decompress(run, stored[at : at + sizes[chunk]], raw)
            at += sizes[chunk]
        if problem is None and digest(raw) != table.digest_of(placed, chunk):
            problem = "are not what was written"
        if problem is not None:
            first = chunk * CHUNK_BYTES
            bad.append(
                BadChunk(
                    key=run.shard.key,
                    entry=placed.key,
                    tensor=placed.entry.name,
                    start=first,
                    stop=first + len(raw),
                    problem=problem,
                )
            )
    return bad


def _decompress(run: ChunkRun, frame: memoryview, raw: memoryview) -> str | None:
    try:
        decompress_chunk(frame, raw, codec=run.placed.codec or "", path=run.shard.key)
    except CorruptedError as error:
        return f"cannot be decompressed ({error.__cause__ or error.message})"
    return None
