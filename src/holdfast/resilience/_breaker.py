"""Sparing a dependency that keeps failing. Knows outcomes and time, not what is called.

Failures are counted in a row, as Nygard's breaker does (*Release It!*), not as a rate: a
checkpoint storage sees too few calls for rates to mean anything. A slow dependency is not a
failing one here; put a timeout inside the operation.
"""

import enum
import logging
import threading
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TypeVar

from holdfast import _checks
from holdfast.contracts import Clock
from holdfast.errors import CircuitOpenError
from holdfast.resilience._clock import SystemClock
from holdfast.resilience._operation import (
    MisuseError,
    call,
    call_async,
    in_words,
    is_cancellation,
    require_callable,
)

T = TypeVar("T")

_log = logging.getLogger("holdfast.resilience")

_FAILURE_CHARS = 200


class CircuitState(enum.Enum):
    """Whether a circuit breaker lets calls through: all, none, or a few to see."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CircuitBreaker:
    """Stops calling what keeps failing, and finds out when it works again. Thread- and task-safe.

    Closed, it lets every call through; ``failure_threshold`` failures in a row open it. Open, it
    refuses every call for ``recovery_timeout_s``. Then it is half-open: at most
    ``half_open_max_calls`` calls at a time go through, the first success closes it, a failure
    opens it for another ``recovery_timeout_s``. A call that does not come back within that
    time loses its place to the next one, and its outcome no longer counts.

    Errors in ``ignore`` are answers of a working dependency: they count as success and are
    raised as they are. Cancellation counts neither way. No lock is held during a call, and a
    call that was let through before the last change of state no longer counts.
    """

    __slots__ = (
        "_clock",
        "_failure_threshold",
        "_failures",
        "_generation",
        "_half_open_max_calls",
        "_ignore",
        "_last_failure",
        "_lock",
        "_opened_s",
        "_probes",
        "_recovery_timeout_s",
        "_state",
    )

    def __init__(
        self,
        failure_threshold: int = 5,
        recovery_timeout_s: float = 60.0,
        *,
        half_open_max_calls: int = 1,
        ignore: tuple[type[Exception], ...] = (),
        clock: Clock | None = None,
    ) -> None:
        self._failure_threshold = _checks.count("failure_threshold", failure_threshold, least=1)
        self._recovery_timeout_s = _checks.seconds("recovery_timeout_s", recovery_timeout_s)
        self._half_open_max_calls = _checks.count(
            "half_open_max_calls", half_open_max_calls, least=1
        )
        self._ignore = _checks.exception_classes("ignore", ignore)
        self._clock = SystemClock() if clock is None else _checks.clock("clock", clock)
        self._lock = threading.Lock()
        self._state = CircuitState.CLOSED
        self._generation = 0
        self._failures = 0
        self._opened_s = 0.0
        self._last_failure = ""
        self._probes: dict[_Attempt, float] = {}

    @property
    def state(self) -> CircuitState:
        """The state the last call left behind. Time alone changes nothing: an open breaker says
        ``OPEN`` until a call finds that ``recovery_timeout_s`` is over."""
        return self._state

    def execute(self, operation: Callable[[], T], fallback: Callable[[], T] | None = None) -> T:
        """The operation's result; the fallback's if the call is refused or fails.

        Without a fallback a refused call raises ``CircuitOpenError``, whose ``retry_after_s``
        says how long it will stay so at most, and a failed one its own error.
        """
        _require(operation, fallback)
        attempt = _Attempt(self)
        try:
            with attempt:
                return call(operation)
        except Exception:
            if fallback is None or not attempt.failed:
                raise
            return call(fallback)

    async def execute_async(
        self,
        operation: Callable[[], Awaitable[T]],
        fallback: Callable[[], Awaitable[T]] | None = None,
    ) -> T:
        """As ``execute``, for an operation and a fallback that return awaitables."""
        _require(operation, fallback)
        attempt = _Attempt(self)
        try:
            with attempt:
                return await call_async(operation)
        except Exception:
            if fallback is None or not attempt.failed:
                raise
            return await call_async(fallback)

    def _admit(self, attempt: "_Attempt") -> None:
        # The generation is read first: if the state changes in between, the attempt is outdated
        # and its outcome is ignored.
        attempt.generation = self._generation
        if self._state is CircuitState.CLOSED:
            return
        with self._lock:
            half_opened = self._end_recovery()
            self._admit_guarded(attempt)
        if half_opened:
            _log.info("circuit half-open: letting %d calls through", self._half_open_max_calls)

    def _end_recovery(self) -> bool:
        if self._state is not CircuitState.OPEN or self._wait_s(self._opened_s) > 0:
            return False
        self._enter(CircuitState.HALF_OPEN)
        return True

    def _admit_guarded(self, attempt: "_Attempt") -> None:
        attempt.generation = self._generation
        if self._state is CircuitState.OPEN:
            why = f"the circuit is open since {self._last_failure}"
            raise _refusal(why, self._wait_s(self._opened_s))
        if self._state is CircuitState.HALF_OPEN:
            inside = {a: since for a, since in self._probes.items() if self._wait_s(since) > 0}
            if len(inside) >= self._half_open_max_calls:
                wait_s = self._wait_s(min(inside.values()))
                raise _refusal("the circuit is half-open and being tried", wait_s)
            inside[attempt] = self._clock.now()
            self._probes = inside

    def _wait_s(self, since_s: float) -> float:
        return since_s + self._recovery_timeout_s - self._clock.now()

    def _enter(self, state: CircuitState) -> None:
        self._state = state
        self._generation += 1
        self._failures = 0
        self._probes = {}

    def _record_success(self, attempt: "_Attempt") -> None:
        if self._state is CircuitState.CLOSED and not self._failures:
            return
        with self._lock:
            if not self._counts(attempt):
                return
            self._failures = 0
            closed = self._state is CircuitState.HALF_OPEN
            if closed:
                self._enter(CircuitState.CLOSED)
        if closed:
            _log.info("circuit closed: a call succeeded")

    def _record_failure(self, attempt: "_Attempt", error: BaseException) -> None:
        with self._lock:
            if not self._counts(attempt):
                return
            self._failures += 1
            failures = self._failures
            opened = (
                self._state is CircuitState.HALF_OPEN or self._failures >= self._failure_threshold
            )
            if opened:
                self._enter(CircuitState.OPEN)
                self._opened_s = self._clock.now()
                self._last_failure = in_words(error)[:_FAILURE_CHARS]
        if opened:
            _log.warning(
                "circuit open for %g s after %d failures: %s",
                self._recovery_timeout_s,
                failures,
                in_words(error),
            )

    def _release(self, attempt: "_Attempt") -> None:
        with self._lock:
            self._probes.pop(attempt, None)

    def _counts(self, attempt: "_Attempt") -> bool:
        if self._state is CircuitState.HALF_OPEN:
            return attempt in self._probes
        return attempt.generation == self._generation

    def _conclude(self, attempt: "_Attempt", error: BaseException | None) -> bool:
        """Count the attempt's end; whether it was a failure."""
        if error is None or isinstance(error, self._ignore):
            self._record_success(attempt)
            return False
        if is_cancellation(error) or isinstance(error, MisuseError):
            self._release(attempt)
            return False
        self._record_failure(attempt, error)
        return True


class _Attempt:
    """One call, sync or async: a block that is entered if the breaker lets it in, and whose end
    the breaker is told of. A refused call has failed too."""

    __slots__ = ("_breaker", "failed", "generation")

    def __init__(self, breaker: CircuitBreaker) -> None:
        self._breaker = breaker
        self.generation = 0
        self.failed = True

    def __enter__(self) -> None:
        self._breaker._admit(self)  # noqa: SLF001 -- two halves of one core

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.failed = self._breaker._conclude(self, error)  # noqa: SLF001


def _refusal(why: str, retry_after_s: float) -> CircuitOpenError:
    retry_after_s = max(0.0, retry_after_s)
    return CircuitOpenError(
        f"{why}; try again in {retry_after_s:.3g} s", retry_after_s=retry_after_s
    )


def _require(operation: object, fallback: object) -> None:
    require_callable(operation)
    if fallback is not None:
        require_callable(fallback, "fallback")
