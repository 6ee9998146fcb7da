"""The circuit breaker: who is let through, what counts, and that nobody gets stuck."""

import asyncio
import concurrent.futures
import gc
import logging
import math
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import CircuitOpenError, ObjectNotFoundError
from holdfast.resilience import CircuitBreaker, CircuitState
from holdfast.testing import FakeClock


class DownError(Exception):
    pass


def works():
    return "result"


def fails():
    raise DownError


def run_plain(breaker, operation, fallback=None):
    return breaker.execute(operation, fallback)


def run_async(breaker, operation, fallback=None):
    def as_coroutine_function(function):
        async def coroutine_function():
            return function()

        return None if function is None else coroutine_function

    return asyncio.run(
        breaker.execute_async(as_coroutine_function(operation), as_coroutine_function(fallback))
    )


both = pytest.mark.parametrize("run", [run_plain, run_async])


@pytest.fixture
def clock():
    return FakeClock(100)


@pytest.fixture
def breaker(clock):
    return CircuitBreaker(failure_threshold=3, recovery_timeout_s=60, clock=clock)


def open_up(breaker, failures=3):
    for _ in range(failures):
        with pytest.raises(DownError):
            breaker.execute(fails)
    assert breaker.state is CircuitState.OPEN


@both
def test_the_states_in_order(run, breaker, clock):
    assert breaker.state is CircuitState.CLOSED
    for expected in (CircuitState.CLOSED, CircuitState.CLOSED, CircuitState.OPEN):
        with pytest.raises(DownError):
            run(breaker, fails)
        assert breaker.state is expected

    clock.advance(59.5)
    called = []
    with pytest.raises(CircuitOpenError) as caught:
        run(breaker, lambda: called.append(1))
    assert called == []
    assert caught.value.retry_after_s == pytest.approx(0.5)
    assert "0.5 s" in str(caught.value)

    clock.advance(0.5)
    assert breaker.state is CircuitState.OPEN
    seen = []
    with pytest.raises(DownError):
        run(breaker, lambda: seen.append(breaker.state) or fails())
    assert seen == [CircuitState.HALF_OPEN]
    assert breaker.state is CircuitState.OPEN

    with pytest.raises(CircuitOpenError) as caught:
        run(breaker, works)
    assert caught.value.retry_after_s == 60

    clock.advance(60)
    assert run(breaker, works) == "result"
    assert breaker.state is CircuitState.CLOSED


@both
def test_only_failures_in_a_row_open_it(run, breaker):
    for _ in range(10):
        for _ in range(2):
            with pytest.raises(DownError):
                run(breaker, fails)
        run(breaker, works)
    assert breaker.state is CircuitState.CLOSED


@both
def test_after_closing_it_takes_all_failures_again_to_open(run, breaker, clock):
    open_up(breaker)
    clock.advance(60)
    run(breaker, works)
    for _ in range(2):
        with pytest.raises(DownError):
            run(breaker, fails)
    assert breaker.state is CircuitState.CLOSED


def test_every_change_is_logged(breaker, clock, caplog):
    caplog.set_level(logging.INFO, "holdfast.resilience")
    open_up(breaker)
    clock.advance(60)
    breaker.execute(works)
    assert [(r.levelname, r.getMessage().split(":")[0]) for r in caplog.records] == [
        ("WARNING", "circuit open for 60 s after 3 failures"),
        ("INFO", "circuit half-open"),
        ("INFO", "circuit closed"),
    ]


# --- what counts ---------------------------------------------------------------------------


@both
def test_ignored_errors_are_answers_of_a_working_dependency(run, clock):
    breaker = CircuitBreaker(2, 60, ignore=[ObjectNotFoundError], clock=clock)

    def missing():
        raise ObjectNotFoundError("x")

    for _ in range(3):
        with pytest.raises(DownError):
            run(breaker, fails)
        with pytest.raises(ObjectNotFoundError):
            run(breaker, missing, lambda: "not asked")
    assert breaker.state is CircuitState.CLOSED
    open_up(breaker, 2)
    clock.advance(60)
    with pytest.raises(ObjectNotFoundError):
        run(breaker, missing)
    assert breaker.state is CircuitState.CLOSED


@both
@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit, concurrent.futures.CancelledError])
def test_cancellation_counts_neither_way_and_is_not_replaced(run, breaker, clock, stop):
    def stopped():
        raise stop

    for _ in range(2):
        with pytest.raises(DownError):
            run(breaker, fails)
    for _ in range(5):
        with pytest.raises(stop):
            run(breaker, stopped, lambda: "not asked")
    assert breaker.state is CircuitState.CLOSED
    open_up(breaker, 1)
    clock.advance(60)
    for _ in range(3):
        with pytest.raises(stop):
            run(breaker, stopped)
        assert breaker.state is CircuitState.HALF_OPEN
    run(breaker, works)
    assert breaker.state is CircuitState.CLOSED


