"""Reads tensors of a committed checkpoint into memory, verified, several requests at once.

Knows the record and its shards. It fills bytes; what they are is the caller's business.
"""

import contextlib
import difflib
import itertools
import math
import operator
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np

from holdfast._lanes import run_all
from holdfast.catalog._committed import find_record
from holdfast.catalog._names import record_key
from holdfast.catalog._placing import StoredBoxes, box_bounds
from holdfast.catalog._read_jobs import (
    Job,
    all_chunks,
    batches,
    copy_runs,
    run_batch,
    scratch_buffers,
    unreadable,
)
from holdfast.catalog._read_plan import plan_box
from holdfast.catalog._shard_read import BadChunk, OpenShard, open_shard
from holdfast.catalog._shards import FILES_AT_ONCE, Shards
from holdfast.contracts import ObjectInfo, Storage
from holdfast.errors import (
    CorruptedError,
    LoadError,
    ObjectNotFoundError,
    StorageError,
    TensorNotFoundError,
)
from holdfast.format import CommitRecord, PlacedEntry, StoredTensor, dtype_of
from holdfast.format._entry_names import entry_name
from holdfast.reshard import Box, Part, copy_to_part

LANES: Final = 4
"""Batches at a time: some wait for the disk while others are verified. Each may take memory."""

_FIRST_PARTS: Final = 1000
_MOST_PARTS: Final = 64_000

Tick = Callable[[int], None]


class Want(msgspec.Struct, frozen=True, gc=False):
    """A part of a tensor, and the contiguous memory of the array that is to hold it. There are
    very many, so these are not dataclasses: they are made in a fifth of the time."""

    name: str
    part: Part
    into: memoryview


class _Stored(NamedTuple):
    """A stored box that has elements of the ``nth`` thing wanted, and its file's index."""

    nth: int
    box: Box
    file: int


_index = operator.attrgetter("file")


