"""The saves of one checkpointer, one at a time: those that are waited for, and those that a thread
does in the background. Knows turns and outcomes, not how a save goes."""

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal, NoReturn

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


class Saves:
    """Used by one thread. Every rank makes the same calls in the same order.

    A rank that cannot take part, because its state cannot be saved or its last save had failed,
    says so to the others, which would wait for it.
    """

    def __init__(self, tools: Tools, snapshots: Snapshots, on_save: OnSave | None) -> None:
        self._tools = tools
        self._snapshots = snapshots
        self._on_save = on_save
        self._thread: threading.Thread | None = None
        self._promise: Promise | None = None

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
        saving = Saving(self._tools, request, is_async=True)
        promise = Promise(
            step=request.options.step, progress=saving.meter.now, on_cancel=saving.cancel
        )
        may_begin = threading.Event()
        run = partial(self._run, saving, promise, timeout_s, may_begin)
        try:
            with saving.timings.measure("stall"):
                self._take_turn(request.options.when_busy, timeout_s)
                try:
                    looked, taken = self._look(saving, copy=request.options.snapshot == "copy")
                except BaseException as error:
                    run(_raising(self._told(error)))
                    self._promise = None  # it is raised right here
                    raise
                run(lambda: looked, taken=taken)
                if not taken.snapshot.copy_at_once(wait=False):
                    may_begin.set()  # there will be room when something is written
                    taken.snapshot.copy_at_once()
        except BaseException:
            saving.cancel()  # what is not copied by now will not stay as it is
            raise
        finally:
            may_begin.set()  # not before: what it takes counts this, too
        return promise.handle

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
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    def _look(self, saving: Saving, *, copy: bool) -> tuple[Looked, Taken]:
        """The state of this moment; what nobody would keep as it is is copied, as far as there is
        room."""
        failed = self._take_failed()
        if failed is not None:
            raise failed
        looked = saving.look()
        taken = self._snapshots.take(looked.captured, steps=steps_seen(), copy=copy)
        try:
            watch(taken.snapshot)
            taken.snapshot.copy_at_once(wait=False)
        except BaseException:
            self._give_back(taken)
            raise
        return replace(looked, taken=taken), taken

    def _told(self, error: BaseException) -> BaseException:
        """What the other ranks are told of an error that is raised here. Not the error itself: two
        threads would change it."""
        rank = self._tools.coordinator.rank
        told = ErrorRecord.of(error, rank=rank, phase="capture").rebuild()
        if isinstance(error, CheckpointError):
            error.rank, error.phase = told.rank, told.phase
        return told

    def _run(
        self,
        saving: Saving,
        promise: Promise,
        timeout_s: float,
        may_begin: threading.Event,
        look: Callable[[], Looked],
        *,
        taken: Taken | None = None,
    ) -> None:
        """Have a thread save, once it may begin."""

        def work() -> None:
            may_begin.wait()
            prefix, error = "", None
            try:
                prefix = saving.run(look, timeout_s, promise.set_prefix)
            except BaseException as problem:  # noqa: BLE001 -- the handle raises it
                error = problem
            try:
                if taken is not None:
                    self._give_back(taken)
            finally:
                error = None if error is None else promise.as_told(error)
                record = saving.record(error)
                try:
                    self._tell(record)
                finally:
                    promise.keep(prefix, error, record)
            if error is None:
                self._keep_up(saving)

        # Not a daemon: the interpreter waits for it before it exits.
        thread = threading.Thread(target=work, name="holdfast-save", daemon=False)
        thread.start()
        self._thread, self._promise = thread, promise

    def _give_back(self, taken: Taken) -> None:
        unwatch(taken.snapshot)
        self._snapshots.give_back(taken)

    def _take_turn(self, when_busy: Literal["wait", "refuse"], timeout_s: float) -> None:
        if when_busy == "refuse":
            self._refuse_if_busy(timeout_s)
        self.settle()

    def _refuse_if_busy(self, timeout_s: float) -> None:
        """One rank may be through with a save a moment before another: all of them ask all."""
        is_busy = self._promise is not None and not self._promise.handle.done()
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
        promise, self._promise = self._promise, None
        return None if promise is None else promise.take_unseen()

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


def _raising(error: BaseException) -> Callable[[], NoReturn]:
    def look() -> NoReturn:
        raise error

    return look
