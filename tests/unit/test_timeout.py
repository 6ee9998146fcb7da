"""Timeouts: the caller goes on in time, knows why, and the abandoned call bothers nobody."""

import asyncio
import concurrent.futures
import contextvars
import functools
import gc
import logging
import math
import signal
import sys
import threading
import time

import pytest

from holdfast.errors import CheckpointError, OperationTimeoutError
from holdfast.resilience import FaultToleranceHandler

HANDLER = FaultToleranceHandler()


def run_plain(operation, timeout_s):
    return HANDLER.execute_with_timeout(operation, timeout_s)


def run_async(operation, timeout_s):
    async def as_coroutine():
        return operation()

    return asyncio.run(HANDLER.execute_with_timeout_async(as_coroutine, timeout_s))


both = pytest.mark.parametrize("run", [run_plain, run_async])


@both
def test_a_call_in_time_gives_its_result(run):
    assert run(lambda: 7, 5) == 7
    assert run(lambda: None, 60) is None


def fail():
    raise LookupError("own")


@both
def test_the_operations_own_error_passes_as_itself(run):
    own = TimeoutError("the server's own")

    def raise_own():
        raise own

    with pytest.raises(TimeoutError) as caught:
        run(raise_own, 5)
    assert caught.value is own
    with pytest.raises(LookupError, match="own"):
        run(fail, 5)


def test_a_plain_call_that_is_too_slow_is_abandoned_and_says_so():
    release = threading.Event()

    def upload_shard():
        release.wait(30)

    started = time.monotonic()
    with pytest.raises(OperationTimeoutError) as caught:
        HANDLER.execute_with_timeout(upload_shard, 0.05)
    assert 0.05 <= time.monotonic() - started < 5
    release.set()
    assert "upload_shard did not finish in 0.05 s" in str(caught.value)
    assert "background" in str(caught.value)
    assert caught.value.timeout_s == 0.05
    assert isinstance(caught.value, TimeoutError)
    assert isinstance(caught.value, CheckpointError)


def test_an_async_call_that_is_too_slow_is_cancelled_and_says_so():
    ended = []

    async def upload_shard():
        try:
            await asyncio.sleep(30)
        finally:
            ended.append(1)

    with pytest.raises(OperationTimeoutError, match=r"upload_shard did not finish in 0.02 s"):
        asyncio.run(HANDLER.execute_with_timeout_async(upload_shard, 0.02))
    assert ended == [1]


def test_cancelling_from_outside_is_not_a_timeout():
    async def main():
        entered = asyncio.Event()

        async def slow():
            entered.set()
            await asyncio.sleep(30)

        task = asyncio.create_task(HANDLER.execute_with_timeout_async(slow, 20))
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def abandon(operation):
    """Time ``operation`` out, let it end, and wait until its thread is gone."""
    entered, release = threading.Event(), threading.Event()
    threads = []

    def held():
        threads.append(threading.current_thread())
        entered.set()
        release.wait(30)
        return operation()

    with pytest.raises(OperationTimeoutError):
        HANDLER.execute_with_timeout(held, 0.02)
    assert entered.wait(30)  # the timeout may be over before the thread begins
    assert threads[0].daemon
    release.set()
    threads[0].join(10)
    assert not threads[0].is_alive()


@pytest.mark.parametrize("error", [LookupError("late"), SystemExit(3), KeyboardInterrupt()])
def test_a_late_error_goes_to_the_log_and_nowhere_else(error, caplog, capfd):
    caplog.set_level(logging.DEBUG, "holdfast.resilience")

    def late():
        raise error

    abandon(late)
    assert capfd.readouterr() == ("", "")
    (record,) = caplog.records
    assert record.levelname == "DEBUG"
    assert record.exc_info[1] is error


def test_a_late_result_is_discarded_silently(caplog, capfd):
    caplog.set_level(logging.DEBUG, "holdfast.resilience")
    abandon(lambda: "late")
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []


def test_ctrl_c_reaches_the_waiting_caller():
    release, over = threading.Event(), []
    main = threading.main_thread().ident

    def interrupt():
        until = time.monotonic() + 30
        while not runs(main, concurrent.futures.wait):
            assert time.monotonic() < until
            time.sleep(0.01)
        time.sleep(0.05)  # it is in the call, and the lock that it waits for is a moment away
        signal.pthread_kill(main, signal.SIGINT)
        release.wait(60)
        over.append(1)

    with pytest.raises(KeyboardInterrupt):
        HANDLER.execute_with_timeout(interrupt, 60)
    assert over == []  # it was not waited for
    release.set()


def runs(ident, function):
    """Whether that thread is in a call of the function."""
    frame = sys._current_frames().get(ident)
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None


def test_an_interrupt_inside_the_operation_reaches_the_caller():
    def quit_now():
        raise SystemExit(3)

    with pytest.raises(SystemExit) as caught:
        HANDLER.execute_with_timeout(quit_now, 5)
    assert caught.value.code == 3


def test_the_operation_sees_a_copy_of_the_callers_context():
    variable = contextvars.ContextVar("variable")
    variable.set("outer")

    def operation():
        seen = variable.get()
        variable.set("inner")
        return seen

    assert HANDLER.execute_with_timeout(operation, 5) == "outer"
    assert variable.get() == "outer"


@both
@pytest.mark.parametrize("bad", [0, -1, math.nan, math.inf, True, "5", None, 1e300])
def test_impossible_timeouts_are_refused_before_anything_runs(run, bad):
    ran = []
    with pytest.raises(ValueError) as caught:
        run(lambda: ran.append(1), bad)
    assert "timeout_s" in str(caught.value)
    assert repr(bad) in str(caught.value)
    assert ran == []


def test_what_cannot_be_called_is_named():
    with pytest.raises(TypeError, match="'save'"):
        HANDLER.execute_with_timeout("save", 1)
    with pytest.raises(TypeError, match="'save'"):
        asyncio.run(HANDLER.execute_with_timeout_async("save", 1))


def test_the_wrong_kind_of_function_is_refused():
    async def save():
        pass

    with pytest.raises(TypeError, match=r"save is async"):
        HANDLER.execute_with_timeout(functools.partial(save), 5)
    gc.collect()
    with pytest.raises(TypeError, match="nothing to await"):
        asyncio.run(HANDLER.execute_with_timeout_async(lambda: 3, 5))


def test_a_timed_out_call_is_not_retried():
    calls = []
    release = threading.Event()

    def slow():
        calls.append(1)  # by the caller's thread: the other may begin when the timeout is over
        HANDLER.execute_with_timeout(lambda: release.wait(20), 0.02)

    with pytest.raises(OperationTimeoutError):
        HANDLER.execute_with_retry(slow)
    release.set()
    assert calls == [1]
