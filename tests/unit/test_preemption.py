"""One last save of one process: real signals, a clock that only tests move, a real folder."""

import logging
import os
import re
import signal
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

from holdfast.distributed import (
    CheckpointOptions,
    DistributedCheckpoint,
    Preemption,
    SaveOptions,
    _preemption,
)
from holdfast.errors import ClosedError, OperationTimeoutError, RankFailedError, StorageError
from holdfast.storage import LocalStorage
from holdfast.storage._wrapped import WrappedStorage
from holdfast.testing import FakeClock, Fault, FaultyStorage

OTHER = signal.SIGUSR1


@pytest.fixture
def ckpt(tmp_path):
    with DistributedCheckpoint.create(options=CheckpointOptions(storage=tmp_path)) as made:
        yield made


@pytest.fixture(autouse=True)
def _same_handlers_as_before():
    numbers = (signal.SIGTERM, signal.SIGINT, OTHER)
    before = [signal.getsignal(number) for number in numbers]
    yield
    after = [signal.getsignal(number) for number in numbers]
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
    assert after == before


@pytest.fixture
def clock():
    return FakeClock(start=1000.0)


@pytest.fixture
def handled():
    """The signals that an earlier handler, a Python function, got."""
    got = []

    def handler(number, _frame):
        got.append(number)

    before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, OTHER)}
    yield got
    for number, earlier in before.items():
        signal.signal(number, earlier)


@pytest.fixture
def patient_look(monkeypatch):
    """The newest checkpoint is named however long it takes to find it."""
    monkeypatch.setattr(_preemption, "_LOOK_S", 60.0)


def send(number=signal.SIGTERM, *, times=1):
    for _ in range(times):
        os.kill(os.getpid(), number)


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(3, 2)


def test_a_signal_is_a_request_that_stays_and_the_last_save_is_made_in_its_time(
    ckpt, clock, caplog
):
    caplog.set_level(logging.INFO, "holdfast")
    with Preemption(ckpt, deadline_s=20, clock=clock) as preemption:
        assert not preemption.requested()
        assert preemption.remaining_s is None
        send()
        clock.advance(5)
        assert preemption.requested()
        assert preemption.remaining_s == 15
        clock.advance(4)
        assert preemption.requested()
        assert preemption.remaining_s == 11
        name = preemption.save(net(), options=SaveOptions(step=7), extra={"epoch": 3})
    (info,) = ckpt.list_checkpoints()
    assert (info.prefix, info.step) == (name, 7)
    assert f"saved {name} before the end of the job, with 11.0 s of 15.0 s left" in caplog.text
    assert "the job is to end in 15.0 s: rank 0 was told by SIGTERM" in caplog.text
    assert "nothing was saved for it" not in caplog.text


def test_without_a_signal_nothing_is_requested(ckpt, caplog):
    caplog.set_level(logging.INFO, "holdfast")
    with Preemption(ckpt) as preemption:
        assert not any(preemption.requested() for _ in range(100))
    assert not caplog.records


def test_the_signals_that_were_asked_for_are_caught_and_others_are_not(ckpt, handled):
    with Preemption(ckpt, signals=[OTHER, OTHER]) as preemption:
        send(signal.SIGTERM)
        assert handled == [signal.SIGTERM]
        assert not preemption.requested()
        send(OTHER)
        assert preemption.requested()


def test_an_earlier_handler_is_called_as_well_and_is_there_afterwards(ckpt, handled):
    with Preemption(ckpt) as preemption:
        send()
        assert preemption.requested()
        assert handled == [signal.SIGTERM]
    send()
    assert handled == [signal.SIGTERM] * 2


def test_an_earlier_handler_that_raises_does_not_keep_the_signal_from_being_noted(ckpt):
    def handler(_number, _frame):
        raise ZeroDivisionError

    before = signal.signal(signal.SIGTERM, handler)
    try:
        with Preemption(ckpt) as preemption:
            with pytest.raises(ZeroDivisionError):
                send()
            assert preemption.requested()
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_ctrl_c_can_be_a_request_instead_of_an_interrupt(ckpt):
    with Preemption(ckpt, signals=[signal.SIGINT]) as preemption:
        send(signal.SIGINT)
        assert preemption.requested()
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)


def test_further_signals_are_logged_and_do_not_move_the_deadline(ckpt, clock, caplog):
    caplog.set_level(logging.INFO, "holdfast")
    with Preemption(ckpt, deadline_s=20, signals=[signal.SIGTERM, OTHER], clock=clock) as asked:
        send()
        clock.advance(5)
        send(OTHER)
        assert asked.requested()
        send(times=2)
        assert asked.requested()
        assert asked.remaining_s == 15
    told = [record.message for record in caplog.records]
    assert told == [
        "SIGTERM came",
        "SIGUSR1 came again, which changes nothing",
        "the job is to end in 15.0 s: rank 0 was told by SIGTERM",
        "SIGTERM came again, which changes nothing",
        "SIGTERM came again, which changes nothing",
    ]


