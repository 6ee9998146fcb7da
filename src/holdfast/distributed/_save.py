"""One save, on one of its ranks: capture, agree, begin, write, commit.

Rank 0 begins and commits; every rank writes. Each phase either ends on all ranks or raises the
same error on all. What a failed save leaves behind is removed by whoever can know that nobody
will commit it; the rest is left to gc.
"""

import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, Literal

import msgspec
import torch

from holdfast.catalog import Attempt
from holdfast.catalog._model_index import write_index
from holdfast.catalog._shard_write import Tick
from holdfast.catalog._writing import check_record_size, record_of
from holdfast.contracts import Operation
from holdfast.distributed._aftermath import COMMITTER, Standing, give_up, tidy_up
from holdfast.distributed._announcing import Announced, announce, look_for
from holdfast.distributed._borrowing import Borrowed
from holdfast.distributed._collecting import collecting_later
from holdfast.distributed._keeping import Keeper
from holdfast.distributed._options import CheckpointFormat
from holdfast.distributed._preparing import Looked, Prepared, Preparing, Request
from holdfast.distributed._progress import ProgressMeter
from holdfast.distributed._referring import NO_REFERENCES, Base, compare
from holdfast.distributed._save_record import SaveRecord, Timings
from holdfast.distributed._step_hook import start_copying
from holdfast.distributed._summary import Summary, files_of, tensors_of, whole_tensor
from holdfast.distributed._timed import timed
from holdfast.distributed._tools import Tools
from holdfast.distributed._watch import Watch
from holdfast.distributed._writing import RankWriter, Written
from holdfast.errors import NoSpaceError, TornSnapshotError
from holdfast.format import CommitRecord, CompressionLevel

if TYPE_CHECKING:
    from holdfast.distributed._snapshot import Snapshot

_log = logging.getLogger("holdfast.distributed")

_NAMED: Final = 5
_COMMIT_GRACE_S: Final = 5.0
"""How long a commit under way may take to end once the save has failed: then it is known whether
there is a checkpoint."""


class _Begun(msgspec.Struct, frozen=True):
    """What rank 0 tells all: the save, and the checkpoint that it may refer to."""

    prefix: str
    attempt: str
    base: Base | None = None

    @classmethod
    def of(cls, announced: Announced) -> "_Begun":
        intent, base = announced.attempt.intent, announced.base
        return cls(intent.prefix, intent.attempt, None if base is None else Base.of(base))


