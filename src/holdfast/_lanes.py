"""Runs pieces of work side by side on a few threads. Knows nothing of what they are."""

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final, TypeVar, final

T = TypeVar("T")

_LOOK_S: Final = 0.02
_GONE_S: Final = 1.0


@final
class Lane(threading.Thread):
    """A thread that says by itself when its work is over.

    Of others nobody knows for sure. Before Python 3.13 one whose ``join`` or ``is_alive`` was
    interrupted says that it has ended, and runs on; from then on ``join`` blocks for ever while the
    interpreter exits; and a thread cannot end while ``threading`` makes a list of all, which is
    where garbage may be collected that waits for it.
    """

    def __init__(
        self,
        work: Callable[..., object],
        *args: Any,
        name: str,
        daemon: bool | None = None,
    ) -> None:
        super().__init__(target=work, args=args, name=name, daemon=daemon)
        self._process = os.getpid()
        self._is_over = False
        self._bell = threading.Lock()
        self._bell.acquire()

    def run(self) -> None:
        try:
            super().run()
        finally:
            self._end()

    def _bootstrap_inner(self) -> None:
        try:
            super()._bootstrap_inner()  # type: ignore[misc]  # it may fail before there is a run
        finally:
            self._end()

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._bell.release()

    def is_at_work(self) -> bool:
        """Whether it was begun, and its work is not over. While the interpreter exits, and in a
        fork, no thread goes on but the one that asks."""
        return (
            self.ident is not None
            and not self._is_over
            and os.getpid() == self._process
            and not sys.is_finalizing()
        )

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until it is not at work, or for up to that time. Returns whether it is not."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while self.is_at_work():
            left_s = _LOOK_S if until_s is None else until_s - time.monotonic()
            if left_s <= 0:
                return False
            self._bell.acquire(timeout=min(left_s, _LOOK_S))  # it rings for one of those who wait
        return True

    def wait_until_gone(self) -> None:
        """Once its work is over: for a moment, so that who counts threads does not find it."""
        if self._is_over and not sys.is_finalizing():
            self.join(_GONE_S)


def run_all(work: Iterable[T], run: Callable[[T], None], *, lanes: int) -> None:
    """Call ``run`` with every item, on ``lanes`` threads, of which the caller's is one.

    The first ``lanes`` items are taken at once, so that no thread is started that has nothing to
    do; the rest one at a time, as threads become free. After an error, or an interrupt, no further
    item is begun, and the first is raised when all threads have ended. No item is ``None``.
    """
    items = iter(work)
    head = [*itertools.islice(items, lanes)]
    items = itertools.chain(head, items)
    lock = threading.Lock()
    errors: list[BaseException] = []
    over = threading.Event()

    def fail(error: BaseException) -> None:
        errors.append(error)
        over.set()

    def lane() -> None:
        try:
            while (item := take()) is not None:
                run(item)
        except BaseException as error:  # noqa: BLE001 -- raised by the caller's thread
            fail(error)

    def take() -> T | None:
        with lock:
            return None if over.is_set() else next(items, None)

    threads: list[Lane] = []
    try:
        _start(threads, lane, len(head) - 1)
        lane()
    except BaseException as error:  # noqa: BLE001 -- an interrupt; those that run must end first
        fail(error)
    try:
        join_all(threads)
    except BaseException as interrupt:  # noqa: BLE001 -- raised below, as any error
        fail(interrupt)
        join_all(threads)  # again: it may have come before that had begun to wait
    over.set()  # for a thread whose start was interrupted: it may begin only now
    if errors:
        try:
            raise errors[0]
        finally:
            errors.clear()  # or the error and the frames that it knows would keep each other alive


def join_all(lanes: Collection[Lane]) -> None:
    """Wait until the work of all of these is over, whatever interrupts this thread: they use memory
    and descriptors that their caller will use for something else. The first interrupt is raised
    then, or ``RuntimeError`` if this thread is one of them."""
    this = threading.current_thread()
    others = [lane for lane in lanes if lane is not this]

    def wait() -> None:
        # Again and again: one whose start failed may begin meanwhile all the same.
        while any(lane.is_at_work() for lane in others):
            for lane in others:
                lane.wait()
        for lane in others:
            lane.wait_until_gone()

    uninterrupted(wait)
    if len(others) < len(lanes):
        raise RuntimeError("a thread cannot wait for itself")


def uninterrupted(work: Callable[[], None]) -> None:
    """Do what must be done, and may be done again: what interrupts it has it begun anew, and the
    first of these is raised when it is done. ``work`` raises nothing itself."""
    first: BaseException | None = None
    while True:
        try:
            work()
            break
        except BaseException as interrupt:  # noqa: BLE001 -- raised below
            first = interrupt if first is None else first
    if first is not None:
        try:
            raise first
        finally:
            del first  # or the interrupt and the frames that it knows keep each other alive


def _start(threads: list[Lane], lane: Callable[[], None], count: int) -> None:
    """Start as many threads as are to be had: there are none while the interpreter exits."""
    for _ in range(count):
        thread = Lane(lane, name="holdfast-lane")
        threads.append(thread)
        try:
            thread.start()
        except (RuntimeError, MemoryError):
            return
