"""Reads tensors of a committed checkpoint into memory, verified, several requests at once.

Knows the record and its shards. It fills bytes; what they are is the caller's business.
"""

import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np

from holdfast._lanes import run_all
from holdfast.catalog._committed import find_record
from holdfast.catalog._names import record_key
from holdfast.catalog._placing import StoredBoxes, box_bounds
from holdfast.catalog._read_plan import BATCH_BYTES, Piece, plan_box
from holdfast.catalog._shard_read import (
    BadChunk,
    ChunkRun,
    OpenShard,
    open_shard,
    read_runs,
    run_bytes,
)
from holdfast.contracts import Storage
from holdfast.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptedError,
    LoadError,
    ObjectNotFoundError,
    StorageError,
)
from holdfast.format import (
    CHUNK_BYTES,
    CommitRecord,
    PlacedEntry,
    StoredTensor,
    dtype_of,
    entry_of_box,
)
from holdfast.reshard import Box, CopyRuns, Part

LANES: Final = 4
"""Requests in flight. On a disk more bring nothing, and each holds a batch of memory."""

Tick = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """A part of a tensor, and the contiguous memory of the array that is to hold it."""

    name: str
    part: Part
    into: memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """A piece, with where it is and where it goes."""

    shard: OpenShard
    placed: PlacedEntry
    piece: Piece
    into: memoryview

    @property
    def nbytes(self) -> int:
        return sum(run_bytes(self.placed, first, last) for first, last in self.piece.runs)


class TensorReader:
    """The tensors of one checkpoint. Thread-safe; every shard is opened once, when first needed."""

    def __init__(self, storage: Storage, prefix: str, record: CommitRecord) -> None:
        self._storage = storage
        self._prefix = prefix
        self._record = record
        self._shards: dict[int, OpenShard] = {}
        self._lock = threading.Lock()

    def fill(self, wants: Iterable[Want], *, tick: Tick = lambda _: None) -> None:
        """Fill every want, or raise: ``CorruptedError`` names tensor, file and bytes of the first
        damage met with. Memory beyond the wants' own is bounded, whatever their size. Boxes are
        to be ``check_stored`` first."""

        def run(batch: Sequence[_Job]) -> None:
            with self._telling_missing_files():
                damaged = _run_batch(self._storage, batch)
            for bad in damaged:
                raise bad.error()
            tick(sum(job.nbytes for job in batch))

        run_all(_batches(self._jobs(wants)), run, lanes=LANES)

    def tensor(self, name: str) -> StoredTensor:
        try:
            return self._record.tensors[name]
        except KeyError:
            raise CheckpointNotFoundError(
                f"the checkpoint has no tensor {name!r}", path=f"{self._storage.url}/{self._prefix}"
            ) from None

    def shard(self, index: int) -> OpenShard:
        """The file of that number in the record."""
        with self._lock:
            if index not in self._shards:
                file = self._record.files[index]
                key = f"{file.prefix or self._prefix}/{file.name}"
                with self._telling_missing_files():
                    self._shards[index] = open_shard(self._storage, key, file)
            return self._shards[index]

    def placed(self, name: str, box: Box, index: int) -> PlacedEntry:
        """The entry of a stored box. ``CorruptedError`` if the file has it not, or otherwise than
        the record says."""
        tensor, shard = self.tensor(name), self.shard(index)
        key = entry_of_box(name, tensor.shape, box_bounds(box))
        placed = shard.layout.by_key.get(key)
        if placed is None or (placed.entry.dtype, placed.entry.shape) != (tensor.dtype, box.shape):
            found = (
                "it has no such entry"
                if placed is None
                else f"there it is {placed.entry.dtype} of shape {placed.entry.shape}"
            )
            raise CorruptedError(
                f"the record says that this file holds {key!r}, {tensor.dtype} of shape "
                f"{box.shape}, but {found}; load another checkpoint",
                path=shard.key,
            )
        return placed

    def _jobs(self, wants: Iterable[Want]) -> Iterator[_Job]:
        for want in wants:
            tensor = self.tensor(want.name)
            itemsize = dtype_of(tensor.dtype).itemsize
            if want.into.nbytes != math.prod(want.part.array_shape) * itemsize:
                raise ValueError(
                    f"{want.into.nbytes} bytes of memory for an array of {want.name!r} of shape "
                    f"{want.part.array_shape}"
                )
            into = want.into.cast("B") if want.into.nbytes else want.into
            for box, index in self._parts(want.name, want.part.box):
                placed = self.placed(want.name, box, index)
                for piece in plan_box(placed.raw_bytes, box, want.part, itemsize):
                    yield _Job(shard=self.shard(index), placed=placed, piece=piece, into=into)

    def verify(
        self, indexes: Iterable[int], *, part: tuple[int, int], tick: Tick = lambda _: None
    ) -> list[BadChunk]:
        """Read the chunks of these files, one ``part`` of several, and return the damaged ones."""
        nth, of = part
        bad: list[BadChunk] = []

        def run(batch: Sequence[_Job]) -> None:
            try:
                with self._telling_missing_files():
                    bad.extend(_run_batch(self._storage, batch, keep=False))
            except (CorruptedError, StorageError) as error:
                if error.transient:
                    raise
                bad.extend(_unreadable(batch, error))
            tick(sum(job.nbytes for job in batch))

        run_all(islice(_batches(self._all_chunks(indexes)), nth - 1, None, of), run, lanes=LANES)
        return sorted(bad, key=lambda chunk: (chunk.key, chunk.entry, chunk.start))

    def check_stored(self, name: str, box: Box) -> None:
        """``CorruptedError`` unless everything of the box is in its files, so that no memory is
        taken for what is not there."""
        for part, index in self._parts(name, box, check=True):
            self.placed(name, part, index)

    def _parts(self, name: str, box: Box, *, check: bool = False) -> Iterator[tuple[Box, int]]:
        """The stored boxes that share elements with ``box``, and their files' indexes.

        A tensor that is stored in one piece needs no geometry; there may be very many of them.
        """
        tensor = self.tensor(name)
        ((first, _, count), *more) = tensor.placement.files
        if count == 1 and not more:
            if not box.is_empty:
                yield Box.whole(tensor.shape), first
            return
        stored = StoredBoxes.of(tensor)
        if check:
            stored.check(name, record_key(self._prefix))
        yield from stored.within(box)

    @contextlib.contextmanager
    def _telling_missing_files(self) -> Iterator[None]:
        """A file that is not there is damage, unless the checkpoint itself is not there."""
        try:
            yield
        except ObjectNotFoundError as error:
            found = find_record(self._storage, self._prefix)
            if found is None or found.record.attempt != self._record.attempt:
                raise LoadError(
                    "this checkpoint was deleted or replaced since it was opened; open it again",
                    path=f"{self._storage.url}/{self._prefix}",
                ) from error
            raise CorruptedError(
                "a file of the checkpoint is missing; load another checkpoint", path=error.path
            ) from error

    def _all_chunks(self, indexes: Iterable[int]) -> Iterator[_Job]:
        step = BATCH_BYTES // CHUNK_BYTES
        for index in indexes:
            shard = self.shard(index)
            for placed in shard.layout.entries:
                for first in range(0, placed.chunks, step):
                    runs = ((first, min(first + step, placed.chunks)),)
                    piece = Piece(runs=runs, dst_offset=0)
                    yield _Job(shard=shard, placed=placed, piece=piece, into=memoryview(b""))


