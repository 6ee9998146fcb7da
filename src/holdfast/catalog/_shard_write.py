"""Writes a shard: every byte is digested on its way, and read from its source once. Knows no
records and no ranks."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from holdfast.catalog._names import table_name
from holdfast.catalog._spool import Spool
from holdfast.contracts import Data, ObjectWriter, Storage
from holdfast.errors import TornSnapshotError
from holdfast.format import (
    CHUNK_BYTES,
    CompressionLevel,
    ShardEntry,
    ShardLayout,
    StoredFile,
    codec_for,
    compressed,
    digest,
    dtype_of,
    encode_table,
    file_digest,
    plan_shard,
)

Array = npt.NDArray[np.generic]


class Source(Protocol):
    """The bytes of one box of a tensor, in row-major order."""

    @property
    def entry(self) -> ShardEntry: ...

    def chunks(self) -> Iterator[memoryview]:
        """All of it, ``CHUNK_BYTES`` at a time but for the last. Each is valid, and its bytes
        stay as they are, until the shard is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySource:
    """A box that is a NumPy array. One that is not contiguous is copied chunk by chunk."""

    entry: ShardEntry
    array: Array

    def chunks(self) -> Iterator[memoryview]:
        if not self.array.nbytes:
            return
        if self.array.flags.c_contiguous:
            data = as_bytes(self.array)
            for start in range(0, len(data), CHUNK_BYTES):
                yield data[start : start + CHUNK_BYTES]
            return
        step = CHUNK_BYTES // self.array.itemsize
        for start in range(0, self.array.size, step):
            yield as_bytes(self.array.flat[start : start + step])


def as_bytes(array: Array) -> memoryview:
    """The memory of a contiguous array. Goes by way of integers, since NumPy lends out no memory
    of the types it does not know."""
    return array.reshape(-1).view(np.uint8).data


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenShard:
    """A shard in the storage: what the commit record says of it, and the digests of its boxes'
    chunks in the order of the sources."""

    file: StoredFile
    digests: tuple[bytes, ...]


Tick = Callable[[int], None]
"""Told of every few bytes as they are written."""

_TICK_FRAMES: Final = 64
_LONG_BYTES: Final = 64 * 1024
_JOINED_BYTES: Final = 256 * 1024


def write_shard(
    storage: Storage,
    key: str,
    sources: Sequence[Source],
    *,
    level: CompressionLevel = CompressionLevel.NONE,
    tick: Tick = lambda _: None,
    metadata: Mapping[str, str] | None = None,
    table_key: str | None = None,
) -> WrittenShard:
    """Write the sources as one file, visible and durable on return.

    ``metadata`` is added to the file's own. With ``table_key``, which must be ``table_name`` of
    the file in the same folder, the file has nothing in it but the sources, and its chunk table
    is written after it as an object of its own.

    Uncompressed bytes go straight from the sources to the storage. Compressed ones are held
    until all are, because the header comes first and must know their sizes: up to 64 MiB in
    memory, and what is more in a temporary file. ``tick`` is told 0 now and then meanwhile.
    """
    if table_key is not None and table_key != table_name(key):
        raise ValueError(f"table_key must be {table_name(key)!r}, not {table_key!r}")
    entries = [source.entry for source in sources]
    beside = table_key is not None
    if level is CompressionLevel.NONE:
        layout = plan_shard(entries, metadata=metadata, table_beside=beside)
        return _write(storage, key, layout, _Plain(sources), tick=tick, table_key=table_key)
    with Spool() as spool:
        body = _compress(sources, level, spool, tick)
        codecs = [codec_for(level, entry.dtype) or "" for entry in entries]
        stored = {i: (codecs[i], sizes) for i, sizes in enumerate(body.frame_sizes)}
        layout = plan_shard(entries, metadata=metadata, stored=stored, table_beside=beside)
        return _write(storage, key, layout, body, tick=tick, table_key=table_key)


class Body(Protocol):
    frame_sizes: Sequence[Sequence[int]]

    def stored(self, index: int) -> Iterable[Data]:
        """What to store for a source, in order. Asked once for each."""

    def digests(self, index: int) -> bytes:
        """The digests of its raw chunks; known once they were stored."""


class _Plain:
    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._digests: dict[int, list[bytes]] = {}
        self.frame_sizes: Sequence[Sequence[int]] = ()

    def stored(self, index: int) -> Iterator[memoryview]:
        digests = self._digests[index] = []
        source = self._sources[index]
        for chunk in source.chunks():
            if len(chunk) < _LONG_BYTES:
                own = bytes(chunk)  # it is written later, with others
                digests.append(digest(own))
                yield memoryview(own)
                continue
            digests.append(digest(chunk))  # just before it is copied, so that it is in the cache
            yield chunk
            if digest(chunk) != digests[-1]:  # it was copied meanwhile, and is still in the cache
                raise TornSnapshotError(
                    f"{source.entry.name} changed while being saved; nothing was committed"
                )

    def digests(self, index: int) -> bytes:
        return b"".join(self._digests[index])


