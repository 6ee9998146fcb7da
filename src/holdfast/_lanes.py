"""Runs pieces of work side by side on a few threads. Knows nothing of what they are."""

import itertools
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable
from typing import Final, TypeVar

T = TypeVar("T")

_POLL_S: Final = 0.001


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

    threads: list[threading.Thread] = []
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


def join_all(threads: Collection[threading.Thread]) -> None:
    """Wait until all of these have ended, whatever interrupts this thread: they use memory and
    descriptors that their caller will use for something else. The first interrupt is raised
    then, or ``RuntimeError`` if this thread is one of them."""
    this = threading.current_thread()

    def join() -> None:
        for thread in threads:
            if thread is not this and not sys.is_finalizing() and thread.is_alive():
                thread.join()
            # Before Python 3.13 a thread whose join was interrupted says that it has ended. While
            # the interpreter exits no thread but this goes on, and from 3.13 on none has ended.
            while thread is not this and thread.ident and not sys.is_finalizing():
                if thread not in threading.enumerate():
                    break
                time.sleep(_POLL_S)

    uninterrupted(join)
    if this in threads:
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


def _start(threads: list[threading.Thread], lane: Callable[[], None], count: int) -> None:
    """Start as many threads as are to be had: there are none while the interpreter exits."""
    for _ in range(count):
        thread = threading.Thread(target=lane, name="holdfast-lane")
        threads.append(thread)
        try:
            thread.start()
        except (RuntimeError, MemoryError):
            return