class Saving:
    """What is known of one save as it goes on. ``look`` first, then ``run``, which may be in
    another thread; ``cancel`` may be called by any, at any time."""

    def __init__(self, tools: Tools, request: Request, *, is_async: bool = False) -> None:
        self._tools = tools
        self._request = request
        self._options = request.options
        self._rank = tools.coordinator.rank
        self._is_async = is_async
        self._is_consolidated = self._options.format is CheckpointFormat.CONSOLIDATED
        self._preparing = Preparing(tools, request, self._rank)
        self._snapshot: Snapshot | None = None
        self._state_bytes = 0
        self._written: Written | None = None
        self._stopping = threading.Lock()
        self._is_stopped = False
        self.timings = Timings()
        self.meter = ProgressMeter(self._options.progress, operation="save", rank=self._rank)
        self._keeper: Keeper | None = None
        self._announced: Announced | None = None
        self._references = NO_REFERENCES
        self._standing = Standing()

    @property
    def step(self) -> int | None:
        return self._options.step

    @property
    def is_committed(self) -> bool:
        """Whether this rank knows that it is."""
        return self._standing.committed

    @property
    def is_committer(self) -> bool:
        return self._rank == COMMITTER

    @property
    def prefix(self) -> str:
        return self._standing.prefix

    def look(self) -> Looked:
        """This rank's own state, as it is now. Waits for nobody."""
        with collecting_later():
            return self._preparing.look()

    def cancel(self) -> bool:
        """Stop, unless it is too late, and say whether: nothing is committed then."""
        with self._stopping:
            self._is_stopped = self._is_stopped or not self._standing.told
            return self._is_stopped

    def run(
        self,
        look: Callable[[], Looked],
        timeout_s: float,
        begun: Callable[[str], None] = lambda _: None,
    ) -> str:
        """Save what ``look`` gives, and return its prefix, which ``begun`` is told beforehand. All
        ranks call this; what ``look`` raises is raised on all."""
        try:
            with self._tools.coordinator.operation("save", timeout_s) as operation:
                self._run(operation, look, timeout_s, begun)
            tidy_up(self._tools, self._standing, has_index=self._is_consolidated)
        except BaseException as error:
            give_up(self._tools, self._standing, error)
            raise
        return self.prefix

    def record(self, error: BaseException | None) -> SaveRecord:
        """What it took, once it has ended."""
        snapshot, written = self._snapshot, self._written
        if snapshot is not None:
            self.timings.add("copy", snapshot.copy_s)
            self.timings.add("stall", snapshot.stall_s)
        return self.timings.record(
            prefix=self.prefix or None,
            step=self._options.step,
            rank=self._rank,
            world_size=self._tools.coordinator.world_size,
            is_async=self._is_async,
            state_bytes=self._state_bytes,
            written_bytes=0 if written is None else written.written_bytes,
            referred_bytes=0 if written is None else written.referred_bytes,
            predicted_stall_s=None if snapshot is None else snapshot.predicted_stall_s,
            error=error,
        )

    def _run(
        self,
        operation: Operation,
        look: Callable[[], Looked],
        timeout_s: float,
        begun_as: Callable[[str], None],
    ) -> None:
        with operation.phase("capture"), self.meter.phase("capture"), collecting_later():
            looked = look()
            if looked.taken is not None:
                self._snapshot = looked.taken.snapshot
                self._snapshot.give_way()
                self._snapshot.cut()
                self._snapshot.give_way()
            flat = self._preparing.flatten(looked)
        with operation.phase("agree"), self._phase("agree"), collecting_later():
            prepared = self._preparing.agree(operation, looked, flat)
        versions = prepared.flat.versions()
        if self._snapshot is None and torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # what the training has queued is part of the state
        self._state_bytes = self._writer(prepared).total_bytes()
        if self._snapshot is not None:
            start_copying(self._snapshot, self._writer(prepared).needs())
        with contextlib.ExitStack() as stack:
            with operation.phase("begin"), self._phase("begin"):
                begun = self._begin(operation, prepared, stack)
                begun_as(begun.prefix)
                if begun.base is None:
                    self._check_room(operation, prepared)
            if begun.base is not None:
                with operation.phase("compare"):
                    self._compare(operation, prepared, begun.base)
                    self._need_less(prepared)
                    self._check_room(operation, prepared)
            with operation.phase("write"), self.timings.measure("write"):
                written = self._write(operation, prepared, versions, timeout_s)
            with operation.phase("commit"), self.timings.measure("commit"):
                self._give_word()
                told = operation.gather(written.summary.encode(), target=COMMITTER)
        with operation.phase("commit"), self._phase("commit"), collecting_later():
            if told is not None:
                summaries = [Summary.decode(each) for each in told]
                self._commit(operation, self._record(prepared, summaries))
            operation.broadcast(b"committed", source=COMMITTER)
            self._standing.committed = True
            self._tools.recent.prefix = self.prefix

    @contextlib.contextmanager
    def _phase(self, name: Literal["agree", "begin", "commit"]) -> Iterator[None]:
        self._check_stopped()
        if self._snapshot is not None:
            self._snapshot.give_way()
        with self.meter.phase(name), self.timings.measure(name):
            yield

    def _check_stopped(self) -> None:
        if self._is_stopped:
            raise concurrent.futures.CancelledError("the save was cancelled; nothing was committed")

    def _need_less(self, prepared: Prepared) -> None:
        """What is referred to need not be copied."""
        needed = self._writer(prepared).needs()
        if self._snapshot is not None and needed is not None:
            self._snapshot.needs(needed)

    def _give_word(self) -> None:
        """From here on the committer may have all that it needs."""
        with self._stopping:
            self._check_stopped()
            self._standing.told = True

    def _begin(
        self, operation: Operation, prepared: Prepared, stack: contextlib.ExitStack
    ) -> _Begun:
        storage, facts = self._tools.storage, prepared.facts
        if self._rank == COMMITTER:
            prefix = self._options.checkpoint_prefix or ""
            check_record_size(prepared.tree, facts.custom, storage, prefix)
            self._keeper = stack.enter_context(
                Keeper(Watch(operation).run(lambda _: self._announce()))
            )
        told = operation.broadcast(
            None if self._announced is None else msgspec.json.encode(_Begun.of(self._announced)),
            source=COMMITTER,
        )
        begun = msgspec.json.decode(told, type=_Begun)
        self._standing.prefix, self._standing.name = begun.prefix, begun.attempt
        if self._rank != COMMITTER:
            Watch(operation).run(
                lambda proceed: look_for(storage, begun.prefix, begun.attempt, proceed)
            )
        return begun

    def _compare(self, operation: Operation, prepared: Prepared, base: Base) -> None:
        """See what another checkpoint has already of this rank's part: that is not written."""
        writer = self._writer(prepared)
        nbytes = writer.total_bytes()
        with self.meter.phase("compare", nbytes), collecting_later(moved_bytes=nbytes):
            self._references = compare(
                operation,
                self._tools.storage,
                base,
                writer.parts(),
                prefix=self.prefix,
                ticking=self._ticking,
                found=None if self._announced is None else self._announced.base,
            )

    def _check_room(self, operation: Operation, prepared: Prepared) -> None:
        storage = self._tools.storage
        own_bytes = self._writer(prepared).total_bytes()
        needed = sum(map(int, operation.all_gather(str(own_bytes).encode())))
        if self._rank == COMMITTER and self._options.compression_level is CompressionLevel.NONE:
            free = Watch(operation).run(lambda _: storage.free_bytes())
            if free is not None and needed > free:
                raise NoSpaceError(
                    f"the checkpoint needs {needed:,} bytes and there are {free:,} free; nothing "
                    "was saved. Delete older checkpoints, or save to another place",
                    path=f"{storage.url}/{self.prefix}",
                )

    def _announce(self) -> Attempt:
        announced = announce(self._tools.catalog, self._options, self._tools.recent.prefix)
        attempt, standing = announced.attempt, self._standing
        self._announced = announced
        standing.attempt, standing.prefix = attempt, attempt.intent.prefix
        standing.name = attempt.intent.attempt
        return attempt

    def _writer(self, prepared: Prepared) -> RankWriter:
        return RankWriter(
            storage=timed(self._tools.storage, self.timings),
            prefix=self._standing.prefix,
            attempt=self._standing.name,
            rank=self._rank,
            form=self._options.format,
            level=self._options.compression_level,
            flat=prepared.flat,
            arrangement=prepared.arrangement,
            references=self._references,
        )

    def _ticking(self, proceed: Callable[[], None]) -> Tick:
        def tick(nbytes: int) -> None:
            proceed()
            self._check_stopped()
            if self._keeper is not None:
                self._keeper.check()
            if self._snapshot is not None:
                self._snapshot.check()
            self.meter.tick(nbytes)

        return tick

    def _write(
        self,
        operation: Operation,
        prepared: Prepared,
        versions: Sequence[int | None],
        timeout_s: float,
    ) -> Written:
        writer = self._writer(prepared)
        sending = prepared.arrangement.is_sending()
        if sending:
            self._tools.bulk.open(timeout_s, operation=operation)
            self._standing.sent = True
        nbytes = writer.total_bytes()
        with self.meter.phase("write", nbytes), collecting_later(moved_bytes=nbytes):

            def work(proceed: Callable[[], None]) -> Written:
                course = self._tools.bulk.course(proceed) if sending else None
                return writer.write(
                    tick=self._ticking(proceed),
                    retry=self._tools.handler.execute_with_retry,
                    course=course,
                )

            written = self._written = Watch(operation).run(work)
        if self._snapshot is not None:
            self._snapshot.finish()
            self._snapshot.check()
        changed = prepared.flat.changed_since(versions)
        if changed:
            more = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
            raise TornSnapshotError(
                f"{', '.join(changed[:_NAMED])}{more} changed while being saved, so that what was "
                "written is of no one moment; nothing was committed. Save between steps, from the "
                "thread that trains"
            )
        return written

    def _record(self, prepared: Prepared, summaries: Sequence[Summary]) -> CommitRecord:
        tensors = {
            step.leaf.name: whole_tensor(step.leaf.dtype, step.leaf.shape, step.file)
            for step in prepared.arrangement.steps
        }
        files = files_of(summaries)
        attempt, announced = self._standing.attempt, self._announced
        assert attempt is not None  # noqa: S101 -- only the committer makes records
        assert announced is not None  # noqa: S101 -- as above
        borrowed = Borrowed(announced.base, prefix=self.prefix, first=len(files))
        tensors |= tensors_of(prepared.arrangement.rest, summaries, borrowed)
        return record_of(
            attempt,
            prepared.facts,
            tree=prepared.tree,
            files=(*files, *borrowed.files),
            tensors=tensors,
            world_size=len(summaries),
            shard_format=self._options.format.value,
        )

    def _commit(self, operation: Operation, record: CommitRecord) -> None:
        watch = Watch(operation, grace_s=_COMMIT_GRACE_S)
        try:
            watch.run(lambda _: self._publish(record))
        finally:
            self._standing.committing = watch.left_running

    def _publish(self, record: CommitRecord) -> None:
        attempt, storage = self._standing.attempt, self._tools.storage
        assert attempt is not None  # noqa: S101 -- only the committer commits
        if attempt.replaces is None and self._is_consolidated:
            write_index(storage, self.prefix, record)
        self._tools.catalog.commit(attempt, record)
        self._standing.committed = True
