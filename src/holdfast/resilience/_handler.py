"""The verbs over one operation or one checkpoint: retry, time out, roll back."""

import asyncio
import functools
import random
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from holdfast import _checks
from holdfast.contracts import CheckpointStore, Clock, Storage
from holdfast.resilience import _timeout
from holdfast.resilience._budget import RetryBudget
from holdfast.resilience._clock import SystemClock
from holdfast.resilience._operation import call, call_async, require_callable
from holdfast.resilience._policy import RetryPolicy
from holdfast.resilience._retry import Course, is_worth_retrying
from holdfast.resilience._rollback import prefix_of, roll_back

T = TypeVar("T")


class FaultToleranceHandler:
    """Retries, time limits and rollback, under one policy. Thread- and task-safe; share it.

    An operation is a callable without arguments. The plain verbs take plain functions, the
    ``_async`` twins take functions that return an awaitable; the wrong kind is a ``TypeError``
    and never retried.

    ``storage`` is needed for rollback only, and may be a ``Catalog``. Handlers given the same
    ``retry_budget`` draw on it together. ``clock`` times delays and the deadline, ``rng`` draws
    the jitter; the default asks the operating system, so that forked ranks do not draw the same
    delays.
    """

    __slots__ = ("_budget", "_clock", "_policy", "_rng", "_storage")

    def __init__(
        self,
        storage: Storage | CheckpointStore | None = None,
        retry_policy: RetryPolicy | None = None,
        *,
        retry_budget: RetryBudget | None = None,
        clock: Clock | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._storage = storage
        if storage is not None and not isinstance(storage, CheckpointStore):
            _checks.storage("storage", storage)
        self._policy = (
            RetryPolicy()
            if retry_policy is None
            else _checks.instance("retry_policy", retry_policy, RetryPolicy)
        )
        self._budget = (
            None
            if retry_budget is None
            else _checks.instance("retry_budget", retry_budget, RetryBudget)
        )
        self._clock = SystemClock() if clock is None else _checks.clock("clock", clock)
        self._rng = (
            random.SystemRandom() if rng is None else _checks.instance("rng", rng, random.Random)
        )

    def execute_with_retry(self, operation: Callable[[], T]) -> T:
        """The operation's result, tried again after failures as the policy says.

        When there is no further attempt, the last error is raised itself, with a note on how
        often it was tried and why that was the end, or on what had failed before it. Each retry
        is a warning in the log.
        """
        require_callable(operation)
        started_s = self._clock.now()
        course = None
        try:
            result = call(operation)
        except Exception as error:
            course = self._course_after(error, operation, started_s)
            if course is None:
                raise
        if course is not None:
            result = course.run()
        self._credit_success()
        return result

    async def execute_with_retry_async(self, operation: Callable[[], Awaitable[T]]) -> T:
        """As ``execute_with_retry``. Cancelling the task ends it at once, in a delay too."""
        require_callable(operation)
        started_s = self._clock.now()
        course = None
        try:
            result = await call_async(operation)
        except Exception as error:
            course = self._course_after(error, operation, started_s)
            if course is None:
                raise
        if course is not None:
            result = await course.run_async()
        self._credit_success()
        return result

    def execute_with_timeout(self, operation: Callable[[], T], timeout_s: float) -> T:
        """The operation's result, or ``OperationTimeoutError`` after ``timeout_s`` real seconds.

        The operation runs in a daemon thread with a copy of the caller's context variables.
        Python cannot stop a thread: after a timeout the operation goes on, its result is
        discarded and its error goes to the log at debug level. What it was writing may still
        appear, so never reuse the key that a timed-out write was writing.
        """
        require_callable(operation)
        return _timeout.run(operation, _checks.seconds("timeout_s", timeout_s))

    async def execute_with_timeout_async(
        self, operation: Callable[[], Awaitable[T]], timeout_s: float
    ) -> T:
        """What the operation's awaitable gives, or ``OperationTimeoutError`` after ``timeout_s``
        real seconds, the operation having been cancelled."""
        require_callable(operation)
        return await _timeout.run_async(operation, _checks.seconds("timeout_s", timeout_s))

    def rollback(self, checkpoint: str) -> None:
        """Remove everything of ``checkpoint``, committed or not. Idempotent.

        ``checkpoint`` is a prefix (``step_100``), its commit record's key
        (``step_100/metadata.json``) or the key of a checkpoint that is a single object.

        The commit record goes first, so that a rollback cut short leaves debris, never a
        checkpoint with parts missing. If it cannot be deleted, nothing else is touched. Of the
        rest everything is tried, then one ``StorageError`` names what is left. Every request is
        retried as the policy says.

        A plain storage does not know that checkpoints may refer to each other's files, nor that
        a save may be under way. A ``Catalog`` as ``storage`` does, and then decides what goes.
        """
        if self._storage is None:
            raise ValueError("rollback needs a storage: FaultToleranceHandler(storage=...)")
        if isinstance(self._storage, CheckpointStore):
            prefix = prefix_of(checkpoint)
            self.execute_with_retry(functools.partial(self._storage.rollback, prefix))
            return
        roll_back(self._storage, checkpoint, retry=self.execute_with_retry)

    async def rollback_async(self, checkpoint: str) -> None:
        """As ``rollback``, in a thread. Cancelling the task does not stop the deleting."""
        await asyncio.to_thread(self.rollback, checkpoint)

    def _course_after(
        self, error: Exception, operation: Callable[[], Any], started_s: float
    ) -> Course | None:
        if not is_worth_retrying(self._policy, error):
            return None
        return Course(
            operation,
            error,
            started_s=started_s,
            policy=self._policy,
            budget=self._budget,
            clock=self._clock,
            rng=self._rng,
        )

    def _credit_success(self) -> None:
        if self._budget is not None:
            self._budget.give_back()
