"""Whose turn it is among the threads of one rank. Knows no store and no other rank."""

import contextlib
import threading
from collections.abc import Generator
from typing import final

from holdfast.errors import CoordinationError, OperationTimeoutError


@final
class Turns:
    """Operations of one name: one at a time, in the order they were asked for, numbered.

    The number is drawn on asking, so that an operation that gives up waiting has used it up:
    on the other ranks, too, it is the operation that failed.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._next = 0
        self._queue: list[int] = []
        self._owner: int | None = None

    def draw(self) -> int:
        """The number of the next operation, to be given to ``serve``."""
        with self._changed:
            if self._owner == threading.get_ident():
                raise CoordinationError(f"{self._name} is already under way in this very thread")
            number = self._next
            self._next += 1
            self._queue.append(number)
            return number

    @contextlib.contextmanager
    def serve(self, number: int, timeout_s: float) -> Generator[None]:
        """A block that begins when it is that number's turn and ends it."""
        try:
            with self._changed:
                if not self._changed.wait_for(lambda: self._queue[0] == number, timeout_s):
                    raise OperationTimeoutError(
                        f"another thread of this rank did not get out of {self._name} "
                        f"within {timeout_s:g} s",
                        timeout_s=timeout_s,
                    )
                self._owner = threading.get_ident()
            yield
        finally:
            with self._changed:
                if self._queue[0] == number:
                    self._owner = None
                self._queue.remove(number)
                self._changed.notify_all()


@final
class TurnBook:
    """The turns of every name. Keeps one entry for each name ever used: use few names."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns: dict[str, Turns] = {}

    def names(self) -> list[str]:
        """The keys of all that were asked for."""
        with self._lock:
            return [*self._turns]

    def of(self, key: str, name: str) -> Turns:
        with self._lock:
            return self._turns.setdefault(key, Turns(name))
