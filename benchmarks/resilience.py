"""What retry and circuit breaker cost a call that succeeds, over making the call bare."""

from _measure import FULL, Extent, Measurement, at_most, interleaved
from holdfast.resilience import CircuitBreaker, FaultToleranceHandler, RetryBudget

REPEATS = 101
CALLS = 2_000
RETRY_TARGET_US = 3.0
BREAKER_TARGET_US = 2.0


def operation() -> int:
    return 1


def measure(extent: Extent = FULL) -> list[Measurement]:
    handler = FaultToleranceHandler(retry_budget=RetryBudget())
    breaker = CircuitBreaker()
    seconds = interleaved(
        {
            "bare": operation,
            "retry": lambda: handler.execute_with_retry(operation),
            "breaker": lambda: breaker.execute(operation),
        },
        repeats=extent.repeats(REPEATS),
        calls=CALLS,
    )
    return [
        _overhead("execute_with_retry", seconds["retry"], seconds["bare"], RETRY_TARGET_US),
        _overhead("CircuitBreaker.execute", seconds["breaker"], seconds["bare"], BREAKER_TARGET_US),
    ]


def _overhead(name: str, wrapped: list[float], bare: list[float], target_us: float) -> Measurement:
    over_us = [1e6 * (w - b) for w, b in zip(wrapped, bare, strict=True)]
    return at_most(f"{name} over a bare call that succeeds", over_us, "us", target_us)