def test_a_cancelled_task_gives_its_half_open_place_back(breaker, clock):
    open_up(breaker)
    clock.advance(60)

    async def main():
        entered = asyncio.Event()

        async def slow():
            entered.set()
            await asyncio.sleep(30)

        async def quick():
            return "result"

        probe = asyncio.create_task(breaker.execute_async(slow))
        await entered.wait()
        with pytest.raises(CircuitOpenError, match="half-open"):
            await breaker.execute_async(quick)
        probe.cancel()
        with pytest.raises(asyncio.CancelledError):
            await probe
        assert breaker.state is CircuitState.HALF_OPEN
        return await breaker.execute_async(quick)

    assert asyncio.run(main()) == "result"
    assert breaker.state is CircuitState.CLOSED


def interrupted_by(breaker, meanwhile, outcome):
    """Run a call during which ``meanwhile`` happens and which then ends with ``outcome``."""

    def operation():
        meanwhile()
        return outcome()

    return breaker.execute(operation)


def test_a_failure_from_before_the_circuit_closed_does_not_count(clock):
    breaker = CircuitBreaker(1, 60, clock=clock)

    def open_and_close():
        open_up(breaker, 1)
        clock.advance(60)
        breaker.execute(works)

    with pytest.raises(DownError):
        interrupted_by(breaker, open_and_close, fails)
    assert breaker.state is CircuitState.CLOSED


def half_open(breaker, clock):
    open_up(breaker)
    clock.advance(60)
    with pytest.raises(TypeError):
        breaker.execute(async_function)
    assert breaker.state is CircuitState.HALF_OPEN


async def async_function():
    raise AssertionError


@pytest.mark.parametrize("outcome", [works, fails])
def test_an_outcome_from_before_the_circuit_opened_changes_nothing(breaker, clock, outcome):
    try:
        interrupted_by(breaker, lambda: half_open(breaker, clock), outcome)
    except DownError:
        assert outcome is fails
    assert breaker.state is CircuitState.HALF_OPEN


def test_a_success_from_before_the_circuit_opened_does_not_close_it(breaker):
    assert interrupted_by(breaker, lambda: open_up(breaker), works) == "result"
    assert breaker.state is CircuitState.OPEN


def test_a_late_failure_does_not_restart_the_timer(clock):
    breaker = CircuitBreaker(1, 60, clock=clock)

    def open_then_pass_time():
        open_up(breaker, 1)
        clock.advance(40)

    with pytest.raises(DownError):
        interrupted_by(breaker, open_then_pass_time, fails)
    clock.advance(20)
    assert breaker.execute(works) == "result"


# --- half-open -----------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 3])
def test_64_threads_never_exceed_the_half_open_limit(clock, limit):
    breaker = CircuitBreaker(3, 60, half_open_max_calls=limit, clock=clock)
    lock = threading.Lock()
    barrier = threading.Barrier(64)
    inside, most, admitted, refused = 0, 0, 0, 0

    def probe():
        nonlocal inside, most, admitted
        with lock:
            inside += 1
            admitted += 1
            most = max(most, inside)
        time.sleep(0.001)
        with lock:
            inside -= 1
        raise concurrent.futures.CancelledError  # keeps the circuit half-open

    def work():
        nonlocal refused
        barrier.wait()
        for _ in range(20):
            try:
                breaker.execute(probe)
            except CircuitOpenError:
                with lock:
                    refused += 1
            except concurrent.futures.CancelledError:
                pass

    open_up(breaker)
    clock.advance(60)
    threads = [threading.Thread(target=work) for _ in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == limit
    assert admitted + refused == 64 * 20
    assert refused > 0
    assert breaker.state is CircuitState.HALF_OPEN


@pytest.mark.parametrize("limit", [1, 5])
def test_1000_tasks_never_exceed_the_half_open_limit(clock, limit):
    breaker = CircuitBreaker(3, 60, half_open_max_calls=limit, clock=clock)
    inside, most = 0, 0

    async def probe():
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.001)
        inside -= 1
        raise concurrent.futures.CancelledError

    async def main():
        return await asyncio.gather(
            *(breaker.execute_async(probe) for _ in range(1000)), return_exceptions=True
        )

    open_up(breaker)
    clock.advance(60)
    outcomes = asyncio.run(main())
    assert most == limit
    assert sum(isinstance(o, CircuitOpenError) for o in outcomes) == 1000 - limit


def test_a_probe_that_never_returns_loses_its_place(clock):
    breaker = CircuitBreaker(1, 60, clock=clock)
    open_up(breaker, 1)
    clock.advance(60)

    def hang():
        clock.advance(59)
        with pytest.raises(CircuitOpenError) as caught:
            breaker.execute(works)
        assert caught.value.retry_after_s == pytest.approx(1)
        clock.advance(1)
        with pytest.raises(DownError):
            breaker.execute(fails)
        assert breaker.state is CircuitState.OPEN
        return "late"

    assert breaker.execute(hang) == "late"
    assert breaker.state is CircuitState.OPEN


