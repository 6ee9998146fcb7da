"""Reads tensors of a committed checkpoint into memory, verified, several requests at once.

Knows the record and its shards. It fills bytes; what they are is the caller's business.
"""

import contextlib
import difflib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast._lanes import run_all
from holdfast.catalog._committed import find_record
from holdfast.catalog._names import record_key
from holdfast.catalog._placing import StoredBoxes, box_bounds
from holdfast.catalog._read_jobs import Job, all_chunks, batches, run_batch, unreadable
from holdfast.catalog._read_plan import plan_box
from holdfast.catalog._shard_read import BadChunk, OpenShard, open_shard
from holdfast.catalog._shards import FILES_AT_ONCE, Shards
from holdfast.contracts import Storage
from holdfast.errors import (
    CorruptedError,
    LoadError,
    ObjectNotFoundError,
    StorageError,
    TensorNotFoundError,
)
from holdfast.format import CommitRecord, PlacedEntry, StoredTensor, dtype_of, entry_of_box
from holdfast.reshard import Box, Part

LANES: Final = 4
"""Requests in flight. On a disk more bring nothing, and each holds a batch of memory."""

_FIRST_PARTS: Final = 1000
_MOST_PARTS: Final = 64_000

Tick = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """A part of a tensor, and the contiguous memory of the array that is to hold it."""

    name: str
    part: Part
    into: memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """A stored box that has elements of the ``nth`` thing wanted, and its file's index."""

    nth: int
    box: Box
    index: int


def _index(part: _Stored) -> int:
    return part.index


class TensorReader:
    """The tensors of one checkpoint. Thread-safe.

    Work goes file by file, a few files at a time, so that neither memory nor the number of
    requests depends on how many files share how many tensors.
    """

    def __init__(self, storage: Storage, prefix: str, record: CommitRecord) -> None:
        self._storage = storage
        self._prefix = prefix
        self._record = record
        self._shards = Shards(self._open)

    def fill(self, wants: Iterable[Want], *, tick: Tick = lambda _: None) -> None:
        """Fill every want, or raise: ``CorruptedError`` names tensor, file and bytes of the first
        damage met with. Memory beyond the wants' own is bounded, whatever their size. Boxes are
        to be ``check_stored`` first."""
        wants = [*wants]
        views = [self._view(want) for want in wants]
        boxes = [(want.name, want.part.box) for want in wants]

        def jobs(stored: Sequence[_Stored], shards: Mapping[int, OpenShard]) -> Iterator[Job]:
            for part in stored:
                want, shard = wants[part.nth], shards[part.index]
                itemsize = dtype_of(self.tensor(want.name).dtype).itemsize
                placed = self.placed(want.name, part.box, shard)
                for piece in plan_box(placed.raw_bytes, part.box, want.part, itemsize):
                    yield Job(shard=shard, placed=placed, piece=piece, into=views[part.nth])

        def run(batch: Sequence[Job]) -> None:
            with self._telling_missing_files():
                damaged = run_batch(self._storage, batch)
            for bad in damaged:
                raise bad.error()
            tick(sum(job.nbytes for job in batch))

        for stored, shards in self._by_file(boxes):
            run_all(batches(jobs(stored, shards)), run, lanes=LANES)

    def tensor(self, name: str) -> StoredTensor:
        try:
            return self._record.tensors[name]
        except KeyError:
            near = difflib.get_close_matches(name, self._record.tensors, n=3)
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise TensorNotFoundError(
                f"the checkpoint has no tensor {name!r}{hint}",
                path=f"{self._storage.url}/{self._prefix}",
            ) from None

    def shard(self, index: int) -> OpenShard:
        """The file of that number in the record."""
        return self._shards.get(index)

    def placed(self, name: str, box: Box, shard: OpenShard) -> PlacedEntry:
        """The entry of a stored box. ``CorruptedError`` if the file has it not, or otherwise than
        the record says."""
        tensor = self.tensor(name)
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

    def verify(
        self,
        shards: Iterable[OpenShard],
        *,
        turn: Callable[[], bool] = lambda: True,
        tick: Tick = lambda _: None,
    ) -> list[BadChunk]:
        """Read the chunks of these files, and return the damaged ones. ``turn`` is asked, batch
        by batch, whether to read it."""
        bad: list[BadChunk] = []

        def run(batch: Sequence[Job]) -> None:
            try:
                with self._telling_missing_files():
                    bad.extend(run_batch(self._storage, batch, keep=False))
            except (CorruptedError, StorageError) as error:
                if error.transient:
                    raise
                bad.extend(unreadable(batch, error))
            tick(sum(job.nbytes for job in batch))

        run_all((batch for batch in batches(all_chunks(shards)) if turn()), run, lanes=LANES)
        return sorted(bad, key=lambda chunk: (chunk.key, chunk.entry, chunk.start))

    def check_stored(self, boxes: Sequence[tuple[str, Box]]) -> None:
        """``CorruptedError`` unless everything of these boxes of tensors is in its files, so that
        no memory is taken for what is not there."""
        for stored, shards in self._by_file(boxes, check=True):
            for part in stored:
                self.placed(boxes[part.nth][0], part.box, shards[part.index])

    def _by_file(
        self, boxes: Sequence[tuple[str, Box]], *, check: bool = False
    ) -> Iterator[tuple[list[_Stored], Mapping[int, OpenShard]]]:
        """What is stored of these boxes, a few files at a time, and those files.

        Parts are sorted by file some thousands at a time, at first fewer: a record may claim
        more of them than there is memory or time for, and is found out by the first.
        """
        parts = (
            _Stored(nth=nth, box=box, index=index)
            for nth, (name, wanted) in enumerate(boxes)
            for box, index in self._parts(name, wanted, check=check)
        )
        count = _FIRST_PARTS
        while some := sorted(itertools.islice(parts, count), key=_index):
            count = min(4 * count, _MOST_PARTS)
            files = itertools.groupby(some, key=_index)
            while group := {at: [*each] for at, each in itertools.islice(files, FILES_AT_ONCE)}:
                yield [*itertools.chain(*group.values())], self._shards.get_all(group)

    def _view(self, want: Want) -> memoryview:
        """The memory of a want, as bytes."""
        itemsize = dtype_of(self.tensor(want.name).dtype).itemsize
        if want.into.nbytes != math.prod(want.part.array_shape) * itemsize:
            raise ValueError(
                f"{want.into.nbytes} bytes of memory for an array of {want.name!r} of shape "
                f"{want.part.array_shape}"
            )
        return want.into.cast("B") if want.into.nbytes else want.into

    def _open(self, index: int) -> OpenShard:
        file = self._record.files[index]
        key = f"{file.prefix or self._prefix}/{file.name}"
        try:
            with self._telling_missing_files():
                return open_shard(self._storage, key, file)
        except ValueError as error:
            raise CorruptedError(
                f"the record names a file that cannot be: {error}; load another checkpoint",
                path=record_key(self._prefix),
            ) from error

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
