"""How fast a state is copied and written, and so how long a training will have to wait. Knows
numbers, not what is copied."""

import time
from dataclasses import dataclass, replace
from typing import Final

_RATE_BYTES: Final = 4 * 1024 * 1024
"""How much must have been moved before its speed is worth knowing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What the last save has shown; ``None`` is not known yet.

    ``copy_rate`` and ``write_rate`` are bytes in a second, ``start_s`` is from the snapshot until
    the first bytes are written.
    """

    copy_rate: float | None = None
    write_rate: float | None = None
    start_s: float = 0.0

    def wait_s(self, *, left_bytes: int, room_bytes: int, start_s: float) -> float | None:
        """How long it takes until ``left_bytes`` are copied, if there is room for ``room_bytes``
        and the rest has to wait until as much is written, which begins in ``start_s``."""
        if self.copy_rate is None:
            return None
        copied = min(left_bytes, room_bytes) / self.copy_rate
        if left_bytes <= room_bytes:
            return copied
        if self.write_rate is None:
            return None
        return max(copied, start_s) + (left_bytes - room_bytes) / self.write_rate


class Pacer:
    """Learns the pace of one save, which begins now; until then that of the ``last`` will do. Used
    by one thread at a time."""

    def __init__(self, last: Pace) -> None:
        self._last = last
        self._began_s = time.monotonic()
        self._copied_bytes = 0
        self._copied_s = 0.0
        self._written_bytes = 0
        self._written_s: tuple[float, float] | None = None

    def copied(self, nbytes: int, seconds: float) -> None:
        """So much was copied by a training that waited for it."""
        self._copied_bytes += nbytes
        self._copied_s += seconds

    def wrote(self, nbytes: int) -> None:
        """So much has been written just now."""
        now_s = time.monotonic()
        self._written_bytes += nbytes
        self._written_s = (self._written_s or (now_s, now_s))[0], now_s

    def pace(self) -> Pace:
        pace = self._last
        first_s, last_s = self._written_s or (0.0, 0.0)
        if self._written_bytes >= _RATE_BYTES and last_s > first_s:
            rate = self._written_bytes / (last_s - first_s)
            pace = replace(pace, write_rate=rate, start_s=first_s - self._began_s)
        if self._copied_bytes >= _RATE_BYTES and self._copied_s > 0:
            pace = replace(pace, copy_rate=self._copied_bytes / self._copied_s)
        return pace

    def wait_s(self, *, left_bytes: int, room_bytes: int) -> float | None:
        """As ``Pace.wait_s``, from now on."""
        pace = self.pace()
        since_s = time.monotonic() - self._began_s
        start_s = 0.0 if self._written_s is not None else max(0.0, pace.start_s - since_s)
        return pace.wait_s(left_bytes=left_bytes, room_bytes=room_bytes, start_s=start_s)
