"""A rank at long work of its own notices what becomes of the others, and can be stopped."""

import contextvars
import os
import signal
import subprocess
import sys
import threading
import time
import traceback

import pytest

from holdfast.coordination import SoloCoordinator, TorchCoordinator
from holdfast.distributed._watch import GRACE_S, Cancelled, Watch
from holdfast.errors import (
    ClosedError,
    OperationTimeoutError,
    RankFailedError,
    RankLostError,
    StorageError,
)
from holdfast.testing import RankGang

LIVENESS_S = 5.0  # where a rank is stopped; a busy machine keeps one waiting for seconds, too
CALM_S = 30.0  # where none is
NOTICED_S = 10.0  # a lost rank is noticed, not waited for; generous for a busy machine
FOREVER_S = 60.0


@pytest.fixture(scope="module")
def gang():
    with RankGang(3) as ranks:
        yield ranks


def coordinator(liveness_s=CALM_S):
    return TorchCoordinator(liveness_timeout_s=liveness_s, timeout_s=FOREVER_S)


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


def stop_self():
    os.kill(os.getpid(), signal.SIGSTOP)


def raise_ours():
    raise StorageError("the disk is full", path="step_7/shard-1")


def only_check(rank, victim, fault):
    made = coordinator(LIVENESS_S)
    with made as ranks, ranks.operation("save") as operation, operation.phase("write"):
        operation.barrier()
        if rank == victim:
            fault()
        while True:
            operation.check()
            time.sleep(0.01)


def watched_work(rank, victim, fault):
    """Ranks that are at work, and know of each other only by ``Watch``."""
    stopped = []

    def work(proceed):
        if rank == victim:
            fault()
        try:
            while True:
                proceed()
                time.sleep(0.01)
        except Cancelled:
            stopped.append(True)
            raise

    made = coordinator(LIVENESS_S)
    with made as ranks, ranks.operation("save") as operation, operation.phase("write"):
        operation.barrier()
        watch = Watch(operation, grace_s=FOREVER_S)
        try:
            watch.run(work)
        finally:
            assert not watch.left_running
            assert rank == victim or stopped


def others(victim):
    return [rank for rank in range(3) if rank != victim]


@pytest.mark.parametrize("busy", [only_check, watched_work])
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize(
    ("fault", "story", "after_s"),
    [(kill_self, "died", 0), (stop_self, "fell silent", LIVENESS_S)],
)
def test_a_rank_that_is_lost_is_named_by_ranks_that_call_no_collective(
    busy, victim, fault, story, after_s
):
    with RankGang(3) as gang:
        gang.start(busy, victim, fault)
        for outcome in gang.outcomes(FOREVER_S, ranks=others(victim)):
            error = outcome.error.rebuild()
            assert type(error) is RankLostError
            assert error.ranks == (victim,)
            assert error.phase == "write"
            assert f"rank {victim} {story}" in str(error)
            assert outcome.elapsed_s < after_s + NOTICED_S


@pytest.mark.parametrize("busy", [only_check, watched_work])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_raises_is_heard_by_ranks_that_call_no_collective(gang, busy, victim):
    gang.start(busy, victim, raise_ours)
    for outcome in gang.outcomes(FOREVER_S):
        error = outcome.error.rebuild()
        assert type(error) is StorageError
        assert (error.rank, error.phase, error.path) == (victim, "write", "step_7/shard-1")
        assert outcome.elapsed_s < NOTICED_S


def check_between_collectives(rank):
    with coordinator() as ranks:
        for turn in range(3):
            with ranks.operation("save") as operation:
                for _ in range(20):
                    operation.check()
                    assert operation.all_gather(bytes([rank, turn]))[2] == bytes([2, turn])
                began = time.monotonic()
                while time.monotonic() - began < 0.3:
                    operation.check()
        return "done"


def test_checking_disturbs_no_collective(gang):
    assert gang.run(check_between_collectives) == ["done"] * 3


def work_too_long(rank):
    with coordinator() as ranks:
        ranks.barrier()  # they come to it at very different times
        with ranks.operation("save", timeout_s=6) as operation:
            operation.barrier()
            look_for_long(operation)


def look_for_long(operation):
    began = time.monotonic()
    while time.monotonic() - began < NOTICED_S:
        operation.check()
        time.sleep(0.01)


def test_an_operation_whose_time_is_over_says_so_on_every_rank(gang):
    gang.start(work_too_long)
    for outcome in gang.outcomes(FOREVER_S):
        error = outcome.error.rebuild()
        assert type(error) is OperationTimeoutError
        assert error.timeout_s == 6
        assert "operation 'save' did not end within 6 s" in str(error)


