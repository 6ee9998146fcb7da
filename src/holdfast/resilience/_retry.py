"""What becomes of one call once its first attempt has failed. tenacity loops, this decides."""

import contextlib
import logging
import random
from collections.abc import Callable
from typing import Any, NoReturn, cast

from tenacity import AsyncRetrying, Future, RetryCallState, Retrying

from holdfast.contracts import Clock
from holdfast.resilience._budget import RetryBudget
from holdfast.resilience._operation import MisuseError, call, call_async, in_words, name_of
from holdfast.resilience._policy import RetryPolicy

_log = logging.getLogger("holdfast.resilience")


def is_worth_retrying(policy: RetryPolicy, error: BaseException) -> bool:
    return not isinstance(error, MisuseError) and policy.is_retryable(error)


class Course:
    """The further attempts of one call, whose first, begun at ``started_s``, ended in ``failure``.

    tenacity is given that failure as its own first attempt, so that the successful first call
    never pays for it. Used once, by ``run`` or ``run_async``.
    """

    __slots__ = (
        "_before",
        "_budget",
        "_clock",
        "_failure",
        "_operation",
        "_policy",
        "_reason",
        "_replayed",
        "_rng",
        "_started_s",
    )

    def __init__(
        self,
        operation: Callable[[], Any],
        failure: BaseException,
        *,
        started_s: float,
        policy: RetryPolicy,
        budget: RetryBudget | None,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._operation = operation
        self._failure: BaseException | None = failure
        self._before = ""
        self._replayed = False
        self._reason = ""
        self._started_s = started_s
        self._policy = policy
        self._budget = budget
        self._clock = clock
        self._rng = rng

    def run(self) -> Any:
        """The first successful attempt's result, or the last attempt's error itself."""
        try:
            return Retrying(sleep=self._clock.sleep, **self._rules())(self._attempt)
        finally:
            self._let_go()

    async def run_async(self) -> Any:
        """As ``run``, for an operation that returns an awaitable."""
        try:
            retrying = AsyncRetrying(sleep=self._clock.sleep_async, **self._rules())
            return await retrying(self._attempt_async)
        finally:
            self._let_go()

    def _attempt(self) -> Any:
        self._replay()
        return call(self._operation)

    async def _attempt_async(self) -> Any:
        self._replay()
        return await call_async(self._operation)

    def _replay(self) -> None:
        if not self._replayed and self._failure is not None:
            self._replayed = True
            raise self._failure

    def _let_go(self) -> None:
        # tenacity's objects refer to one another and to this one: what it holds, such as an
        # operation's tensors, would stay in memory until the next garbage collection.
        self._failure = None
        del self._operation

    def _rules(self) -> dict[str, Any]:
        return {
            "before": self._refuse_late_start,
            "wait": self._delay_s,
            "stop": self._is_over,
            "before_sleep": self._report,
            "retry_error_callback": self._give_up,
        }

    def _refuse_late_start(self, state: RetryCallState) -> None:
        # A sleep may last longer than asked for.
        if state.attempt_number > 1 and self._crosses_deadline(0.0):
            self._reason = f"the deadline of {self._policy.deadline_s:g} s has passed"
            self._raise_failure(state.attempt_number - 1)

    def _delay_s(self, state: RetryCallState) -> float:
        return self._policy.delay_s(state.attempt_number, self._rng)

    def _is_over(self, state: RetryCallState) -> bool:
        # Classified here and not in tenacity's retry=, which its TryAgain walks past.
        before, self._failure = self._failure, cast("Future", state.outcome).exception()
        policy = self._policy
        if not is_worth_retrying(policy, cast("BaseException", self._failure)):
            self._before = in_words(cast("BaseException", before))
            self._reason = ""
        elif state.attempt_number > policy.max_retries:
            self._reason = f"max_retries is {policy.max_retries}"
        elif self._crosses_deadline(state.upcoming_sleep):
            self._reason = (
                f"the next retry would have passed the deadline of {policy.deadline_s:g} s"
            )
        elif self._budget is not None and not self._budget.take():
            self._reason = "the retry budget is empty"
        else:
            return False
        return True

    def _crosses_deadline(self, delay_s: float) -> bool:
        deadline_s = self._policy.deadline_s
        if deadline_s is None:
            return False
        return self._clock.now() + delay_s > self._started_s + deadline_s

    def _elapsed_s(self) -> float:
        return self._clock.now() - self._started_s

    def _report(self, state: RetryCallState) -> None:
        _log.warning(
            "%s failed (attempt %d of %d), trying again in %.3g s: %s",
            name_of(self._operation),
            state.attempt_number,
            1 + self._policy.max_retries,
            state.upcoming_sleep,
            in_words(cast("BaseException", self._failure)),  # handlers keep what they are given
        )

    def _give_up(self, state: RetryCallState) -> NoReturn:
        state.outcome = None  # as in _let_go: it would keep the error and its traceback alive
        self._raise_failure(state.attempt_number)

    def _raise_failure(self, attempts: int) -> NoReturn:
        failure = cast("BaseException", self._failure)
        with contextlib.suppress(AttributeError):  # a frozen dataclass takes no notes
            if self._reason:
                failure.add_note(
                    f"holdfast gave up after {attempts} attempt{'s' if attempts > 1 else ''} "
                    f"in {self._elapsed_s():.3g} s: {self._reason}"
                )
            else:
                failure.add_note(
                    f"This was attempt {attempts}. The one before had failed: {self._before}"
                )
        try:
            raise failure
        finally:
            del failure
