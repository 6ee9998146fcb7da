"""A clock that only moves when told to, or when somebody sleeps on it."""

import asyncio
import math
import threading


class FakeClock:
    """``contracts.Clock`` for tests: sleeping takes no time and moves the clock. Thread-safe.

    ``slept`` lists every sleep in the order it began. Sleeps of several threads or tasks add up,
    as if they were taken one after the other.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = _finite("start", start)
        self._lock = threading.Lock()
        self.slept: list[float] = []

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass. ``ValueError`` if that would move the clock back."""
        self._move("advance", seconds)

    def sleep(self, seconds: float) -> None:
        self.slept.append(self._move("sleep", seconds))

    async def sleep_async(self, seconds: float) -> None:
        """As ``sleep``, and lets other tasks run; cancellation arrives here."""
        self.sleep(seconds)
        await asyncio.sleep(0)

    def _move(self, verb: str, seconds: float) -> float:
        seconds = _finite(verb, seconds)
        if seconds < 0:
            raise ValueError(f"{verb} must be 0 seconds or more, not {seconds!r}")
        with self._lock:
            self._now += seconds
        return seconds


def _finite(name: str, seconds: float) -> float:
    if not math.isfinite(seconds):
        raise ValueError(f"{name} must be a finite number of seconds, not {seconds!r}")
    return float(seconds)
