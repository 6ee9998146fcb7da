"""Runs pieces of work on a few threads. Knows nothing of what they are."""

import threading
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

T = TypeVar("T")

LANES: Final = 4
"""Requests in flight. On a disk more bring nothing; each holds a batch of memory."""


def run_all(work: Iterable[T], run: Callable[[T], None]) -> None:
    """Call ``run`` with every item, on up to ``LANES`` threads of which the caller's is one.

    Items are taken one at a time, as threads become free. After an error no further item is
    begun; the first error is raised when all threads have ended.
    """
    items = iter(work)
    lock = threading.Lock()
    errors: list[BaseException] = []
    none = object()

    def lane() -> None:
        while True:
            try:
                with lock:
                    item = none if errors else next(items, none)
                if item is none:
                    return
                run(item)  # type: ignore[arg-type]
            except BaseException as error:  # noqa: BLE001 -- raised by the caller's thread
                errors.append(error)
                return

    threads = [threading.Thread(target=lane, name="holdfast-read") for _ in range(LANES - 1)]
    started = []
    for thread in threads:
        try:
            thread.start()
        except RuntimeError:  # no thread is to be had, as while the interpreter exits
            break
        started.append(thread)
    lane()
    for thread in started:
        thread.join()
    if errors:
        raise errors[0]