class TensorReader:
    """The tensors of one checkpoint. Thread-safe.

    Work goes file by file, a few files at a time, so that neither memory nor the number of
    requests depends on how many files share how many tensors.
    """

    def __init__(self, storage: Storage, prefix: str, record: CommitRecord) -> None:
        self._storage = storage
        self._prefix = prefix
        self._record = record
        self._looking = threading.Lock()
        self._seen: ObjectInfo | None = None
        self._shards = Shards(self._open)

    def fill(
        self,
        wants: Iterable[Want],
        *,
        tick: Tick = lambda _: None,
        whole_boxes: bool = False,
        checked: bool = False,
    ) -> None:
        """Fill every want, or raise: ``CorruptedError`` names tensor, file and bytes of the first
        damage met with. Memory beyond the wants' own is bounded, whatever their size. Boxes are
        ``checked`` if they were given to ``check_stored``; otherwise it is done here.

        With ``whole_boxes`` every stored box of which anything is wanted is read, and verified,
        as a whole, one after the other. Memory is then that of the largest one.
        """
        wants = [*wants]
        itemsizes = [dtype_of(self.tensor(want.name).dtype).itemsize for want in wants]
        views = [_view(want, itemsize) for want, itemsize in zip(wants, itemsizes, strict=True)]
        boxes = [(want.name, want.part.box) for want in wants]
        buffers = scratch_buffers()

        def jobs(stored: Sequence[_Stored], shards: Mapping[int, OpenShard]) -> Iterator[Job]:
            for nth, box, index in stored:
                want, shard = wants[nth], shards[index]
                placed = self.placed(want.name, box, shard)
                for piece in plan_box(placed.raw_bytes, box, want.part, itemsizes[nth]):
                    yield Job.of(shard, placed, piece, views[nth])

        def run(batch: Sequence[Job]) -> None:
            with self._telling():
                damaged = run_batch(self._storage, batch, buffers)
            for bad in damaged:
                raise bad.error()
            tick(sum(job.nbytes for job in batch))

        for stored, shards in self._by_file(boxes, check=not checked):
            if not whole_boxes:
                run_all(batches(jobs(stored, shards)), run, lanes=LANES)
                continue
            for nth, box, index in stored:
                placed = self.placed(wants[nth].name, box, shards[index])
                scratch = self._scratch(placed)
                pieces = plan_box(placed.raw_bytes, box, Part.alone(box), itemsizes[nth])
                whole = (Job.of(shards[index], placed, piece, scratch) for piece in pieces)
                run_all(batches(whole), run, lanes=LANES)
                _copy_shared(box, scratch, wants[nth].part, views[nth], itemsizes[nth])

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
        tensor, shape = self.tensor(name), box.shape
        whole = shape == tensor.shape
        placed = shard.layout.by_key.get(name)  # most have just this name
        if placed is None or placed.entry.box is not None or not whole:
            key = entry_name(name, shape, None if whole else box_bounds(box))
            placed = shard.layout.by_key.get(key)
        if placed is None or placed.entry.dtype != tensor.dtype or placed.entry.shape != shape:
            key = entry_name(name, shape, None if whole else box_bounds(box))
            found = (
                "it has no such entry"
                if placed is None
                else f"there it is {placed.entry.dtype} of shape {placed.entry.shape}"
            )
            raise CorruptedError(
                f"the record says that this file holds {key!r}, {tensor.dtype} of shape "
                f"{shape}, but {found}; load another checkpoint",
                path=shard.key,
            )
        return placed

    def verify(
        self,
        shards: Iterable[OpenShard],
        *,
        only: Mapping[str, Collection[str]] | None = None,
        turn: Callable[[], bool] = lambda: True,
        tick: Tick = lambda _: None,
    ) -> list[BadChunk]:
        """Read the chunks of these files, and return the damaged ones. ``turn`` is asked, batch
        by batch, whether to read it. Of a file that ``only`` has, by its key, just the entries of
        those names are read."""
        bad: list[BadChunk] = []
        buffers = scratch_buffers()

        def run(batch: Sequence[Job]) -> None:
            try:
                with self._telling():
                    bad.extend(run_batch(self._storage, batch, buffers, keep=False))
            except (CorruptedError, StorageError) as error:
                if error.transient:
                    raise
                bad.extend(unreadable(batch, error))
            tick(sum(job.nbytes for job in batch))

        jobs = all_chunks(shards, only or {})
        run_all((batch for batch in batches(jobs) if turn()), run, lanes=LANES)
        return sorted(bad, key=lambda chunk: (chunk.key, chunk.entry, chunk.start))

    def check_stored(self, boxes: Sequence[tuple[str, Box]]) -> None:
        """``CorruptedError`` unless everything of these boxes of tensors is in its files, so that
        no memory is taken for what is not there."""
        for stored, shards in self._by_file(boxes, check=True):
            for nth, box, index in stored:
                self.placed(boxes[nth][0], box, shards[index])

    def _by_file(
        self, boxes: Sequence[tuple[str, Box]], *, check: bool = False
    ) -> Iterator[tuple[list[_Stored], Mapping[int, OpenShard]]]:
        """What is stored of these boxes, a few files at a time, and those files.

        Parts are sorted by file some thousands at a time, at first fewer: a record may claim
        more of them than there is memory or time for, and is found out by the first.
        """
        parts = (
            _Stored(nth, box, index)
            for nth, (name, wanted) in enumerate(boxes)
            for box, index in self._parts(name, wanted, check=check)
        )
        count = _FIRST_PARTS
        while some := sorted(itertools.islice(parts, count), key=_index):
            count = min(4 * count, _MOST_PARTS)
            files = itertools.groupby(some, key=_index)
            while group := {at: [*each] for at, each in itertools.islice(files, FILES_AT_ONCE)}:
                yield [*itertools.chain(*group.values())], self._shards.get_all(group)

    def _scratch(self, placed: PlacedEntry) -> memoryview:
        try:
            return np.empty(placed.raw_bytes, np.uint8).data
        except (MemoryError, ValueError) as error:
            raise LoadError(
                f"there is no memory for the {placed.raw_bytes} bytes that are stored together as "
                f"{placed.key!r}; load with another resharding strategy",
                path=f"{self._storage.url}/{self._prefix}",
            ) from error

    def _open(self, index: int) -> OpenShard:
        file = self._record.files[index]
        key = f"{file.prefix or self._prefix}/{file.name}"
        try:
            with self._telling():
                return open_shard(self._storage, key, file)
        except ValueError as error:
            raise CorruptedError(
                f"the record names a file that cannot be: {error}; load another checkpoint",
                path=record_key(self._prefix),
            ) from error

    def _parts(self, name: str, box: Box, *, check: bool = False) -> Iterable[tuple[Box, int]]:
        """The stored boxes that share elements with ``box``, and their files' indexes.

        A tensor that is stored in one piece needs no geometry; there may be very many of them.
        """
        tensor = self.tensor(name)
        ((first, _, count), *more) = tensor.placement.files
        if count == 1 and not more:
            if box.is_empty:
                return ()
            whole = box.stop == tensor.shape and not any(box.start)
            return ((box if whole else Box.whole(tensor.shape), first),)
        stored = StoredBoxes.of(tensor)
        if check:
            stored.check(name, record_key(self._prefix))
        return stored.within(box)

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """A file that is not there is damage, unless the checkpoint itself is not there. Memory
        that is not there is none."""
        try:
            yield
        except MemoryError as error:
            reason = str(error) or "none is left"
            raise LoadError(
                f"there is too little memory to read the checkpoint: {reason}",
                path=f"{self._storage.url}/{self._prefix}",
            ) from error
        except ObjectNotFoundError as error:
            if not self._is_still_there():
                raise LoadError(
                    "this checkpoint was deleted or replaced since it was opened; open it again",
                    path=f"{self._storage.url}/{self._prefix}",
                ) from error
            raise CorruptedError(
                "a file of the checkpoint is missing; load another checkpoint", path=error.path
            ) from error

    def _is_still_there(self) -> bool:
        """Whether the record is the one that was opened. Where thousands of files are missing it is
        read once, and after that only its version is asked for."""
        with self._looking:
            if self._seen is not None:
                with contextlib.suppress(ObjectNotFoundError):
                    if self._storage.stat(self._seen.key) == self._seen:
                        return True
            found = find_record(self._storage, self._prefix)
            if found is None or found.record.attempt != self._record.attempt:
                return False
            self._seen = found.info
            return True


def _view(want: Want, itemsize: int) -> memoryview:
    """The memory of a want, as bytes."""
    into = want.into
    if into.nbytes != math.prod(want.part.array_shape) * itemsize:
        raise ValueError(
            f"{into.nbytes} bytes of memory for an array of {want.name!r} of shape "
            f"{want.part.array_shape}"
        )
    return into if not into.nbytes or (into.format, into.ndim) == ("B", 1) else into.cast("B")


def _copy_shared(
    stored: Box, memory: memoryview, wanted: Part, into: memoryview, itemsize: int
) -> None:
    """Copy what a want has of a stored box that is in memory."""
    shared = stored.intersect(wanted.box)
    if shared is not None:
        copy_runs(copy_to_part(shared, stored, wanted, itemsize), memory, 0, into)
