"""The saves of one checkpointer, one at a time: those that are waited for, and those that a thread
does in the background. Knows turns and outcomes, not how a save goes."""

import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Literal, NoReturn

from holdfast._lanes import Lane, join_all
from holdfast.distributed._handle import Promise, SaveHandle
from holdfast.distributed._preparing import Looked, Request
from holdfast.distributed._save import Saving
from holdfast.distributed._save_record import OnSave, SaveRecord, log_record, tell_of_save
from holdfast.distributed._snapshots import Snapshots, Taken
from holdfast.distributed._step_hook import steps_seen, unwatch, watch
from holdfast.distributed._tools import Tools
from holdfast.errors import (
    CheckpointError,
    ErrorRecord,
    OperationTimeoutError,
    RankTimeoutError,
    SaveInProgressError,
)

_HEAD_START_S: Final = 0.002
"""A training that steps at once is to be through with that before its save wants the processor."""


_LOOK_S: Final = 0.05
_START_S: Final = 1.0


class Saves:
    """Used by one thread. Every rank makes the same calls in the same order.

    A rank that cannot take part, because its state cannot be saved or its last save had failed,
    says so to the others, which would wait for it.
    """

    def __init__(self, tools: Tools, snapshots: Snapshots, on_save: OnSave | None) -> None:
        self._tools = tools
        self._snapshots = snapshots
        self._on_save = on_save
        self._thread: Lane | None = None
        self._last: list[Promise] = []
        weakref.finalize(self, _report_unseen, self._last)

    def save(self, request: Request, timeout_s: float) -> str:
        """Save, and return the prefix. The error of a save in the background that nobody has been
        given is raised instead."""
        self.settle()
        failed = self._take_failed()
        saving = Saving(self._tools, request)
        look = saving.look if failed is None else _raising(failed)
        error: BaseException | None = None
        try:
            prefix = saving.run(look, timeout_s)
        except BaseException as problem:
            error = problem
            raise
        finally:
            self._tell(saving.record(error))
            del error, failed, look  # or this frame and the error would keep each other alive
        self._keep_up(saving)
        self.finish_upkeep()
        return prefix

    def start(self, request: Request, timeout_s: float) -> SaveHandle:
        """Save in the background. What is wrong with the state itself is raised here, as far as it
        can be told at once."""
        job = _Job(Saving(self._tools, request, is_async=True), timeout_s)
        try:
            with job.saving.timings.measure("stall"):
                self._take_turn(request.options.when_busy, timeout_s)
                try:
                    self._look(job, copy=request.options.snapshot == "copy")
                except BaseException as error:
                    job.look = _raising(self._told(error))
                    self._run(job)
                    self._last.clear()  # it is raised right here
                    raise
                self._run(job)
                if job.taken is not None and not job.taken.snapshot.copy_at_once(wait=False):
                    job.begin()  # there will be room when something is written
                    job.taken.snapshot.copy_at_once()
        except BaseException:
            # What is not copied by now will not stay as it is. Its thread may not even have begun.
            if job.saving.cancel() and job.taken is not None:
                self._give_back(job.taken)
            raise
        finally:
            job.may_begin = True  # first, and without a call: nothing can interrupt it
            job.begin()  # not before: what it takes counts this, too
        return job.promise.handle

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when no save is under way, and raise the error of the last one if nobody has been
        given it. ``OperationTimeoutError`` if it takes longer; it goes on then."""
        if not self.settle(timeout_s):
            raise OperationTimeoutError(
                f"a save in the background was not done after {timeout_s:g} s; it goes on",
                timeout_s=timeout_s,
            )
        failed = self._take_failed()
        if failed is not None:
            raise failed

    def settle(self, timeout_s: float | None = None) -> bool:
        """Whether no save is under way, in up to that time from now. Raises none of its errors."""
        if self._thread is threading.current_thread():
            raise RuntimeError(
                "a callback of a save in the background cannot save, load or wait: that save has "
                "not ended before its callbacks have. Leave it to the thread that trains"
            )
        thread = self._thread
        if thread is not None and _has_started(thread):
            if not thread.wait(timeout_s):
                return False
            join_all([thread])
        self._thread = None
        return True

    def _look(self, job: "_Job", *, copy: bool) -> None:
        """The state of this moment; what nobody would keep as it is is copied, as far as there is
        room."""
        failed = self._take_failed()
        if failed is not None:
            raise failed
        looked = job.saving.look()
        job.taken = self._snapshots.take(looked.captured, steps=steps_seen(), copy=copy)
        job.look = partial(replace, looked, taken=job.taken)
        watch(job.taken.snapshot)
        job.taken.snapshot.copy_at_once(wait=False)

    def _told(self, error: BaseException) -> BaseException:
        """What the other ranks are told of an error that is raised here. Not the error itself: two
        threads would change it."""
        rank = self._tools.coordinator.rank
        told = ErrorRecord.of(error, rank=rank, phase="capture").rebuild()
        if isinstance(error, CheckpointError):
            error.rank, error.phase = told.rank, told.phase
        return told

    def _run(self, job: "_Job") -> None:
        """Have a thread save, once it may begin. Not a daemon: the interpreter waits for it before
        it exits."""
        self._thread = Lane(self._work, job, name="holdfast-save", daemon=False)
        self._last[:] = [job.promise]
        try:
            self._thread.start()
        except RuntimeError:
            if not _has_started(self._thread):  # no thread is to be had
                self._thread = None
                self._last.clear()
            raise

    def _work(self, job: "_Job") -> None:
        job.wait()
        time.sleep(_HEAD_START_S)
        prefix, error = "", None
        try:
            prefix = job.saving.run(job.look, job.timeout_s, job.promise.set_prefix)
        except BaseException as problem:  # noqa: BLE001 -- the handle raises it
            error = problem
        try:
            if job.taken is not None:
                self._give_back(job.taken)
        finally:
            if error is not None and not job.saving.is_committed:
                error = job.promise.as_told(error)
            record = job.saving.record(error)
            try:
                self._tell(record)
            finally:
                job.promise.keep(prefix, error, record)
        if error is None:
            self._keep_up(job.saving)

    def _give_back(self, taken: Taken) -> None:
        unwatch(taken.snapshot)
        self._snapshots.give_back(taken)

    def _take_turn(self, when_busy: Literal["wait", "refuse"], timeout_s: float) -> None:
        if when_busy == "refuse":
            self._refuse_if_busy(timeout_s)
        self.settle()

    def _refuse_if_busy(self, timeout_s: float) -> None:
        """One rank may be through with a save a moment before another: all of them ask all."""
        is_busy = any(not promise.handle.done() for promise in self._last)
        try:
            with self._tools.coordinator.operation("save-turn", timeout_s) as operation:
                told = operation.all_gather(b"busy" if is_busy else b"")
        except RankTimeoutError as error:
            error.add_note('when_busy="refuse" asks all ranks; give it to all of them, or to none.')
            raise
        busy = [rank for rank, each in enumerate(told) if each]
        if busy:
            raise SaveInProgressError(
                f"the last save is still under way on rank{'s' if len(busy) > 1 else ''} "
                f"{', '.join(map(str, busy))}, so this one was not begun; that one goes on. Save "
                'less often, or wait with SaveOptions(when_busy="wait")'
            )

    def _take_failed(self) -> BaseException | None:
        unseen = [promise.take_unseen() for promise in self._last]
        self._last.clear()
        return unseen[0] if unseen else None

    def finish_upkeep(self) -> None:
        """Wait, for a minute at most, until what follows the last save is done."""
        if self._tools.upkeep is not None:
            self._tools.upkeep.finish()

    def _keep_up(self, saving: Saving) -> None:
        """After a commit: prune. Not in the save's time, and not in its thread: the next need not
        wait for it."""
        if self._tools.upkeep is not None and saving.is_committer:
            self._tools.upkeep.begin()

    def _tell(self, record: SaveRecord) -> None:
        log_record(record)
        tell_of_save(self._on_save, record)


@dataclass(slots=True)
class _Job:
    """One save in the background, from the thread that trains to the one that saves."""

    saving: Saving
    timeout_s: float
    look: Callable[[], Looked] = field(init=False)
    taken: Taken | None = None
    promise: Promise = field(init=False)
    may_begin: bool = False
    _asleep: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.look = self.saving.look
        self.promise = Promise(
            step=self.saving.step, progress=self.saving.meter.now, on_cancel=self.saving.cancel
        )
        self._asleep.acquire()

    def begin(self) -> None:
        """Let the thread that saves begin."""
        self.may_begin = True
        with contextlib.suppress(RuntimeError):  # it is awake
            self._asleep.release()

    def wait(self) -> None:
        """Until it may begin. Looks by itself now and then, should ``begin`` be interrupted."""
        while not self.may_begin:
            self._asleep.acquire(timeout=_LOOK_S)


def _has_started(thread: Lane) -> bool:
    """Whether a thread runs or ran. One whose start was interrupted may be about to."""
    until_s = time.monotonic() + _START_S
    while thread.ident is None:
        if time.monotonic() > until_s:
            return False
        time.sleep(0.001)
    return True


def _report_unseen(last: list[Promise]) -> None:
    """At the end of the program, or of a checkpointer that was not closed: an error that nobody
    asked for is reported as Python reports one that has ended a thread."""
    for promise in last:
        error = promise.take_unseen()
        if error is not None:
            thread = threading.Thread(name="holdfast-save")
            told = (type(error), error, error.__traceback__, thread)
            threading.excepthook(threading.ExceptHookArgs(told))


def _raising(error: BaseException) -> Callable[[], NoReturn]:
    def look() -> NoReturn:
        raise error

    return look
