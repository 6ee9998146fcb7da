"""Pieces of shards to be read, gathered into requests, read, verified and copied to where they
belong. Knows files that are open, not records."""

import mmap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Self

import msgspec
import numpy as np

from holdfast.catalog._read_plan import BATCH_BYTES, Piece
from holdfast.catalog._shard_read import BadChunk, ChunkRun, OpenShard, read_runs, run_bytes
from holdfast.contracts import Storage
from holdfast.errors import CheckpointError
from holdfast.format import CHUNK_BYTES, PlacedEntry
from holdfast.reshard import CopyRuns
from holdfast.storage._pages import Buffers


class Job(msgspec.Struct, frozen=True, gc=False):
    """A piece, with where it is, how many raw bytes it has, and where they go. There are very
    many."""

    shard: OpenShard
    placed: PlacedEntry
    piece: Piece
    nbytes: int
    into: memoryview

    @classmethod
    def of(cls, shard: OpenShard, placed: PlacedEntry, piece: Piece, into: memoryview) -> Self:
        return cls(shard, placed, piece, run_bytes(placed, piece.first, piece.last), into)


def all_chunks(shards: Iterable[OpenShard], only: Mapping[str, Collection[str]]) -> Iterator[Job]:
    """Jobs that read everything in these files, to be looked at and not kept; of a file that
    ``only`` has, by its key, just the entries of those names."""
    step = BATCH_BYTES // CHUNK_BYTES
    for shard in shards:
        names = only.get(shard.key, shard.layout.by_key)
        for placed in (each for each in shard.layout.entries if each.key in names):
            for first in range(0, placed.chunks, step):
                piece = Piece(first=first, last=min(first + step, placed.chunks), dst_offset=0)
                yield Job.of(shard, placed, piece, memoryview(b""))


def unreadable(batch: Sequence[Job], error: CheckpointError) -> Iterator[BadChunk]:
    """What is damaged if a batch cannot be read at all."""
    for job in batch:
        yield BadChunk(
            key=job.shard.key,
            entry=job.placed.key,
            tensor=job.placed.entry.name,
            start=job.piece.first * CHUNK_BYTES,
            stop=min(job.piece.last * CHUNK_BYTES, job.placed.raw_bytes),
            problem=f"cannot be read ({error.message})",
        )


def batches(jobs: Iterable[Job]) -> Iterator[list[Job]]:
    """Neighbouring jobs of one shard together, up to ``BATCH_BYTES``."""
    batch: list[Job] = []
    size = 0
    for job in jobs:
        if batch and (job.shard is not batch[0].shard or size + job.nbytes > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(job)
        size += job.nbytes
    if batch:
        yield batch


def scratch_buffers() -> Buffers:
    """Memory for batches, to be used by one call and then forgotten."""
    return Buffers(BATCH_BYTES + mmap.PAGESIZE)


def run_batch(
    storage: Storage, batch: Sequence[Job], buffers: Buffers, *, keep: bool = True
) -> list[BadChunk]:
    """Read a batch in one request, and put what is right where it belongs if it is to be kept.
    Returns the damaged chunks; nothing is copied if there are any."""
    runs: list[ChunkRun] = []
    copies: list[tuple[CopyRuns, memoryview, int, memoryview]] = []
    for job in batch:
        piece, base = job.piece, job.piece.first * CHUNK_BYTES
        memory: memoryview | None
        if not keep:
            memory = None
        elif piece.copy is not None:
            memory = memoryview(bytearray(job.nbytes))
            copies.append((piece.copy, memory, base, job.into))
        elif job.nbytes == len(job.into):
            memory = job.into
        else:
            memory = job.into[piece.dst_offset : piece.dst_offset + job.nbytes]
        runs.append(ChunkRun(job.shard, job.placed, piece.first, piece.last, memory))
    bad = read_runs(storage, runs, buffers)
    if not bad:
        for copy, scratch, base, into in copies:
            copy_runs(copy, scratch, base, into)
    return bad


def copy_runs(runs: CopyRuns, scratch: memoryview, base: int, into: memoryview) -> None:
    """Copy from memory that starts at byte ``base`` of the source. Goes by strided views, so
    that many short runs cost no more than few long ones."""
    shape = (*runs.counts, runs.nbytes)
    src = np.ndarray(
        shape, np.uint8, scratch, offset=runs.src_offset - base, strides=(*runs.src_strides, 1)
    )
    dst = np.ndarray(shape, np.uint8, into, offset=runs.dst_offset, strides=(*runs.dst_strides, 1))
    dst[...] = src