def test_of_two_probes_the_first_outcome_decides(clock):
    breaker = CircuitBreaker(1, 60, half_open_max_calls=2, clock=clock)
    open_up(breaker, 1)
    clock.advance(60)
    with pytest.raises(DownError):
        interrupted_by(breaker, lambda: breaker.execute(works), fails)
    assert breaker.state is CircuitState.CLOSED


def test_calls_run_side_by_side_because_no_lock_is_held():
    breaker = CircuitBreaker()
    together = threading.Barrier(8)
    failed = []

    def work():
        try:
            breaker.execute(lambda: together.wait(10))
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


@given(
    script=st.lists(st.sampled_from(["work", "fail", "cancel"]) | st.floats(0.1, 100), max_size=60),
    threshold=st.integers(1, 4),
)
def test_any_sequence_of_calls_follows_the_model(script, threshold):
    clock = FakeClock()
    breaker = CircuitBreaker(threshold, 60, clock=clock)
    state, failures, opened = CircuitState.CLOSED, 0, 0.0

    def cancel():
        raise KeyboardInterrupt

    for step in script:
        if isinstance(step, float):
            clock.advance(step)
            continue
        if state is CircuitState.OPEN and clock.now() >= opened + 60:
            state = CircuitState.HALF_OPEN
        try:
            breaker.execute({"work": works, "fail": fails, "cancel": cancel}[step])
        except CircuitOpenError:
            assert state is CircuitState.OPEN
            continue
        except (DownError, KeyboardInterrupt):
            pass
        assert state is not CircuitState.OPEN
        if step == "work":
            state, failures = CircuitState.CLOSED, 0
        elif step == "fail":
            failures += 1
            if state is CircuitState.HALF_OPEN or failures >= threshold:
                state, failures, opened = CircuitState.OPEN, 0, clock.now()
        assert breaker.state is state


# --- fallback ------------------------------------------------------------------------------


@both
def test_the_fallback_answers_for_failed_and_for_refused_calls(run, breaker):
    assert run(breaker, works, lambda: "other") == "result"
    for _ in range(3):
        assert run(breaker, fails, lambda: "other") == "other"
    assert breaker.state is CircuitState.OPEN
    called = []
    assert run(breaker, lambda: called.append(1), lambda: "other") == "other"
    assert called == []


@both
def test_the_fallback_answers_for_a_refused_call_whatever_is_ignored(run, clock):
    breaker = CircuitBreaker(1, 60, ignore=(ObjectNotFoundError, CircuitOpenError), clock=clock)
    open_up(breaker, 1)
    assert run(breaker, works, lambda: "other") == "other"


@both
def test_a_failing_fallback_shows_what_it_stood_in_for(run, breaker):
    def broken():
        raise LookupError

    with pytest.raises(LookupError) as caught:
        run(breaker, fails, broken)
    assert isinstance(caught.value.__context__, DownError)
    open_up(breaker, 2)
    with pytest.raises(LookupError) as caught:
        run(breaker, works, broken)
    assert isinstance(caught.value.__context__, CircuitOpenError)


# --- misuse --------------------------------------------------------------------------------


def test_the_wrong_kind_of_function_is_refused_and_does_not_count(breaker, clock):
    open_up(breaker)
    clock.advance(60)
    with pytest.raises(TypeError, match="is async"):
        breaker.execute(async_function, works)
    gc.collect()
    with pytest.raises(TypeError, match="nothing to await"):
        asyncio.run(breaker.execute_async(works))
    assert breaker.state is CircuitState.HALF_OPEN
    breaker.execute(works)


@pytest.mark.parametrize(("operation", "fallback"), [(None, None), (5, works), (works, "other")])
def test_what_cannot_be_called_is_named_and_nothing_is_called(breaker, operation, fallback):
    wrong = operation if operation is not works else fallback
    for verb in (
        lambda: breaker.execute(operation, fallback),
        lambda: asyncio.run(breaker.execute_async(operation, fallback)),
    ):
        with pytest.raises(TypeError) as caught:
            verb()
        assert repr(wrong) in str(caught.value)
    assert breaker.state is CircuitState.CLOSED


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            (name, v)
            for name in ("failure_threshold", "half_open_max_calls")
            for v in (0, -1, 1.5, True, "5", None)
        ),
        *(("recovery_timeout_s", v) for v in (0, -1, math.nan, math.inf, True, "60", None)),
        *(("ignore", v) for v in (ValueError, (int,), (KeyboardInterrupt,), ("x",), None)),
    ],
)
def test_impossible_breakers_are_refused_naming_field_and_value(field, value):
    with pytest.raises(ValueError) as caught:
        CircuitBreaker(**{field: value})
    assert field in str(caught.value)
    assert repr(value) in str(caught.value)


def test_the_real_clock_is_the_default():
    breaker = CircuitBreaker(1, 3600)
    open_up(breaker, 1)
    with pytest.raises(CircuitOpenError):
        breaker.execute(works)
    breaker = CircuitBreaker(1, 0.05)
    open_up(breaker, 1)
    time.sleep(0.06)
    assert breaker.execute(works) == "result"