class _Stream:
    """What follows each other in a file. Short pieces are joined before they are written: to a
    storage thousands of them are thousands of times the work."""

    def __init__(self, writer: ObjectWriter, offset: int, tick: Tick) -> None:
        self._writer = writer
        self._tick = tick
        self._short: list[Data] = []
        self._short_bytes = 0
        self.offset = offset

    def append(self, piece: Data) -> None:
        size = len(piece)
        if size >= _LONG_BYTES:
            self.flush()
            self._write(self.offset, piece)
        else:
            self._short.append(piece)
            self._short_bytes += size
        self.offset += size
        if self._short_bytes >= _JOINED_BYTES:
            self.flush()

    def flush(self) -> None:
        if self._short:
            self._write(self.offset - self._short_bytes, b"".join(self._short))
            self._short, self._short_bytes = [], 0

    def _write(self, offset: int, piece: Data) -> None:
        self._writer.write_at(offset, piece)
        self._tick(len(piece))


class _Compressed:
    def __init__(
        self,
        spool: Spool,
        frames: Sequence[Sequence[int]],
        frame_sizes: Sequence[Sequence[int]],
        digests: Sequence[Sequence[bytes]],
    ) -> None:
        self._spool = spool
        self._frames = frames
        self._digests = digests
        self.frame_sizes = frame_sizes

    def stored(self, index: int) -> Iterator[Data]:
        return map(self._spool.take, self._frames[index])

    def digests(self, index: int) -> bytes:
        return b"".join(self._digests[index])


def _compress(
    sources: Sequence[Source], level: CompressionLevel, spool: Spool, tick: Tick
) -> _Compressed:
    frames: list[list[int]] = [[] for _ in sources]
    sizes: list[list[int]] = [[] for _ in sources]
    digests: list[list[bytes]] = [[] for _ in sources]
    owners: list[int] = []

    def chunks() -> Iterator[tuple[str, memoryview]]:
        for index, source in enumerate(sources):
            for chunk in source.chunks():
                own = bytes(chunk)  # it is compressed later, and may change until then
                digests[index].append(digest(own))
                owners.append(index)
                yield source.entry.dtype, memoryview(own)

    with contextlib.closing(compressed(chunks(), level=level)) as stream:
        for nth, frame in enumerate(stream):
            frames[owners[nth]].append(spool.add(frame))
            sizes[owners[nth]].append(len(frame))
            if nth % _TICK_FRAMES == 0:
                tick(0)  # a large file takes longer than a lease
    return _Compressed(spool, frames, sizes, digests)


def _write(
    storage: Storage,
    key: str,
    layout: ShardLayout,
    body: Body,
    *,
    tick: Tick,
    table_key: str | None,
) -> WrittenShard:
    sizes = {
        placed.key: body.frame_sizes[index]
        for placed, index in zip(layout.entries, layout.order, strict=True)
        if placed.codec is not None
    }
    with storage.open_writer(key, size_bytes=layout.file_bytes) as writer:
        writer.write_at(0, layout.header)
        stream = _Stream(writer, len(layout.header), tick)
        for placed, index in zip(layout.entries, layout.order, strict=True):
            for piece in body.stored(index):
                stream.append(piece)
            offset = stream.offset
            if offset != placed.offset + placed.stored_bytes:
                raise ValueError(
                    f"the source of {placed.key!r} gave {offset - placed.offset} bytes where its "
                    f"shape and dtype make {placed.stored_bytes}"
                )
        stream.flush()
        digests = [body.digests(index) for index in layout.order]
        table = encode_table(layout, digests, sizes)
        if table_key is None:
            writer.write_at(layout.table_offset, table)
        writer.finish()
    if table_key is not None:
        with storage.open_writer(table_key, size_bytes=len(table)) as writer:
            writer.write_at(0, table)
            writer.finish()
    file = StoredFile(
        name=key.rpartition("/")[2],
        size_bytes=layout.file_bytes,
        digest=file_digest(layout.header, table).hex(),
        table=None if table_key is None else table_key.rpartition("/")[2],
    )
    by_source = dict(zip(layout.order, digests, strict=True))
    return WrittenShard(file=file, digests=tuple(by_source[at] for at in range(len(by_source))))


def raw_bytes(entry: ShardEntry) -> int:
    """How many bytes an entry's box has."""
    return dtype_of(entry.dtype).itemsize * math.prod(entry.shape)
