"""Runs pieces of work side by side on a few threads. Knows nothing of what they are."""

import itertools
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def run_all(work: Iterable[T], run: Callable[[T], None], *, lanes: int) -> None:
    """Call ``run`` with every item, on ``lanes`` threads, of which the caller's is one.

    The first ``lanes`` items are taken at once, so that no thread is started that has nothing to
    do; the rest one at a time, as threads become free. After an error no further item is begun,
    and the first error is raised when all threads have ended. No item is ``None``.
    """
    items = iter(work)
    head = [*itertools.islice(items, lanes)]
    items = itertools.chain(head, items)
    lock = threading.Lock()
    errors: list[BaseException] = []

    def lane() -> None:
        try:
            while (item := take()) is not None:
                run(item)
        except BaseException as error:  # noqa: BLE001 -- raised by the caller's thread
            errors.append(error)

    def take() -> T | None:
        with lock:
            return None if errors else next(items, None)

    threads: list[threading.Thread] = []
    try:
        _start(threads, lane, len(head) - 1)
    except BaseException as error:  # noqa: BLE001 -- an interrupt; those that run must end first
        errors.append(error)
    lane()
    for thread in threads:
        if thread.ident is not None:
            thread.join()
    if errors:
        try:
            raise errors[0]
        finally:
            errors.clear()  # or the error and the frames that it knows would keep each other alive


def _start(threads: list[threading.Thread], lane: Callable[[], None], count: int) -> None:
    """Start as many threads as are to be had: there are none while the interpreter exits."""
    for _ in range(count):
        thread = threading.Thread(target=lane, name="holdfast-lane")
        threads.append(thread)
        try:
            thread.start()
        except RuntimeError:
            return
