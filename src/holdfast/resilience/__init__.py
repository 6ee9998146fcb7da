"""Control flow over callables: retry, timeout, circuit breaker, rollback.

Knows nothing of tensors, ranks or files. Clock and random numbers are arguments; nothing is
global and no environment variable is read.
"""

from holdfast.resilience._breaker import CircuitBreaker, CircuitState
from holdfast.resilience._budget import RetryBudget
from holdfast.resilience._clock import SystemClock
from holdfast.resilience._handler import FaultToleranceHandler
from holdfast.resilience._policy import RetryPolicy
from holdfast.resilience._save import CheckpointRollbackManager

__all__ = [
    "CheckpointRollbackManager",
    "CircuitBreaker",
    "CircuitState",
    "FaultToleranceHandler",
    "RetryBudget",
    "RetryPolicy",
    "SystemClock",
]
