"""Keeps the lease of a save alive while its rank waits for others."""

import threading
from types import TracebackType
from typing import Final, Self

from holdfast.catalog import Attempt

_TIMES_PER_LEASE: Final = 16
_GRACE_S: Final = 1.0
"""How long a renewal under way is waited for: a storage may not answer at all. One that comes
through later leaves an intent behind, until gc."""


class Keeper:
    """Renews in a thread of its own, until the block ends. What was wrong with the lease is
    raised there, unless something else is."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._keep, name="holdfast-lease", daemon=True)

    def __enter__(self) -> Self:
        try:
            self._thread.start()
        except BaseException:  # an interrupt: nobody will leave what was not entered
            self._over.set()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join(_GRACE_S)
        if error is None and self._error is not None:
            raise self._error

    def check(self) -> None:
        """Raise what is wrong with the lease, if it is known already."""
        if self._error is not None:
            raise self._error

    def _keep(self) -> None:
        try:
            while not self._over.wait(self._attempt.intent.lease_s / _TIMES_PER_LEASE):
                self._attempt.keep_alive()
        except BaseException as error:  # noqa: BLE001 -- raised by the thread that saves
            self._error = error