def test_handlers_are_put_back_after_an_error(ckpt):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError), Preemption(ckpt):
        assert signal.getsignal(signal.SIGTERM) != before
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_handler_that_somebody_installed_meanwhile_is_left_alone(ckpt):
    before = signal.getsignal(signal.SIGTERM)

    def theirs(_number, _frame): ...

    with Preemption(ckpt):
        signal.signal(signal.SIGTERM, theirs)
    assert signal.signal(signal.SIGTERM, before) is theirs


def test_two_at_once_both_hear_of_it(ckpt, handled):
    with Preemption(ckpt) as outer, Preemption(ckpt) as inner:
        send()
        assert outer.requested()
        assert inner.requested()
        assert handled == [signal.SIGTERM]


def test_two_that_are_left_in_the_wrong_order_swallow_nothing(ckpt, handled):
    outer = Preemption(ckpt)
    inner = Preemption(ckpt)
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)  # puts back the handler of the one that is over
    send()
    assert handled == [signal.SIGTERM]


ENDS = """
import os, signal, sys, tempfile, time
from holdfast.distributed import CheckpointOptions, DistributedCheckpoint, Preemption

ckpt = DistributedCheckpoint.create(options=CheckpointOptions(storage=tempfile.mkdtemp()))
"""

WRONG_ORDER = """
outer, inner = Preemption(ckpt), Preemption(ckpt)
outer.__enter__()
inner.__enter__()
outer.__exit__(None, None, None)
inner.__exit__(None, None, None)
os.kill(os.getpid(), signal.SIGTERM)
print("lived")
"""

FORKED = """
with Preemption(ckpt) as preemption:
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert not preemption.requested()
    os.kill(os.getpid(), signal.SIGTERM)
    assert preemption.requested()
os.kill(os.getpid(), signal.SIGTERM)
print("lived")
"""


