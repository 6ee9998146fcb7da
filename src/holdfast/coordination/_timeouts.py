"""Waiting for ranks with a default limit (seed 004's ``TimeoutHandler``)."""

from typing import final

from holdfast import _checks
from holdfast.contracts import Coordinator


@final
class TimeoutHandler:
    """The waits of a coordinator, each bounded by ``default_timeout_s`` unless told otherwise.

    Thread-safe. Raises what `holdfast.contracts.Collectives` says: the error names the ranks
    that did not arrive.
    """

    def __init__(self, coordinator: Coordinator, default_timeout_s: float = 600.0) -> None:
        self._coordinator = _checks.having(
            "coordinator", coordinator, "Coordinator", "barrier", "wait_for_rank"
        )
        self._default_timeout_s = _checks.seconds("default_timeout_s", default_timeout_s)

    def barrier(self, timeout_s: float | None = None) -> None:
        """Return once every rank has called this."""
        self._coordinator.barrier(self._default_timeout_s if timeout_s is None else timeout_s)

    def wait_for_rank(self, rank: int, timeout_s: float | None = None) -> None:
        """Return once ``rank`` has arrived, that is, called this with its own number."""
        self._coordinator.wait_for_rank(
            rank, self._default_timeout_s if timeout_s is None else timeout_s
        )
