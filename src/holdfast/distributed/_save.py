"""One save, on one of its ranks: capture, agree, begin, write, commit.

Rank 0 begins and commits; every rank writes. Each phase either ends on all ranks or raises the
same error on all. What a failed save leaves behind is removed by whoever can know that nobody
will commit it; the rest is left to gc.
"""

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import torch

from holdfast.catalog import Attempt
from holdfast.catalog._attempt import written_in
from holdfast.catalog._delete import delete_replaced
from holdfast.catalog._model_index import settle_index, write_index
from holdfast.catalog._writing import check_record_size, record_of
from holdfast.contracts import Operation
from holdfast.distributed._announcing import announce, look_for
from holdfast.distributed._collecting import collecting_later
from holdfast.distributed._keeping import Keeper
from holdfast.distributed._options import CheckpointFormat
from holdfast.distributed._preparing import Prepared, Preparing, Request
from holdfast.distributed._progress import ProgressMeter
from holdfast.distributed._summary import Summary, files_of, tensors_of, whole_tensor
from holdfast.distributed._tools import Tools
from holdfast.distributed._watch import Watch, finish_within
from holdfast.distributed._writing import RankWriter
from holdfast.errors import CheckpointError, NoSpaceError, SaveError, TornSnapshotError
from holdfast.format import CommitRecord, CompressionLevel

_log = logging.getLogger("holdfast.distributed")

_COMMITTER: Final = 0
_NAMED: Final = 5
_BEFORE_COMMIT: Final = frozenset({"capture", "begin", "write"})
"""Phases in which a rank has not given its word. Not "agree": every operation ends with one."""

_COMMIT_GRACE_S: Final = 5.0
"""How long a commit under way may take to end once the save has failed: then it is known whether
there is a checkpoint."""

_TIDY_S: Final = 60.0
"""How long tidying up after a commit may take before ``save`` returns without it."""

_CLEAN_S: Final = 3.0
"""How long what a failed save wrote is being removed before the error is raised."""


def save_state(tools: Tools, request: Request, *, timeout_s: float) -> str:
    """Save a tree of values, tensors and statefuls, and return its prefix. All ranks call this."""
    saving = _Saving(tools, request)
    try:
        with tools.coordinator.operation("save", timeout_s) as operation:
            saving.run(operation, timeout_s)
        saving.tidy()
    except BaseException as error:
        saving.give_up(error)
        raise
    return saving.prefix


class _Begun(msgspec.Struct, frozen=True):
    prefix: str
    attempt: str


