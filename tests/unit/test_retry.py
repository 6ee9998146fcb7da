"""Retry: what is tried again, when, how often, and what the caller sees in the end."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import errno
import functools
import gc
import io
import logging
import math
import pickle
import random
import socket
import ssl
import threading
import time
import weakref

import pytest
import tenacity
from hypothesis import given
from hypothesis import strategies as st

from holdfast import errors
from holdfast.resilience import FaultToleranceHandler, RetryBudget, RetryPolicy
from holdfast.testing import FakeClock, seeded_rng


class Flaky:
    """An operation that fails with the given errors in turn, then returns its call count."""

    def __init__(self, *failures, clock=None, takes_s=0.0):
        self.failures = list(failures)
        self.clock = clock
        self.takes_s = takes_s
        self.started = []

    def __call__(self):
        if self.clock is not None:
            self.started.append(self.clock.now())
            self.clock.advance(self.takes_s)
        else:
            self.started.append(time.monotonic())
        if self.failures:
            raise self.failures.pop(0)
        return self.calls

    @property
    def calls(self):
        return len(self.started)


class AlwaysFailing(Flaky):
    def __call__(self):
        self.failures = [ConnectionError(f"failure {self.calls + 1}")]
        super().__call__()


def run_plain(handler, operation):
    return handler.execute_with_retry(operation)


def run_async(handler, operation):
    async def as_coroutine():
        return operation()

    return asyncio.run(handler.execute_with_retry_async(as_coroutine))


both = pytest.mark.parametrize("run", [run_plain, run_async])


def handler(clock=None, *, budget=None, rng=None, **policy):
    return FaultToleranceHandler(
        retry_policy=RetryPolicy(**policy),
        retry_budget=budget,
        clock=clock or FakeClock(),
        rng=rng or seeded_rng(0),
    )


# --- how often -----------------------------------------------------------------------------


@both
def test_a_call_that_succeeds_is_made_once_and_waits_for_nothing(run):
    clock = FakeClock()
    assert run(handler(clock), Flaky()) == 1
    assert clock.slept == []


@both
def test_failures_that_pass_are_tried_again_until_success(run):
    clock = FakeClock()
    operation = Flaky(ConnectionError(), TimeoutError(), errors.TransientStorageError("throttled"))
    assert run(handler(clock, jitter=0), operation) == 4
    assert clock.slept == [1, 2, 4]


@both
@pytest.mark.parametrize("max_retries", [0, 1, 3])
def test_max_retries_counts_what_comes_after_the_first_attempt(run, max_retries):
    operation = AlwaysFailing()
    with pytest.raises(ConnectionError):
        run(handler(max_retries=max_retries), operation)
    assert operation.calls == 1 + max_retries


@both
def test_the_last_error_itself_is_raised_with_a_note(run):
    failures = [ConnectionError("first"), ConnectionError("second"), ConnectionError("third")]
    clock = FakeClock()
    with pytest.raises(ConnectionError) as caught:
        run(handler(clock, max_retries=2, jitter=0), Flaky(*failures))
    assert caught.value is failures[2]
    assert caught.value.__context__ is None
    assert caught.value.__notes__ == [
        "holdfast gave up after 3 attempts in 3 s: max_retries is 2",
    ]


@both
def test_an_error_that_will_not_pass_ends_it_at_once_and_names_the_one_before(run):
    wrong = ValueError("wrong")
    operation = Flaky(ConnectionError("gone"), wrong)
    with pytest.raises(ValueError, match="wrong") as caught:
        run(handler(), operation)
    assert caught.value is wrong
    assert operation.calls == 2
    assert wrong.__notes__ == [
        "This was attempt 2. The one before had failed: ConnectionError: gone"
    ]


@both
def test_each_retry_is_a_warning_with_attempt_error_and_delay(run, caplog):
    caplog.set_level(logging.WARNING, "holdfast.resilience")
    run(handler(jitter=0), Flaky(ConnectionError("reset"), ConnectionError("again")))
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    message = caplog.records[1].getMessage()
    assert "attempt 2 of 4" in message
    assert "in 2 s" in message
    assert "again" in message


@both
def test_tenacity_s_own_signal_gives_nobody_extra_attempts(run):
    operation = Flaky(ConnectionError(), tenacity.TryAgain(), tenacity.TryAgain())
    with pytest.raises(tenacity.TryAgain):
        run(handler(), operation)
    assert operation.calls == 2


def test_one_handler_serves_many_threads_at_once():
    shared = handler()
    results = []

    def work():
        results.extend(
            shared.execute_with_retry(Flaky(ConnectionError(), ConnectionError()))
            for _ in range(50)
        )

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [3] * 400


@pytest.mark.parametrize("max_retries", [0, 2])
def test_a_failed_call_leaves_no_cycle_that_keeps_the_operations_memory(max_retries):
    class Tensor:
        pass

    def use(handler, watched):
        tensor = Tensor()
        watched.append(weakref.ref(tensor))

        def operation():
            assert tensor is not None
            raise ConnectionError

        with contextlib.suppress(ConnectionError):
            handler.execute_with_retry(operation)

    watched = []
    gc.collect()
    gc.disable()
    try:
        use(handler(max_retries=max_retries), watched)
        assert watched[0]() is None
    finally:
        gc.enable()


# --- what ----------------------------------------------------------------------------------

PASSES = [
    OSError("no errno"),
    OSError(errno.EIO, "i/o"),
    OSError(errno.EBUSY, "busy"),
    OSError(errno.EMFILE, "files of other work may close"),
    ConnectionResetError(errno.ECONNRESET, "reset"),
    TimeoutError(),
    BlockingIOError(errno.EAGAIN, "again"),
    socket.gaierror(socket.EAI_AGAIN, "dns"),
    ssl.SSLError(1, "bad record mac"),
    errors.TransientStorageError("503"),
]

STAYS = [
    *(
        OSError(getattr(errno, name), name)
        for name in [
            "ENOSPC",
            "EDQUOT",
            "EACCES",
            "EPERM",
            "ENOENT",
            "EEXIST",
            "EROFS",
            "EISDIR",
            "ENOTDIR",
            "EINVAL",
            "ENAMETOOLONG",
            "ELOOP",
            "EBADF",
            "EFBIG",
            "ENOTEMPTY",
            "ENODEV",
            "ENXIO",
            "ENOSYS",
            "EOPNOTSUPP",
            "ENOTSUP",
            "EXDEV",
            "ESPIPE",
        ]
    ),
    FileNotFoundError("no errno"),
    PermissionError("no errno"),
    FileExistsError("no errno"),
    IsADirectoryError("no errno"),
    NotADirectoryError("no errno"),
    io.UnsupportedOperation("read"),
    ssl.SSLCertVerificationError(1, "expired"),
    ValueError(),
    RuntimeError(),
    errors.OperationTimeoutError("an abandoned call may still be writing"),
    errors.ObjectNotFoundError("x"),
    errors.NoSpaceError("x"),
    errors.StorageError("x"),
    errors.CircuitOpenError("x"),
]

CANCELS = [
    asyncio.CancelledError(),
    concurrent.futures.CancelledError(),
    KeyboardInterrupt(),
    SystemExit(1),
    GeneratorExit(),
]


@pytest.mark.parametrize("error", PASSES, ids=repr)
def test_what_may_pass_is_retryable(error):
    assert RetryPolicy().is_retryable(error)


@pytest.mark.parametrize("error", [*STAYS, *CANCELS], ids=repr)
def test_what_will_not_pass_is_not_retryable(error):
    assert not RetryPolicy().is_retryable(error)


@pytest.mark.parametrize("error", CANCELS, ids=repr)
def test_cancellation_is_never_retryable_whatever_is_listed(error):
    assert not RetryPolicy(retryable=(Exception,)).is_retryable(error)


def test_our_errors_go_by_their_class_whatever_is_listed():
    everything = RetryPolicy(retryable=(Exception, errors.OperationTimeoutError))
    nothing = RetryPolicy(retryable=())
    for policy in (everything, nothing):
        assert policy.is_retryable(errors.TransientStorageError("x"))
        assert not policy.is_retryable(errors.OperationTimeoutError("x"))
        assert not policy.is_retryable(errors.ObjectNotFoundError("x"))


def test_a_permanent_class_is_retried_only_if_listed_by_name():
    named = RetryPolicy(retryable=(FileNotFoundError,))
    assert named.is_retryable(FileNotFoundError(errno.ENOENT, "nfs is slow"))
    assert named.is_retryable(FileNotFoundError("no errno"))
    assert not named.is_retryable(PermissionError())
    assert not named.is_retryable(ConnectionError())
    for wide in (OSError, Exception):
        assert not RetryPolicy(retryable=(wide,)).is_retryable(FileNotFoundError("x"))
        assert not RetryPolicy(retryable=(wide,)).is_retryable(OSError(errno.ENOSPC, "full"))


def test_other_classes_can_be_listed():
    policy = RetryPolicy(retryable=[ValueError])
    assert policy.retryable == (ValueError,)
    assert policy.is_retryable(UnicodeError())
    assert not policy.is_retryable(ConnectionError())


@both
@pytest.mark.parametrize("error", CANCELS[1:4], ids=repr)
@pytest.mark.parametrize("before", [[], [ConnectionError()]], ids=["first", "retry"])
def test_cancellation_inside_the_operation_passes_as_itself(run, error, before):
    operation = Flaky(*before, error)
    with pytest.raises(type(error)) as caught:
        run(handler(retryable=(Exception,)), operation)
    if run is run_plain:
        assert caught.value is error
    assert operation.calls == len(before) + 1


@pytest.mark.parametrize("retries", [0, 1])
def test_cancelling_the_task_during_the_operation_ends_it(retries):
    calls = []

    async def main():
        reached = asyncio.Event()

        async def operation():
            calls.append(1)
            if len(calls) <= retries:
                raise ConnectionError
            reached.set()
            await asyncio.sleep(60)

        task = asyncio.create_task(handler().execute_with_retry_async(operation))
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()

    asyncio.run(main())
    assert len(calls) == retries + 1


def test_cancelling_the_task_during_a_delay_ends_it_at_once():
    operation = AlwaysFailing()

    async def failing():
        operation()

    async def main():
        real = FaultToleranceHandler(retry_policy=RetryPolicy(initial_delay_s=30, jitter=0))
        task = asyncio.create_task(real.execute_with_retry_async(failing))
        await asyncio.sleep(0.05)
        started = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return time.monotonic() - started

    assert asyncio.run(main()) < 5
    assert operation.calls == 1


def test_ctrl_c_during_a_delay_passes():
    class Interrupted(FakeClock):
        def sleep(self, seconds):
            raise KeyboardInterrupt

    operation = AlwaysFailing()
    with pytest.raises(KeyboardInterrupt):
        handler(Interrupted()).execute_with_retry(operation)
    assert operation.calls == 1


# --- when ----------------------------------------------------------------------------------

policies = st.builds(
    RetryPolicy,
    max_retries=st.integers(0, 8),
    initial_delay_s=st.floats(0, 10),
    max_delay_s=st.floats(10, 1000),
    backoff_factor=st.floats(1, 10),
    jitter=st.floats(0, 1) | st.booleans(),
    deadline_s=st.none() | st.floats(0.01, 100),
)


def test_the_bound_grows_by_the_factor_up_to_the_maximum():
    policy = RetryPolicy(initial_delay_s=1, max_delay_s=30, backoff_factor=2)
    assert [policy.backoff_s(n) for n in range(1, 8)] == [1, 2, 4, 8, 16, 30, 30]
    assert RetryPolicy(backoff_factor=1).backoff_s(1000) == 1


@pytest.mark.parametrize("retry", [10**6, 10**12])
def test_the_bound_of_a_far_retry_is_the_maximum(retry):
    assert RetryPolicy().backoff_s(retry) == 30
    assert RetryPolicy(backoff_factor=3).backoff_s(retry) == 30
    assert RetryPolicy(initial_delay_s=0).backoff_s(retry) == 0


@pytest.mark.parametrize("retry", [0, -1, 1.5, True])
def test_retries_are_counted_from_one(retry):
    with pytest.raises(ValueError, match="retry"):
        RetryPolicy().backoff_s(retry)


@given(policy=policies, retry=st.integers(1, 10**6), seed=st.integers(0, 2**32))
def test_every_delay_is_within_its_jitter(policy, retry, seed):
    bound = policy.backoff_s(retry)
    delay = policy.delay_s(retry, random.Random(seed))
    assert 0 <= delay <= bound <= policy.max_delay_s
    assert delay >= bound * (1 - policy.jitter) * (1 - 1e-12)


def test_full_jitter_is_the_default_and_spreads_over_the_whole_bound():
    rng = seeded_rng()
    delays = [RetryPolicy().delay_s(5, rng) for _ in range(4000)]
    assert 7.5 < sum(delays) / len(delays) < 8.5, rng
    assert min(delays) < 0.2, rng
    assert max(delays) > 15.8, rng


def test_handlers_that_fail_together_do_not_come_back_together():
    clocks = [FakeClock() for _ in range(50)]
    for clock in clocks:
        default_rng = FaultToleranceHandler(clock=clock)
        default_rng.execute_with_retry(Flaky(ConnectionError()))
    assert len({clock.slept[0] for clock in clocks}) == 50


def test_the_given_rng_repeats_the_delays():
    slept = []
    for _ in range(2):
        clock = FakeClock()
        handler(clock, rng=seeded_rng(11)).execute_with_retry(
            Flaky(ConnectionError(), ConnectionError())
        )
        slept.append(clock.slept)
    assert slept[0] == slept[1] != []


@both
@given(policy=policies, takes_s=st.floats(0, 20), seed=st.integers(0, 2**32))
def test_no_attempt_starts_after_the_deadline_and_no_delay_crosses_it(run, policy, takes_s, seed):
    clock = FakeClock(1000)
    operation = AlwaysFailing(clock=clock, takes_s=takes_s)
    under_test = FaultToleranceHandler(retry_policy=policy, clock=clock, rng=random.Random(seed))
    with pytest.raises(ConnectionError) as caught:
        run(under_test, operation)
    assert 1 <= operation.calls <= 1 + policy.max_retries
    assert len(clock.slept) == operation.calls - 1
    assert f"after {operation.calls} attempt" in caught.value.__notes__[0]
    if policy.deadline_s is not None:
        end = 1000 + policy.deadline_s
        assert all(start <= end for start in operation.started)
        assert clock.now() <= max(end, operation.started[-1] + takes_s)


@both
def test_the_note_says_that_the_deadline_was_the_end(run):
    clock = FakeClock()
    operation = AlwaysFailing(clock=clock, takes_s=1)
    with pytest.raises(ConnectionError) as caught:
        run(handler(clock, jitter=0, deadline_s=4, max_retries=9), operation)
    assert operation.started == [0, 2]
    assert caught.value.__notes__ == [
        (
            "holdfast gave up after 2 attempts in 3 s: "
            "the next retry would have passed the deadline of 4 s"
        )
    ]


@both
def test_a_delay_that_lasts_longer_than_asked_for_starts_no_late_attempt(run):
    class Oversleeping(FakeClock):
        def sleep(self, seconds):
            super().sleep(seconds)
            self.advance(0.5)

    clock = Oversleeping()
    operation = AlwaysFailing(clock=clock)
    with pytest.raises(ConnectionError, match="failure 1") as caught:
        run(handler(clock, jitter=0, deadline_s=1.2), operation)
    assert operation.started == [0]
    assert caught.value.__notes__ == [
        "holdfast gave up after 1 attempt in 1.5 s: the deadline of 1.2 s has passed"
    ]


def test_real_clocks_work_too():
    real = FaultToleranceHandler(retry_policy=RetryPolicy(initial_delay_s=0.02, jitter=0))
    operation = Flaky(ConnectionError())
    assert real.execute_with_retry(operation) == 2
    assert 0.02 <= operation.started[1] - operation.started[0] < 5


# --- the budget ----------------------------------------------------------------------------


@pytest.mark.parametrize("shared_by", [1, 4])
def test_a_full_outage_makes_at_most_a_tenth_more_attempts(shared_by):
    budget = RetryBudget()
    handlers = [handler(budget=budget) for _ in range(shared_by)]
    operation = AlwaysFailing()
    for n in range(1000):
        with pytest.raises(ConnectionError):
            handlers[n % shared_by].execute_with_retry(operation)
    assert operation.calls == 1010
    assert budget.tokens == 0


def test_an_outage_seen_by_many_threads_stays_within_the_budget():
    budget = RetryBudget(reserve=10)
    shared = handler(budget=budget)
    attempts = []

    def failing():
        attempts.append(1)
        raise ConnectionError

    def work():
        for _ in range(50):
            with pytest.raises(ConnectionError):
                shared.execute_with_retry(failing)

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(attempts) == 16 * 50 + 10


@both
def test_the_note_says_that_the_budget_is_empty(run):
    budget = RetryBudget(reserve=1)
    operation = AlwaysFailing()
    with pytest.raises(ConnectionError) as caught:
        run(handler(budget=budget), operation)
    assert operation.calls == 2
    assert caught.value.__notes__[0].endswith("the retry budget is empty")


@both
def test_successes_earn_retries_back_up_to_the_reserve(run):
    budget = RetryBudget(reserve=2, refund=0.1)
    working = handler(budget=budget)
    assert budget.take()
    assert budget.take()
    assert not budget.take()
    for _ in range(10):
        run(working, Flaky())
    assert budget.take()
    assert not budget.take()
    for _ in range(100):
        budget.give_back()
    assert budget.tokens == 2


@both
def test_a_retried_success_counts_as_a_success(run):
    budget = RetryBudget(reserve=5, refund=0.5)
    run(handler(budget=budget), Flaky(ConnectionError(), ConnectionError()))
    assert budget.tokens == 3.5


@given(
    outcomes=st.lists(st.integers(0, 6), max_size=60),
    reserve=st.integers(1, 12),
    refund=st.floats(0, 1),
)
def test_attempts_stay_within_retries_and_budget(outcomes, reserve, refund):
    budget = RetryBudget(reserve=reserve, refund=refund)
    under_test = handler(budget=budget, max_retries=3)
    retries = successes = 0
    for failures in outcomes:
        operation = Flaky(*(ConnectionError() for _ in range(failures)))
        try:
            under_test.execute_with_retry(operation)
            successes += 1
        except ConnectionError:
            pass
        assert operation.calls <= 4
        retries += operation.calls - 1
        assert retries <= reserve + refund * successes + 1e-6
        assert 0 <= budget.tokens <= reserve


# --- misuse --------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [None, 5, "save", b""])
def test_what_cannot_be_called_is_named(wrong):
    under_test = handler(retryable=(Exception,))
    for verb in (
        lambda: under_test.execute_with_retry(wrong),
        lambda: asyncio.run(under_test.execute_with_retry_async(wrong)),
    ):
        with pytest.raises(TypeError) as caught:
            verb()
        assert repr(wrong) in str(caught.value)


@pytest.mark.parametrize("before", [0, 1])
def test_a_coroutine_function_is_refused_by_the_plain_verb_and_never_started(before):
    started = []

    async def save():
        started.append(1)

    failures = [ConnectionError()] * before

    def operation():
        if failures:
            raise failures.pop()
        return save()

    clock = FakeClock()
    with pytest.raises(TypeError, match=r"operation is async.*_async"):
        handler(clock, retryable=(Exception,)).execute_with_retry(operation)
    assert started == []
    assert len(clock.slept) == before
    gc.collect()


def test_a_plain_function_is_refused_by_the_async_verb_and_not_retried():
    operation = Flaky()
    clock = FakeClock()
    with pytest.raises(TypeError, match=r"Flaky returned int.*without _async"):
        asyncio.run(
            handler(clock, retryable=(Exception,)).execute_with_retry_async(
                functools.partial(operation)
            )
        )
    assert operation.calls == 1


def test_the_async_verb_takes_any_awaitable():
    async def main():
        future = asyncio.get_running_loop().create_future()
        future.set_result("done")
        return await handler().execute_with_retry_async(lambda: future)

    assert asyncio.run(main()) == "done"


BAD = [
    *(("max_retries", v) for v in (-1, 1.5, True, "3", None, math.nan)),
    *(
        (name, v)
        for name in ("initial_delay_s", "max_delay_s")
        for v in (-1, -0.1, math.nan, math.inf, True, "1", None, 1e300, 10**400)
    ),
    *(("backoff_factor", v) for v in (0.99, 0, -2, math.nan, math.inf, True, "2", None)),
    *(("jitter", v) for v in (-0.1, 1.1, math.nan, math.inf, "full", None)),
    *(("deadline_s", v) for v in (0, -1, math.nan, math.inf, False, "10", 1e300)),
    *(
        ("retryable", v)
        for v in (
            OSError,
            "OSError",
            None,
            (OSError, "x"),
            (OSError(),),
            (int,),
            (KeyboardInterrupt,),
            (BaseException,),
            (asyncio.CancelledError,),
            (concurrent.futures.CancelledError,),
        )
    ),
]


@pytest.mark.parametrize(("field", "value"), BAD, ids=lambda v: repr(v)[:40])
def test_impossible_policies_are_refused_naming_field_and_value(field, value):
    with pytest.raises(ValueError) as caught:
        RetryPolicy(**{field: value})
    assert field in str(caught.value)
    assert repr(value) in str(caught.value)


def test_an_initial_delay_above_the_maximum_is_refused_naming_both():
    with pytest.raises(ValueError, match=r"initial_delay_s.*5.*max_delay_s.*2"):
        RetryPolicy(initial_delay_s=5, max_delay_s=2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("reserve", v) for v in (0, 0.5, -1, math.nan, math.inf, True, "10", None)),
        *(("refund", v) for v in (-0.1, 1.1, math.nan, math.inf, True, "0.1", None)),
    ],
)
def test_impossible_budgets_are_refused_naming_field_and_value(field, value):
    with pytest.raises(ValueError) as caught:
        RetryBudget(**{field: value})
    assert field in str(caught.value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("storage", RetryPolicy()),
        ("storage", "runs/a"),
        ("retry_policy", {"max_retries": 3}),
        ("retry_policy", RetryPolicy),
        ("retry_budget", 5),
        ("clock", 5),
        ("rng", 3),
    ],
)
def test_wrong_parts_are_refused_when_the_handler_is_made(field, value):
    with pytest.raises(ValueError, match=f"{field} must be a") as caught:
        FaultToleranceHandler(**{field: value})
    assert repr(value) in str(caught.value)


def test_a_policy_is_a_value():
    policy = RetryPolicy(jitter=True, deadline_s=5)
    assert policy == RetryPolicy(jitter=1.0, deadline_s=5.0)
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert dataclasses.replace(policy, max_retries=1).max_retries == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.max_retries = 2
    with pytest.raises(TypeError):
        RetryPolicy(3)


@dataclasses.dataclass(frozen=True)
class FrozenError(OSError):
    reason: str


class SpeechlessError(OSError):
    def __repr__(self):
        raise RuntimeError("no words")


@pytest.mark.parametrize("error", [FrozenError("x"), SpeechlessError()])
def test_an_error_that_takes_no_notes_or_has_no_words_is_retried_and_raised_itself(error):
    calls = []

    def operation():
        calls.append(1)
        raise error

    with pytest.raises(type(error)) as caught:
        FaultToleranceHandler(clock=FakeClock()).execute_with_retry(operation)
    assert caught.value is error
    assert len(calls) == 4