@pytest.mark.parametrize("code", [WRONG_ORDER, FORKED])
def test_where_it_is_over_or_forked_the_default_action_is_taken(code):
    """A worker that is forked while signals are caught can be ended by ``terminate()``."""
    ended = subprocess.run(
        [sys.executable, "-c", ENDS + code],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == -signal.SIGTERM, ended.stderr
    assert ended.stdout == ""


def test_a_signal_that_nobody_asks_for_is_warned_of_at_the_end_and_not_raised(ckpt, clock, caplog):
    with Preemption(ckpt, deadline_s=20, clock=clock) as preemption:
        assert not preemption.requested()
        send()
        clock.advance(12)
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.message == (
        "SIGTERM came and nothing was saved for it: requested() was not asked again, or failed. "
        "This process may be killed in 8.0 s"
    )


@pytest.mark.parametrize(("answer", "left_s"), [(True, 20), (7, 7), (90.5, 90.5), (0, 0), (-3, 0)])
def test_also_says_that_the_end_is_near_and_how_near(ckpt, clock, answer, left_s):
    answers = [False, None, answer]
    with Preemption(
        ckpt, deadline_s=20, signals=(), also=lambda: answers.pop(0), clock=clock
    ) as preemption:
        assert [preemption.requested() for _ in range(4)] == [False, False, True, True]
        assert preemption.remaining_s == left_s


def test_of_a_signal_and_also_the_one_that_ends_first_counts(ckpt, clock):
    with Preemption(ckpt, deadline_s=20, also=lambda: 30, clock=clock) as preemption:
        send()
        clock.advance(1)
        assert preemption.requested()
        assert preemption.remaining_s == 19


@pytest.mark.parametrize("answer", ["soon", float("nan"), float("inf"), [3]])
def test_an_answer_of_also_that_cannot_be_meant_is_an_error(ckpt, answer):
    with (
        Preemption(ckpt, signals=(), also=lambda: answer) as preemption,
        pytest.raises(RankFailedError, match="also must return True, False, None or how many") as e,
    ):
        preemption.requested()
    assert isinstance(e.value.__cause__, ValueError)


def test_what_also_raises_is_raised_and_names_it(ckpt):
    def broken():
        raise OSError("no route to the metadata")

    with (
        Preemption(ckpt, signals=(), also=broken) as preemption,
        pytest.raises(RankFailedError) as caught,
    ):
        preemption.requested()
    assert "no route to the metadata" in str(caught.value)
    assert caught.value.phase == "also"


def test_with_every_only_some_calls_look(ckpt):
    asked = []
    with Preemption(ckpt, signals=(), also=lambda: asked.append(1), every=4) as preemption:
        for call in range(1, 10):
            assert not preemption.requested()
            assert len(asked) == (call + 3) // 4


def test_with_every_a_signal_waits_for_the_next_call_that_looks(ckpt, clock):
    with Preemption(ckpt, deadline_s=20, every=3, clock=clock) as preemption:
        answers = [preemption.requested()]
        send()
        clock.advance(2)
        answers += [preemption.requested() for _ in range(4)]
        assert answers == [False, False, False, True, True]
        assert preemption.remaining_s == 18  # counted from the signal, not from the call


@pytest.mark.usefixtures("patient_look")
def test_when_the_time_is_over_the_error_names_the_newest_checkpoint(ckpt, clock):
    ckpt.save(net(), options=SaveOptions(checkpoint_prefix="older", step=3))
    with Preemption(ckpt, deadline_s=20, clock=clock) as preemption:
        send()
        clock.advance(6)
        assert preemption.requested()
        clock.advance(14)
        assert preemption.remaining_s == 0
        with pytest.raises(OperationTimeoutError) as caught:
            preemption.save(net(), options=SaveOptions(step=9))
    assert str(caught.value) == (
        "there is no time for a last save: 14.0 s were left when all ranks knew that the job is to "
        "end, and they are over. The newest checkpoint is older of step 3, and intact"
    )
    assert caught.value.timeout_s == 14
    assert [info.prefix for info in ckpt.list_checkpoints()] == ["older"]


def test_when_the_time_is_over_and_there_is_no_checkpoint_none_is_named(ckpt):
    with Preemption(ckpt, signals=(), also=lambda: 0) as preemption:
        assert preemption.requested()
        with pytest.raises(OperationTimeoutError, match=r"over\. What was saved before is intact"):
            preemption.save(net())


def test_when_the_time_is_over_a_storage_that_hangs_does_not_hold_up_the_error(tmp_path):
    release = threading.Event()
    storage = Hanging(LocalStorage(tmp_path), release)  # every call
    with (
        DistributedCheckpoint(storage=storage) as ckpt,
        Preemption(ckpt, signals=(), also=lambda: 0) as preemption,
    ):
        assert preemption.requested()
        with pytest.raises(OperationTimeoutError, match=r"over\. What was saved before is intact"):
            preemption.save(net())
    release.set()


class Hanging(WrappedStorage):
    """Answers no call of some kind before its event."""

    def __init__(self, storage, release, *methods):
        super().__init__(storage)
        self._release = release
        self._methods = methods

    def _through(self, method, key, call, /):
        assert (self._methods and method not in self._methods) or self._release.wait(100)
        return call()


@pytest.mark.parametrize(("own_s", "left_s"), [(None, 0.25), (60, 0.25), (0.25, 60)])
def test_a_save_gets_no_more_than_the_time_left_nor_than_its_own(tmp_path, clock, own_s, left_s):
    release = threading.Event()
    storage = Hanging(LocalStorage(tmp_path), release, "open_writer")
    with (
        DistributedCheckpoint(storage=storage) as ckpt,
        Preemption(ckpt, signals=(), also=lambda: left_s, clock=clock) as preemption,
    ):
        assert preemption.requested()
        with pytest.raises(OperationTimeoutError) as caught:
            preemption.save(net(), options=SaveOptions(timeout_s=own_s))
        release.set()
        assert caught.value.timeout_s == 0.25
        told = "were all that was left to the job." in "".join(caught.value.__notes__)
        assert told == (left_s == 0.25)
        assert not ckpt.list_checkpoints()


@pytest.fixture
def release():
    """Set, at the end of a test that has not done so."""
    event = threading.Event()
    yield event
    event.set()


def held_up(tmp_path, release):
    """A checkpointer that writes nothing before the event."""
    return DistributedCheckpoint(storage=Hanging(LocalStorage(tmp_path), release, "open_writer"))


def test_a_save_in_the_background_is_waited_for_before_the_last_one(tmp_path, release):
    with held_up(tmp_path, release) as ckpt, Preemption(ckpt) as preemption:
        handle = ckpt.save_async(net(), options=SaveOptions(checkpoint_prefix="background"))
        assert not preemption.requested()
        send()
        assert preemption.requested()
        assert not handle.done()
        threading.Timer(0.2, release.set).start()
        preemption.save(net(), options=SaveOptions(checkpoint_prefix="last", when_busy="refuse"))
        assert handle.result(0) == "background"
        assert [info.prefix for info in ckpt.list_checkpoints()] == ["last", "background"]


@pytest.mark.usefixtures("patient_look")
def test_a_save_in_the_background_that_does_not_end_in_time_leaves_none_for_a_last_one(
    tmp_path, release
):
    with (
        DistributedCheckpoint(storage=tmp_path) as ckpt,
        held_up(tmp_path, release) as slow,
        Preemption(slow, signals=(), also=lambda: 5) as preemption,
    ):
        ckpt.save(net(), options=SaveOptions(checkpoint_prefix="older"))
        handle = slow.save_async(net(), options=SaveOptions(checkpoint_prefix="background"))
        assert preemption.requested()
        with pytest.raises(OperationTimeoutError, match="The newest checkpoint is older") as caught:
            preemption.save(net())
        # Nothing to see of it if the time was over before it was waited for.
        told = str(caught.value.__cause__)
        assert re.match(r"a save in the background was not done after [0-4]\.\d", told)
        release.set()
        assert handle.result(60) == "background"  # it goes on
        assert len(ckpt.list_checkpoints()) == 2


def test_a_save_in_the_background_that_fails_does_not_keep_the_last_one_from_being_made(
    tmp_path, caplog
):
    fault = Fault("open_writer", 1, StorageError("the disk is gone"))
    storage = FaultyStorage(LocalStorage(tmp_path), [fault])
    with DistributedCheckpoint(storage=storage) as ckpt, Preemption(ckpt) as preemption:
        ckpt.save_async(net(), options=SaveOptions(checkpoint_prefix="background"))
        send()
        assert preemption.requested()
        preemption.save(net(), options=SaveOptions(checkpoint_prefix="last"))
        assert [info.prefix for info in ckpt.list_checkpoints()] == ["last"]
    assert "the save in the background failed, now the last one is made: the disk is gone" in (
        caplog.text
    )


def test_save_before_anything_is_requested_is_refused(ckpt):
    with (
        Preemption(ckpt) as preemption,
        pytest.raises(ValueError, match=r"save is for when requested\(\) has returned True"),
    ):
        preemption.save(net())
    assert not ckpt.list_checkpoints()


def test_only_the_main_thread_can_catch_signals(ckpt):
    found = []

    def enter():
        try:
            with Preemption(ckpt):
                found.append("entered")
        except ValueError as error:
            found.append(str(error))
        with Preemption(ckpt, signals=(), also=lambda: True) as preemption:
            found.append(preemption.requested())

    thread = threading.Thread(target=enter, name="trainer")
    thread.start()
    thread.join()
    message, by_also = found
    assert message.startswith("only the main thread can catch signals, and this is 'trainer'")
    assert by_also is True


def test_it_is_entered_once_and_asked_inside(ckpt):
    preemption = Preemption(ckpt)
    with pytest.raises(ValueError, match="inside its with block only"):
        preemption.requested()
    with preemption, pytest.raises(ValueError, match="entered once"):
        preemption.__enter__()
    with pytest.raises(ValueError, match="entered once"):
        preemption.__enter__()
    with pytest.raises(ValueError, match="inside its with block only"):
        preemption.requested()


def test_a_closed_checkpoint_cannot_be_asked(tmp_path):
    ckpt = DistributedCheckpoint.create(options=CheckpointOptions(storage=tmp_path))
    with Preemption(ckpt) as preemption:
        ckpt.close()
        with pytest.raises(ClosedError):
            preemption.requested()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"deadline_s": 0}, "deadline_s must be"),
        ({"deadline_s": "30"}, "deadline_s must be"),
        ({"every": 0}, "every must be"),
        ({"every": 1.5}, "every must be"),
        ({"also": 30}, "also must be a function or None"),
        ({"clock": 3}, "clock must be"),
        ({"signals": signal.SIGTERM}, "signals must be several"),
        ({"signals": "SIGTERM"}, "signals must be several"),
        ({"signals": ["SIGTERM"]}, "signals must be signals"),
        ({"signals": [True]}, "signals must be signals"),
        ({"signals": [0]}, "signals must be signals"),
        ({"signals": [4000]}, "signals must be signals"),
        ({"signals": [signal.SIGKILL]}, "SIGKILL ends or stops a process and cannot be caught"),
        ({"signals": [signal.SIGSTOP]}, "SIGSTOP ends or stops a process and cannot be caught"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(ckpt, arguments, message):
    with pytest.raises(ValueError, match=message):
        Preemption(ckpt, **arguments)


def test_what_is_no_checkpoint_is_refused():
    with pytest.raises(ValueError, match="checkpoint must be a DistributedCheckpoint"):
        Preemption("runs/a")