def group_of(rank):
    import torch.distributed as dist

    with TorchCoordinator() as ranks:
        return ranks.process_group is dist.group.WORLD


def test_a_coordinator_knows_its_process_group(gang):
    assert gang.run(group_of) == [True] * 3


def test_alone_only_time_can_be_over():
    with SoloCoordinator().operation("save") as operation:
        operation.check()
    with pytest.raises(ClosedError):
        operation.check()
    with (
        pytest.raises(OperationTimeoutError, match="did not end within") as failure,
        SoloCoordinator().operation("save", timeout_s=0.01) as operation,
    ):
        time.sleep(0.02)
        operation.check()
    assert failure.value.timeout_s == 0.01


@pytest.fixture
def operation():
    with SoloCoordinator().operation("save") as operation:
        yield operation


def test_the_work_returns_its_value_from_another_thread_in_the_callers_context(operation):
    name = contextvars.ContextVar("name")
    name.set("outside")

    def work(proceed):
        proceed()
        seen = name.get()
        name.set("inside")
        return seen, threading.current_thread() is threading.main_thread()

    assert Watch(operation).run(work) == ("outside", False)
    assert name.get() == "outside"


@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt, StopIteration])
def test_an_error_of_the_work_is_raised_as_it_is(operation, kind):
    error = kind("it broke")

    def deep_inside(proceed):
        raise error

    with pytest.raises(kind) as failure:
        Watch(operation).run(deep_inside)
    assert failure.value is error
    assert "deep_inside" in "".join(traceback.format_exception(error))


def test_an_interrupt_stops_the_work_and_waits_for_its_end(operation):
    ended = []

    def work(proceed):
        signal.raise_signal(signal.SIGINT)  # handled by the main thread
        try:
            while True:
                proceed()
                time.sleep(0.001)
        finally:
            ended.append(True)

    watch = Watch(operation, grace_s=FOREVER_S)
    with pytest.raises(KeyboardInterrupt) as failure:
        watch.run(work)
    assert ended
    assert not watch.left_running
    assert not hasattr(failure.value, "__notes__")


def test_work_that_does_not_end_is_left_running_and_the_error_says_so(operation):
    release = threading.Event()

    def work(proceed):
        signal.raise_signal(signal.SIGINT)
        release.wait(FOREVER_S)

    watch = Watch(operation)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt) as failure:
        watch.run(work)
    release.set()
    assert time.monotonic() - began < GRACE_S + NOTICED_S
    assert watch.left_running
    assert "storage call that does not return" in failure.value.__notes__[0]


def test_what_the_work_raises_when_it_is_stopped_is_not_lost(operation):
    def work(proceed):
        signal.raise_signal(signal.SIGINT)
        try:
            while True:
                proceed()
                time.sleep(0.001)
        except Cancelled:
            raise OSError("could not clean up") from None

    with pytest.raises(KeyboardInterrupt) as failure:
        Watch(operation, grace_s=FOREVER_S).run(work)
    assert "OSError: could not clean up" in failure.value.__notes__[0]


def test_a_hanging_work_does_not_keep_the_interpreter():
    script = """
import signal, threading
from holdfast.coordination import SoloCoordinator
from holdfast.distributed._watch import Watch

def work(proceed):
    signal.raise_signal(signal.SIGINT)
    threading.Event().wait()

try:
    with SoloCoordinator().operation("save") as operation:
        Watch(operation).run(work)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    ended = subprocess.run(
        [sys.executable, "-c", script],
        check=False,
        capture_output=True,
        text=True,
        timeout=FOREVER_S,
    )
    assert (ended.returncode, ended.stdout.strip()) == (0, "interrupted"), ended.stderr


def fail_twice(rank):
    """A failed watch leaves the coordinator whole: the next operation starts clean."""
    with coordinator() as ranks:
        for _ in range(2):
            with pytest.raises(RankFailedError) as failure, ranks.operation("save") as operation:
                Watch(operation).run(lambda proceed: at_work(rank, proceed))
            assert failure.value.rank == 1
        with ranks.operation("save") as operation:
            return Watch(operation).run(lambda proceed: rank)


def at_work(rank, proceed):
    if rank == 1:
        raise ZeroDivisionError("the loss is NaN")
    while True:
        proceed()
        time.sleep(0.001)


def test_after_a_failure_the_ranks_work_on(gang):
    assert gang.run(fail_twice) == [0, 1, 2]