def _unreadable(batch: Sequence[_Job], error: CheckpointError) -> Iterator[BadChunk]:
    for job in batch:
        yield BadChunk(
            key=job.shard.key,
            entry=job.placed.key,
            tensor=job.placed.entry.name,
            start=job.piece.runs[0][0] * CHUNK_BYTES,
            stop=min(job.piece.runs[-1][1] * CHUNK_BYTES, job.placed.raw_bytes),
            problem=f"cannot be read ({error.message})",
        )


def _batches(jobs: Iterable[_Job]) -> Iterator[list[_Job]]:
    """Neighbouring jobs of one shard together, up to ``BATCH_BYTES``."""
    batch: list[_Job] = []
    size = 0
    for job in jobs:
        if batch and (job.shard is not batch[0].shard or size + job.nbytes > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(job)
        size += job.nbytes
    if batch:
        yield batch


def _run_batch(storage: Storage, batch: Sequence[_Job], *, keep: bool = True) -> list[BadChunk]:
    runs: list[ChunkRun] = []
    copies: list[tuple[CopyRuns, memoryview, int, memoryview]] = []
    for job in batch:
        piece, base = job.piece, job.piece.runs[0][0] * CHUNK_BYTES
        if keep and piece.copy is None:
            memory = job.into[piece.dst_offset : piece.dst_offset + job.nbytes]
        else:
            last = piece.runs[-1][1]
            memory = memoryview(bytearray(min(last * CHUNK_BYTES, job.placed.raw_bytes) - base))
        if keep and piece.copy is not None:
            copies.append((piece.copy, memory, base, job.into))
        for first, last in piece.runs:
            start = first * CHUNK_BYTES - base
            into = memory[start : start + run_bytes(job.placed, first, last)]
            runs.append(
                ChunkRun(shard=job.shard, placed=job.placed, first=first, last=last, into=into)
            )
    bad = read_runs(storage, runs)
    if not bad:
        for copy, scratch, base, into in copies:
            _copy(copy, scratch, base, into)
    return bad


def _copy(runs: CopyRuns, scratch: memoryview, base: int, into: memoryview) -> None:
    """Copy by strided views, so that many short runs cost no more than few long ones."""
    shape = (*runs.counts, runs.nbytes)
    src = np.ndarray(
        shape, np.uint8, scratch, offset=runs.src_offset - base, strides=(*runs.src_strides, 1)
    )
    dst = np.ndarray(shape, np.uint8, into, offset=runs.dst_offset, strides=(*runs.dst_strides, 1))
    dst[...] = src
