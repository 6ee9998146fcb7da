"""How many retries a group of calls may still make. Knows tokens, not time or errors."""

import threading

from holdfast import _checks

# Ten refunds of 0.1 add up to a hair less than 1.
_ROUNDING = 1e-9


class RetryBudget:
    """A bucket of retries, shared by whatever handlers are given it. Thread-safe.

    Full at the start with ``reserve`` tokens. A retry takes one; a call that succeeds gives back
    ``refund``, up to the reserve; with less than one token there is no retry. So when everything
    fails, n calls make at most n + ``reserve`` attempts, and in the long run retries are at most
    the share ``refund`` of the calls that succeed.
    """

    __slots__ = ("_lock", "_refund", "_reserve", "_tokens")

    def __init__(self, reserve: float = 10, refund: float = 0.1) -> None:
        self._reserve = _checks.between("reserve", reserve, 1)
        self._refund = _checks.between("refund", refund, 0, 1)
        self._tokens = self._reserve
        self._lock = threading.Lock()

    @property
    def tokens(self) -> float:
        """What is left now; other threads may change it at once."""
        return self._tokens

    def take(self) -> bool:
        """Pay for one retry. False, and nothing taken, if there is not enough."""
        with self._lock:
            if self._tokens < 1 - _ROUNDING:
                return False
            self._tokens = max(0.0, self._tokens - 1)
            return True

    def give_back(self) -> None:
        """Credit one call that succeeded. Free of locks while the bucket is full."""
        if self._tokens >= self._reserve:
            return
        with self._lock:
            self._tokens = min(self._reserve, self._tokens + self._refund)
