"""Writes a shard: every byte is digested on its way, and read from its source once. Knows no
records and no ranks."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from holdfast.contracts import Storage
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


def write_shard(
    storage: Storage,
    key: str,
    sources: Sequence[Source],
    *,
    level: CompressionLevel = CompressionLevel.NONE,
    tick: Tick = lambda _: None,
) -> WrittenShard:
    """Write the sources as one file, visible and durable on return.

    Uncompressed bytes go straight from the sources to the storage. Compressed ones are held
    until the shard is complete, because the header comes first and must know their sizes: give
    sources of few bytes at a time.
    """
    if level is CompressionLevel.NONE:
        layout = plan_shard([source.entry for source in sources])
        body: Body = _Plain(sources)
    else:
        body = _compress(sources, level)
        codecs = [codec_for(level, source.entry.dtype) or "" for source in sources]
        stored = {i: (codecs[i], sizes) for i, sizes in enumerate(body.frame_sizes)}
        layout = plan_shard([source.entry for source in sources], stored=stored)
    return _write(storage, key, layout, body, tick)


class Body(Protocol):
    frame_sizes: Sequence[Sequence[int]]

    def stored(self, index: int) -> Iterable[memoryview | bytes]:
        """What to store for a source, in order."""

    def digests(self, index: int) -> bytes:
        """The digests of its raw chunks; known once they were stored."""


class _Plain:
    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._digests: dict[int, list[bytes]] = {}
        self.frame_sizes: Sequence[Sequence[int]] = ()

    def stored(self, index: int) -> Iterator[memoryview]:
        digests = self._digests[index] = []
        for chunk in self._sources[index].chunks():
            digests.append(digest(chunk))  # just before it is copied, so that it is in the cache
            yield chunk

    def digests(self, index: int) -> bytes:
        return b"".join(self._digests[index])


class _Compressed:
    def __init__(
        self, frames: list[list[memoryview | bytes]], digests: Sequence[Sequence[bytes]]
    ) -> None:
        self._frames = frames
        self._digests = digests
        self.frame_sizes: Sequence[Sequence[int]] = [
            [len(frame) for frame in of_source] for of_source in frames
        ]

    def stored(self, index: int) -> Iterator[memoryview | bytes]:
        frames = self._frames[index]
        frames.reverse()
        while frames:  # given away one by one, so that memory is freed on the way
            yield frames.pop()

    def digests(self, index: int) -> bytes:
        return b"".join(self._digests[index])


def _compress(sources: Sequence[Source], level: CompressionLevel) -> _Compressed:
    frames: list[list[memoryview | bytes]] = [[] for _ in sources]
    digests: list[list[bytes]] = [[] for _ in sources]
    owners: list[int] = []

    def chunks() -> Iterator[tuple[str, memoryview]]:
        for index, source in enumerate(sources):
            for chunk in source.chunks():
                digests[index].append(digest(chunk))
                owners.append(index)
                yield source.entry.dtype, chunk

    for nth, frame in enumerate(compressed(chunks(), level=level)):
        frames[owners[nth]].append(frame)
    return _Compressed(frames, digests)


def _write(storage: Storage, key: str, layout: ShardLayout, body: Body, tick: Tick) -> WrittenShard:
    sizes = {
        placed.key: body.frame_sizes[placed.index]
        for placed in layout.entries
        if placed.codec is not None
    }
    with storage.open_writer(key, size_bytes=layout.file_bytes) as writer:
        writer.write_at(0, layout.header)
        for placed in layout.entries:
            offset = placed.offset
            for piece in body.stored(placed.index):
                writer.write_at(offset, piece)
                offset += len(piece)
                tick(len(piece))
            if offset != placed.offset + placed.stored_bytes:
                raise ValueError(
                    f"the source of {placed.key!r} gave {offset - placed.offset} bytes where its "
                    f"shape and dtype make {placed.stored_bytes}"
                )
        digests = [body.digests(placed.index) for placed in layout.entries]
        table = encode_table(layout, digests, sizes)
        writer.write_at(layout.table_offset, table)
        writer.finish()
    file = StoredFile(
        name=key.rpartition("/")[2],
        size_bytes=layout.file_bytes,
        digest=file_digest(layout.header, table).hex(),
    )
    order = sorted(range(len(digests)), key=lambda at: layout.entries[at].index)
    return WrittenShard(file=file, digests=tuple(digests[at] for at in order))


def raw_bytes(entry: ShardEntry) -> int:
    """How many bytes an entry's box has."""
    return dtype_of(entry.dtype).itemsize * int(np.prod(entry.shape, dtype=object))
