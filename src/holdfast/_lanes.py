"""Runs pieces of work side by side on a few threads. Knows nothing of what they are."""

import threading
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

T = TypeVar("T")

_NONE: Final = object()


def run_all(work: Iterable[T], run: Callable[[T], None], *, lanes: int) -> None:
    """Call ``run`` with every item, on ``lanes`` threads, of which the caller's is one.

    Items are taken one at a time, as threads become free. After an error no further item is
    begun, and the first error is raised when all threads have ended.
    """
    items = iter(work)
    lock = threading.Lock()
    errors: list[BaseException] = []

    def lane() -> None:
        while True:
            try:
                with lock:
                    item = _NONE if errors else next(items, _NONE)
                if item is _NONE:
                    return
                run(item)  # type: ignore[arg-type]
            except BaseException as error:  # noqa: BLE001 -- raised by the caller's thread
                errors.append(error)
                return

    threads = []
    for _ in range(lanes - 1):
        thread = threading.Thread(target=lane, name="holdfast-lane")
        try:
            thread.start()
        except RuntimeError:  # no thread is to be had, as while the interpreter exits
            break
        threads.append(thread)
    lane()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
