"""Wakes threads that wait for a change. Knows nothing of what changes."""

import threading
from typing import Final

_AT_MOST_S: Final = 0.1
"""After so long a sleeper looks by itself: whoever should have rung may have been interrupted."""


class Bell:
    """Much like a ``threading.Condition``, but that no lock is held or lost if a signal's handler
    raises at whatever point: the thread that trains is interrupted by Ctrl-C.

    ``with bell.lock:`` look, and if there is nothing to do ``listen()``; then, without the lock,
    ``sleep`` and look again.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._sleepers: list[threading.Lock] = []

    def listen(self) -> threading.Lock:
        """What is to be slept on. The caller has the lock."""
        sleeper = threading.Lock()
        sleeper.acquire()
        self._sleepers.append(sleeper)
        return sleeper

    def sleep(self, sleeper: threading.Lock) -> None:
        """Return when the bell has rung since, or after a moment. The caller has no lock."""
        sleeper.acquire(timeout=_AT_MOST_S)

    def ring(self) -> None:
        """Wake all. The caller has the lock."""
        sleepers, self._sleepers = self._sleepers, []
        for sleeper in sleepers:
            sleeper.release()
