"""Long work of one rank, while it keeps an eye on the others. Knows no storage and no tensors.

A rank that writes or reads for minutes calls no collective meanwhile. If another rank dies, it
would find out when it is done. So its work runs in a thread, and its own thread watches.
"""

import contextvars
import signal
import threading
import traceback
from collections.abc import Callable
from typing import Generic, TypeVar, final

from holdfast import _checks
from holdfast.contracts import Operation

T = TypeVar("T")

FIRST_POLL_S = 0.001
GRACE_S = 1.0
FOREVER_S = threading.TIMEOUT_MAX


class Cancelled(BaseException):
    """Raised inside the work by ``proceed``. No ``Exception``, so that nothing retries it."""


@final
class Watch:
    """Runs this rank's own work in a thread while its caller watches the other ranks.

    Used by one thread, inside the operation's block, and while it runs nothing else may use the
    operation. ``grace_s``: how long a work that was told to stop may take to end.
    """

    left_running: bool
    """Whether the work of the last ``run`` did not end when it was told to, and may go on."""

    def __init__(
        self, operation: Operation, *, poll_s: float = 0.05, grace_s: float = GRACE_S
    ) -> None:
        self._operation = operation
        self._poll_s = _checks.seconds("poll_s", poll_s)
        self._grace_s = _checks.seconds("grace_s", grace_s)
        self.left_running = False

    def run(self, work: Callable[[Callable[[], None]], T]) -> T:
        """Return what ``work(proceed)`` returns, or raise what it raises.

        If another rank is lost or fails, the operation's time is over, or this thread is
        interrupted, then that is raised. Before, the work is told to stop and given a while:
        ``proceed()``, which it should call often, from any thread, raises ``Cancelled``. A work
        that does not end in that while is left running; the error has a note that says so, and
        the interpreter does not wait for it when it exits.

        The work sees the caller's context variables, but what it sets is not seen outside.
        """
        self.left_running = False
        task = _Task(work)
        try:
            task.start()
            pause_s = min(FIRST_POLL_S, self._poll_s)
            while not task.done.wait(pause_s):
                self._operation.check()
                pause_s = min(2 * pause_s, self._poll_s)
        except BaseException as error:
            self._give_up(task, error)
            raise
        return task.result()

    def _give_up(self, task: "_Task[T]", error: BaseException) -> None:
        task.given_up.set()
        try:
            task.done.wait(self._grace_s)
        finally:  # also after a second interrupt
            self.left_running = not task.done.is_set()
            own = task.take_error()
            if self.left_running:
                error.add_note(
                    f"The work of this rank was told to stop and had not {self._grace_s:g} s later "
                    "(a storage call that does not return?). It is left running."
                )
            elif own is not None and not isinstance(own, Cancelled):
                story = "".join(traceback.format_exception_only(own)).strip()
                error.add_note(f"Told to stop, the work of this rank failed by itself: {story}")
            del own


def finish_within(seconds: float, work: Callable[[], None]) -> bool:
    """Whether ``work()`` ended in that time; what it raises is raised. A work that did not is left
    running, and the interpreter does not wait for it when it exits."""
    task = _Task(lambda _: work())
    task.start()
    if not task.done.wait(seconds):
        return False
    task.result()
    return True


def finish(work: Callable[[], None]) -> None:
    """Call ``work()``, which Ctrl-C does not interrupt. For what must not be left half done, after
    something else has failed: that is raised next, so the interrupt is not."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        work()  # no interrupt arrives here
        return
    signal.signal(signal.SIGINT, lambda *_: None)
    try:
        work()
    finally:
        signal.signal(signal.SIGINT, before)


class _Task(Generic[T]):
    """A call in a thread of its own. A daemon: a call that hangs must not keep the interpreter."""

    def __init__(self, work: Callable[[Callable[[], None]], T]) -> None:
        self.done = threading.Event()
        self.given_up = threading.Event()
        self._error: BaseException | None = None
        self._value: T
        self._work = work
        self._context = contextvars.copy_context()

    def start(self) -> None:
        try:
            threading.Thread(target=self._run, name="holdfast-work", daemon=True).start()
        except RuntimeError:  # no thread is to be had
            self.done.set()
            raise

    def result(self) -> T:
        error = self.take_error()
        try:
            if error is not None:
                raise error
            return self._value
        finally:
            del error  # or this frame and the error would keep each other alive

    def take_error(self) -> BaseException | None:
        """The error, which knows frames that know this task: it is not kept."""
        error, self._error = self._error, None
        return error

    def _proceed(self) -> None:
        if self.given_up.is_set():
            raise Cancelled

    def _run(self) -> None:
        try:
            self._value = self._context.run(self._work, self._proceed)
        except BaseException as error:  # noqa: BLE001 -- raised by the thread that watches
            self._error = error
        finally:
            self.done.set()
