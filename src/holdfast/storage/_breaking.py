"""Stops calling a storage that keeps failing. Knows which errors tell that it is ill."""

from collections.abc import Callable
from typing import TypeVar

from holdfast import _checks
from holdfast.contracts import Storage
from holdfast.errors import CheckpointError, OperationTimeoutError
from holdfast.resilience import CircuitBreaker
from holdfast.storage._wrapped import WrappedStorage

T = TypeVar("T")


def breaking(storage: Storage, breaker: CircuitBreaker | None = None) -> Storage:
    """``storage`` behind ``breaker`` (default: ``CircuitBreaker()``), which may be shared.

    While the breaker is open, every call is refused with ``CircuitOpenError``; only a writer's
    ``abort`` always goes through, so that nothing is left behind.

    What counts as a failure: errors that may pass (``transient``), timeouts, and exceptions that
    are no errors of holdfast's, such as ``ConnectionError``. What a working storage answers does
    not, whatever the breaker's own ``ignore`` says: a missing or taken key, a changed version, a
    refused range, a full disk, a wrong argument.
    """
    if breaker is None:
        breaker = CircuitBreaker()
    return _BreakingStorage(storage, _checks.instance("breaker", breaker, CircuitBreaker))


class _BreakingStorage(WrappedStorage):
    def __init__(self, storage: Storage, breaker: CircuitBreaker) -> None:
        super().__init__(storage)
        self._breaker = breaker

    def _through(self, method: str, _key: str | None, call: Callable[[], T], /) -> T:
        if method == "abort":
            return call()
        answers: list[Exception] = []
        result = self._breaker.execute(lambda: _answered(call, answers))
        if answers:
            raise answers.pop()
        return result  # type: ignore[return-value]  # None only with an answer


def _answered(call: Callable[[], T], answers: list[Exception]) -> T | None:
    """The call's result, or its error put into ``answers`` if a working storage says so."""
    try:
        return call()
    except Exception as error:
        if _tells_of_illness(error):
            raise
        answers.append(error)
        return None


def _tells_of_illness(error: Exception) -> bool:
    if isinstance(error, CheckpointError):
        return error.transient or isinstance(error, OperationTimeoutError)
    return not isinstance(error, ValueError | TypeError | BufferError)