class _Saving:
    """What is known of one save as it goes on."""

    def __init__(self, tools: Tools, request: Request) -> None:
        self._tools = tools
        self._request = request
        self._options = request.options
        self._rank = tools.coordinator.rank
        self._meter = ProgressMeter(self._options.progress, operation="save", rank=self._rank)
        self._keeper: Keeper | None = None
        self._attempt: Attempt | None = None
        self._begun: _Begun | None = None
        self._told = False  # whether the committer may have all that it needs to commit
        self._committing = False  # whether a commit was left running
        self._committed = False
        self._sent = False  # whether the way to other ranks was used

    @property
    def prefix(self) -> str:
        return "" if self._begun is None else self._begun.prefix

    def run(self, operation: Operation, timeout_s: float) -> None:
        preparing = Preparing(self._tools, self._request, self._rank)
        with operation.phase("capture"), self._meter.phase("capture"), collecting_later():
            facts, captured, flat = preparing.capture()
        with operation.phase("agree"), self._meter.phase("agree"), collecting_later():
            prepared = preparing.agree(operation, facts, captured, flat)
        with contextlib.ExitStack() as stack:
            with operation.phase("begin"), self._meter.phase("begin"):
                self._begin(operation, prepared, stack)
            with operation.phase("write"):
                summary = self._write(operation, prepared, timeout_s)
            with operation.phase("commit"):
                self._told = True
                told = operation.gather(summary.encode(), target=_COMMITTER)
        with operation.phase("commit"), self._meter.phase("commit"), collecting_later():
            if told is not None:
                summaries = [Summary.decode(each) for each in told]
                self._commit(operation, self._record(prepared, summaries))
            operation.broadcast(b"committed", source=_COMMITTER)
            self._committed = True

    def tidy(self) -> None:
        """After the commit, and not part of it: nothing here can make the save fail."""
        try:
            if self._attempt is not None and not finish_within(_TIDY_S, self._tidy):
                _log.warning("%s is saved; tidying up goes on in the background", self.prefix)
        except Exception as error:  # noqa: BLE001 -- the checkpoint is there
            _log.warning("%s is saved, but not all is tidy: %s", self.prefix, error)

    def _tidy(self) -> None:
        storage, attempt = self._tools.storage, self._attempt
        if self._options.format is CheckpointFormat.CONSOLIDATED:
            settle_index(storage, self.prefix)
        if attempt is not None and attempt.replaces is not None:
            delete_replaced(storage, attempt.replaces)

    def give_up(self, error: BaseException) -> None:
        """After an error: remove what nobody will commit, and say what is known."""
        self._tools.locate(error)
        if self._sent:
            self._tools.bulk.discard()
        if self._committed:
            _say(error, f"{self.prefix} is committed and whole all the same.")
        elif self._attempt is not None and not self._committing:
            self._clean_up(error, self._attempt.abort)
        elif self._begun is not None and (not self._told or _is_before_commit(error)):
            self._clean_up(error, self._remove_written)
        elif self._begun is not None and not _is_refused(error):
            _say(
                error,
                f"Whether {self.prefix} is committed is unknown: list the checkpoints to see. "
                "What was saved before is intact; gc removes what is left if it is not.",
            )

    def _begin(self, operation: Operation, prepared: Prepared, stack: contextlib.ExitStack) -> None:
        storage, facts = self._tools.storage, prepared.facts
        if self._rank == _COMMITTER:
            prefix = self._options.checkpoint_prefix or ""
            check_record_size(prepared.tree, facts.custom, storage, prefix)
            self._keeper = stack.enter_context(
                Keeper(Watch(operation).run(lambda _: self._announce()))
            )
        told = operation.broadcast(
            None if self._begun is None else msgspec.json.encode(self._begun), source=_COMMITTER
        )
        begun = self._begun = msgspec.json.decode(told, type=_Begun)
        if self._rank != _COMMITTER:
            Watch(operation).run(
                lambda proceed: look_for(storage, begun.prefix, begun.attempt, proceed)
            )
        own_bytes = self._writer(prepared).total_bytes()
        needed = sum(map(int, operation.all_gather(str(own_bytes).encode())))
        if self._rank == _COMMITTER and self._options.compression_level is CompressionLevel.NONE:
            free = Watch(operation).run(lambda _: storage.free_bytes())
            if free is not None and needed > free:
                raise NoSpaceError(
                    f"the checkpoint needs {needed:,} bytes and there are {free:,} free; nothing "
                    "was saved. Delete older checkpoints, or save to another place",
                    path=f"{storage.url}/{self.prefix}",
                )

    def _announce(self) -> Attempt:
        attempt = self._attempt = announce(self._tools.catalog, self._options)
        self._begun = _Begun(prefix=attempt.intent.prefix, attempt=attempt.intent.attempt)
        return attempt

    def _writer(self, prepared: Prepared) -> RankWriter:
        begun = self._begun or _Begun(prefix="", attempt="")
        return RankWriter(
            storage=self._tools.storage,
            prefix=begun.prefix,
            attempt=begun.attempt,
            rank=self._rank,
            form=self._options.format,
            level=self._options.compression_level,
            flat=prepared.flat,
            arrangement=prepared.arrangement,
        )

    def _write(self, operation: Operation, prepared: Prepared, timeout_s: float) -> Summary:
        writer = self._writer(prepared)
        versions = prepared.flat.versions()
        sending = prepared.arrangement.is_sending()
        if sending:
            self._tools.bulk.open(timeout_s, operation=operation)
            self._sent = True
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # what the training has queued is part of the state
        nbytes = writer.total_bytes()
        with self._meter.phase("write", nbytes), collecting_later(moved_bytes=nbytes):

            def work(proceed: Callable[[], None]) -> Summary:
                def tick(nbytes: int) -> None:
                    proceed()
                    if self._keeper is not None:
                        self._keeper.check()
                    self._meter.tick(nbytes)

                course = self._tools.bulk.course(proceed) if sending else None
                return writer.write(
                    tick=tick, retry=self._tools.handler.execute_with_retry, course=course
                )

            summary = Watch(operation).run(work)
        changed = prepared.flat.changed_since(versions)
        if changed:
            more = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
            raise TornSnapshotError(
                f"{', '.join(changed[:_NAMED])}{more} changed while being saved, so that what was "
                "written is of no one moment; nothing was committed. Save between steps, from the "
                "thread that trains"
            )
        return summary

    def _record(self, prepared: Prepared, summaries: Sequence[Summary]) -> CommitRecord:
        tensors = {
            step.leaf.name: whole_tensor(step.leaf.dtype, step.leaf.shape, step.file)
            for step in prepared.arrangement.steps
        }
        tensors |= tensors_of(prepared.arrangement.rest, summaries)
        attempt = self._attempt
        assert attempt is not None  # noqa: S101 -- only the committer makes records
        return record_of(
            attempt,
            prepared.facts,
            tree=prepared.tree,
            files=files_of(summaries),
            tensors=tensors,
            world_size=len(summaries),
            shard_format=self._options.format.value,
        )

    def _commit(self, operation: Operation, record: CommitRecord) -> None:
        watch = Watch(operation, grace_s=_COMMIT_GRACE_S)
        try:
            watch.run(lambda _: self._publish(record))
        finally:
            self._committing = watch.left_running

    def _publish(self, record: CommitRecord) -> None:
        attempt, storage = self._attempt, self._tools.storage
        assert attempt is not None  # noqa: S101 -- only the committer commits
        if attempt.replaces is None and record.shard_format == CheckpointFormat.CONSOLIDATED.value:
            write_index(storage, self.prefix, record)
        self._tools.catalog.commit(attempt, record)
        self._committed = True

    def _clean_up(self, error: BaseException, work: Callable[[], None]) -> None:
        """Remove what was written, if the storage lets it be removed in time."""
        problem = f"it took longer than {_CLEAN_S:g} s"
        try:
            if finish_within(_CLEAN_S, work):
                return
        except CheckpointError as found:
            problem = str(found)
        error.add_note(
            f"What the save had written could not be removed: {problem}. gc removes what is left."
        )

    def _remove_written(self) -> None:
        """A word is missing, so nobody commits, and the files of all ranks are nobody's."""
        storage, begun = self._tools.storage, self._begun
        assert begun is not None  # noqa: S101 -- there are files once there is an attempt
        for key in written_in(storage, begun.prefix, begun.attempt):
            storage.delete(key)


def _is_before_commit(error: BaseException) -> bool:
    """Whether the rank where an error began had not given its word: nobody commits without it."""
    return isinstance(error, CheckpointError) and error.phase in _BEFORE_COMMIT


def _is_refused(error: BaseException) -> bool:
    """Whether rank 0 said that it refused to commit."""
    return isinstance(error, SaveError) and error.rank == _COMMITTER


def _say(error: BaseException, sentence: str) -> None:
    if isinstance(error, CheckpointError):
        error.args = (f"{error.message}. {sentence}", *error.args[1:])
    else:
        error.add_note(sentence)
