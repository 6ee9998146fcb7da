"""How fast a state is copied and written, and so how long a training will have to wait. Pure."""

from dataclasses import dataclass


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
