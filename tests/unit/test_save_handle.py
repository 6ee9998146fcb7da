"""The handle of a background save: a future, from its caller's side and from its thread's."""

import asyncio
import concurrent.futures
import contextlib
import gc
import itertools
import logging
import random
import threading
import traceback
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.distributed._handle import Promise, SaveHandle
from holdfast.distributed._progress import ProgressMeter
from holdfast.distributed._save_record import Timings
from holdfast.errors import CheckpointError, ErrorRecord, NoSpaceError, OperationTimeoutError
from holdfast.testing import FakeClock

MIB = 2**20
SOON_S = 30.0
NAME = "step_100"


def record(error=None, prefix=NAME):
    return Timings(clock=FakeClock()).record(
        prefix=prefix,
        step=100,
        rank=0,
        world_size=1,
        is_async=True,
        state_bytes=10,
        written_bytes=10,
        error=error,
    )


def promised(*, step=100, on_cancel=lambda: True, meter=None):
    meter = meter or ProgressMeter(None, operation="save")
    return Promise(step=step, progress=meter.now, on_cancel=on_cancel)


def end_well(promise):
    promise.keep(NAME, None, record())


def end_badly(promise, error):
    """As the thread that saves does."""
    told = promise.as_told(error)
    promise.keep("", told, record(told))


def raised_in_the_depth(error):
    """The error, with a traceback of three frames."""

    def fail(depth):
        if depth:
            fail(depth - 1)
        raise error

    try:
        fail(2)
    except BaseException as found:
        return found


def failed(error=None, **options):
    promise = promised(**options)
    error = raised_in_the_depth(error or NoSpaceError("the disk is full"))
    end_badly(promise, error)
    return promise


def saved(**options):
    promise = promised(**options)
    end_well(promise)
    return promise


def in_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    return thread


# ---- how it ends


def test_the_result_is_the_prefix_once_another_thread_has_it():
    promise, waiting = promised(), threading.Event()
    handle, found = promise.handle, []

    def ask():
        waiting.set()
        found.append(handle.result(SOON_S))

    thread = in_thread(ask)
    assert waiting.wait(SOON_S)
    assert (handle.done(), handle.cancelled(), handle.prefix, handle.record) == (
        False, False, None, None,
    )  # fmt: skip
    promise.set_prefix(NAME)
    assert (handle.prefix, handle.done(), handle.record) == (NAME, False, None)
    end_well(promise)
    thread.join(SOON_S)
    assert found == [NAME]
    assert (handle.done(), handle.cancelled(), handle.exception(), handle.step) == (
        True, False, None, 100,
    )  # fmt: skip
    assert handle.record == record()


def test_a_name_that_is_only_known_at_the_end_is_known_then():
    assert saved().handle.prefix == NAME


def test_an_error_is_raised_and_given_as_it_is():
    error = NoSpaceError("the disk is full", path="a/b")
    handle = failed(error).handle
    for _ in range(2):
        with pytest.raises(NoSpaceError, match="the disk is full") as caught:
            handle.result()
        assert caught.value is error
    assert handle.exception() is error
    assert (handle.done(), handle.cancelled()) == (True, False)
    assert "NoSpaceError: the disk is full" in handle.record.error


def test_what_any_kind_of_error_was_is_raised():
    group = ExceptionGroup("several", [OSError()])
    for error in (KeyboardInterrupt(), SystemExit(3), ZeroDivisionError(), group):
        handle = failed(error).handle
        with pytest.raises(type(error)) as caught:
            handle.result()
        assert caught.value is error


def test_an_error_raised_often_tells_the_same_each_time():
    """Raising an error adds to its traceback and sets its context; a loop that asks again and again
    would grow the one, and name an innocent as the other."""
    handle = failed().handle
    stories = set()
    for n in range(50):
        with pytest.raises(NoSpaceError) as caught:
            try:
                raise KeyError(n)
            except KeyError:
                handle.result()
        assert isinstance(caught.value.__context__, KeyError)
        try:
            handle.result()
        except NoSpaceError as again:
            stories.add("".join(traceback.format_exception(again)))
    assert len(stories) == 1
    (story,) = stories
    assert "KeyError" not in story


def test_an_error_says_in_a_note_where_it_was_raised():
    error = NoSpaceError("the disk is full")
    error.add_note("a note")
    with pytest.raises(NoSpaceError) as caught:
        failed(error).handle.result()
    first, story = caught.value.__notes__
    assert first == "a note"
    assert story.startswith("In the background:\nTraceback (most recent call last):\n")
    assert story.count("in fail\n") == 3
    assert story.endswith("NoSpaceError: the disk is full")


def test_an_error_keeps_its_cause_and_context():
    def fail():
        try:
            raise OSError("cause")
        except OSError as cause:
            raise NoSpaceError("full") from cause

    try:
        fail()
    except NoSpaceError as caught:
        error = caught
    promise = promised()
    end_badly(promise, error)
    for _ in range(2):
        with pytest.raises(NoSpaceError) as caught:
            promise.handle.result()
        assert repr(caught.value.__cause__) == "OSError('cause')"
        assert caught.value.__context__ is caught.value.__cause__


def test_a_save_ends_once():
    promise = saved()
    for error in (None, OSError()):
        with pytest.raises(RuntimeError, match="ends once"):
            end(promise, error)
    assert promise.handle.exception() is None


# ---- waiting


def test_a_save_that_is_not_done_in_time_goes_on():
    promise = promised()
    with pytest.raises(OperationTimeoutError, match=r"step 100.*not done after 0\.01 s") as caught:
        promise.handle.result(0.01)
    assert isinstance(caught.value, TimeoutError)
    assert isinstance(caught.value, CheckpointError)
    assert caught.value.timeout_s == 0.01
    assert "goes on" in str(caught.value)
    with pytest.raises(TimeoutError):
        promise.handle.exception(0)
    assert promise.handle.wait(0) is False
    end_well(promise)
    assert promise.handle.wait(0) is True
    assert promise.handle.result(0) == NAME


def test_to_wait_raises_none_of_the_saves_errors():
    promise = failed()
    assert promise.handle.wait() is True
    assert promise.take_unseen() is not None


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf"), "5", True])
@pytest.mark.parametrize("method", ["result", "exception", "wait"])
def test_what_cannot_be_a_timeout_is_refused(method, timeout):
    with pytest.raises(ValueError, match="timeout must be a number of seconds"):
        getattr(saved().handle, method)(timeout)


# ---- cancelling


def cancellable():
    """A promise whose save ends as cancelled by its own thread, when it is told to."""
    told = threading.Event()

    def on_cancel():
        told.set()
        return True

    promise = promised(on_cancel=on_cancel)

    def save():
        assert told.wait(SOON_S)
        error = concurrent.futures.CancelledError("told to stop")
        end_badly(promise, error)

    return promise.handle, in_thread(save)


def test_a_save_can_be_cancelled():
    handle, thread = cancellable()
    assert handle.cancel() is True
    thread.join(SOON_S)
    assert (handle.done(), handle.cancelled(), handle.record.was_cancelled) == (True, True, True)
    with pytest.raises(concurrent.futures.CancelledError, match="told to stop") as caught:
        handle.result()
    assert handle.exception() is caught.value
    assert handle.cancel() is True


def test_a_save_that_can_no_longer_be_stopped_is_not_cancelled():
    promise = promised(on_cancel=lambda: False)
    assert promise.handle.cancel() is False
    end_well(promise)
    assert promise.handle.cancel() is False
    assert (promise.handle.result(), promise.handle.cancelled()) == (NAME, False)


def test_a_save_told_to_stop_that_then_fails_is_cancelled_all_the_same():
    promise = promised()
    assert promise.handle.cancel() is True
    assert promise.handle.cancelled() is False
    error = NoSpaceError("full")
    end_badly(promise, error)
    with pytest.raises(concurrent.futures.CancelledError) as caught:
        promise.handle.result()
    assert caught.value.__cause__ is error
    assert promise.handle.cancelled()
    assert promise.handle.record.was_cancelled


def test_a_save_that_another_rank_cancelled_is_cancelled_here():
    """As ranks tell each other of errors that are not holdfast's."""
    told = ErrorRecord.of(concurrent.futures.CancelledError("told to stop"), rank=3, phase="write")
    error = told.rebuild()
    promise = failed(error)
    with pytest.raises(concurrent.futures.CancelledError) as caught:
        promise.handle.result()
    assert caught.value.__cause__ is error
    assert promise.handle.cancelled()
    assert promise.handle.record.was_cancelled
    assert promise.take_unseen() is None
    other = ErrorRecord.of(OSError("disk"), rank=3).rebuild()
    assert failed(other).handle.exception() is other


def test_one_that_failed_before_it_could_be_told_was_not_cancelled():
    """``on_cancel`` agrees, but the save ends by itself before the handle hears of it."""

    def on_cancel():
        end_badly(promise, error)
        return True

    promise, error = promised(on_cancel=on_cancel), NoSpaceError("full")
    assert promise.handle.cancel() is False
    assert promise.handle.exception() is error


def test_if_a_checkpoint_is_there_after_all_the_handle_says_so():
    promise = promised()
    assert promise.handle.cancel() is True
    end_well(promise)
    assert (promise.handle.result(), promise.handle.cancelled()) == (NAME, False)
    assert promise.handle.record.was_cancelled is False


# ---- callbacks


def test_callbacks_are_called_in_their_order_by_the_thread_that_saves():
    promise, called = promised(), []
    for n in range(3):
        promise.handle.add_done_callback(
            lambda handle, n=n: called.append((n, handle, handle.result(0), threading.get_ident()))
        )
    assert called == []
    thread = threading.Thread(target=end_well, args=(promise,))
    thread.start()
    thread.join()
    assert called == [(n, promise.handle, NAME, thread.ident) for n in range(3)]


def test_a_callback_added_late_is_called_at_once_by_who_adds_it():
    promise, called = failed(), []
    promise.handle.add_done_callback(lambda handle: called.append((handle, threading.get_ident())))
    assert called == [(promise.handle, threading.get_ident())]


def test_a_callback_may_add_another():
    promise, called = promised(), []
    promise.handle.add_done_callback(lambda handle: handle.add_done_callback(called.append))
    end_well(promise)
    assert called == [promise.handle]


def refuse(handle):
    raise ValueError("not now")


def stop(handle):
    raise SystemExit(1)


@pytest.mark.parametrize("callback", [refuse, stop])
def test_what_a_callback_raises_is_logged_and_the_others_are_called(callback, caplog):
    promise, called = promised(), []
    promise.handle.add_done_callback(callback)
    promise.handle.add_done_callback(called.append)
    end_well(promise)
    assert called == [promise.handle]
    assert promise.handle.result() == NAME
    (message,) = caplog.records
    assert (message.name, message.levelno) == ("holdfast.distributed", logging.ERROR)
    assert callback.__name__ in message.getMessage()
    assert message.exc_info is not None


def test_a_late_callback_that_raises_is_logged_unless_it_stops_the_caller(caplog):
    handle = saved().handle
    handle.add_done_callback(refuse)
    assert len(caplog.records) == 1
    with pytest.raises(SystemExit):
        handle.add_done_callback(stop)


def test_what_is_no_callback_is_refused():
    with pytest.raises(TypeError, match="fn must be a callable"):
        promised().handle.add_done_callback(None)


# ---- awaiting


def test_awaiting_gives_the_prefix():
    async def main():
        promise = promised()
        before = threading.active_count()
        waiter = asyncio.create_task(_awaited(promise.handle))
        await asyncio.sleep(0)
        assert threading.active_count() == before, "a thread waits for it"
        thread = in_thread(lambda: end_well(promise))
        found = await waiter
        thread.join()
        return found, await promise.handle

    assert asyncio.run(main()) == (NAME, NAME)


async def _awaited(handle):
    return await handle


def test_awaiting_raises_what_the_save_failed_with():
    error = NoSpaceError("full")

    async def main():
        promise = promised()
        thread = in_thread(lambda: end_badly(promise, error))
        with pytest.raises(NoSpaceError) as caught:
            await asyncio.wait_for(promise.handle, SOON_S)
        thread.join()
        assert caught.value is error
        return promise.take_unseen()

    assert asyncio.run(main()) is None


def test_a_cancelled_save_is_an_error_of_who_awaits_it_not_its_end():
    """``asyncio.CancelledError`` would look as if the task itself had been cancelled."""

    async def main():
        handle, thread = cancellable()
        task = asyncio.create_task(_awaited(handle))
        await asyncio.sleep(0)
        handle.cancel()
        with pytest.raises(concurrent.futures.CancelledError):
            await task
        thread.join()
        return task.cancelled()

    assert asyncio.run(main()) is False


def test_a_task_that_is_cancelled_leaves_the_save_alone():
    promise = promised(on_cancel=lambda: pytest.fail("the save was cancelled"))

    async def main():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(promise.handle, 0.01)
        task = asyncio.create_task(_awaited(promise.handle))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        saving = asyncio.to_thread(end_well, promise)
        return await asyncio.gather(saving, promise.handle)

    assert asyncio.run(main()) == [None, NAME]


def test_a_task_that_is_cancelled_just_as_the_save_ends_is_cancelled():
    async def main():
        problems = []
        asyncio.get_running_loop().set_exception_handler(lambda _, found: problems.append(found))
        promise = promised()
        task = asyncio.create_task(_awaited(promise.handle))
        await asyncio.sleep(0)
        end_well(promise)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        return problems

    assert asyncio.run(main()) == []


def test_a_task_that_gave_up_is_forgotten():
    promise = promised()

    async def main():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(promise.handle, 0.01)
        return weakref.ref(asyncio.get_running_loop())

    loop = asyncio.run(main())
    gc.collect()
    assert loop() is None
    assert not promise.handle.done()


def test_an_error_that_came_too_late_for_a_task_is_not_lost():
    promise = promised()

    async def main():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(promise.handle, 0.01)

    asyncio.run(main())
    end_badly(promise, error := NoSpaceError("full"))
    assert promise.take_unseen() is error


def test_a_loop_that_is_closed_meanwhile_harms_nothing(caplog):
    promise = promised()
    loop = asyncio.new_event_loop()
    task = loop.create_task(_awaited(promise.handle))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    end_well(promise)
    assert caplog.records == []
    assert promise.handle.result() == NAME
    with pytest.raises(asyncio.CancelledError):  # or it would warn that it was never finished
        task.get_coro().throw(asyncio.CancelledError)
    task._log_destroy_pending = False


def test_several_loops_may_await_one_save():
    promise, found = promised(), []
    ready = threading.Barrier(5)

    async def main():
        task = asyncio.ensure_future(_awaited(promise.handle))
        await asyncio.sleep(0)
        await asyncio.to_thread(ready.wait, SOON_S)
        found.append(await task)

    threads = [in_thread(lambda: asyncio.run(main())) for _ in range(4)]
    ready.wait(SOON_S)
    end_well(promise)
    for thread in threads:
        thread.join(SOON_S)
    assert found == [NAME] * 4


# ---- an error nobody asked for


def ask_and_catch(ask):
    with contextlib.suppress(CheckpointError):
        ask()


def awaiting(handle):
    return lambda: asyncio.run(_awaited(handle))


@pytest.mark.parametrize(
    "ask",
    [lambda handle: handle.result, lambda handle: handle.exception, awaiting],
    ids=["result", "exception", "await"],
)
def test_who_asks_has_seen_the_error(ask):
    promise = failed()
    ask_and_catch(ask(promise.handle))
    assert promise.take_unseen() is None


def test_who_only_looks_has_not():
    promise = failed()
    repr(promise.handle), promise.handle.record, promise.handle.done(), promise.handle.wait()
    promise.handle.cancel(), promise.handle.cancelled(), promise.handle.progress()
    error = promise.take_unseen()
    assert isinstance(error, NoSpaceError)
    assert promise.take_unseen() is None
    with pytest.raises(NoSpaceError):  # it is there for whoever asks later
        promise.handle.result()


def test_nobody_misses_what_is_no_failure():
    assert promised().take_unseen() is None
    assert saved().take_unseen() is None
    assert failed(concurrent.futures.CancelledError()).take_unseen() is None


def test_one_of_many_takes_the_error():
    for _ in range(20):
        promise, found = failed(), []
        ready = threading.Barrier(64)

        def take(promise=promise, found=found, ready=ready):
            ready.wait(SOON_S)
            found.append(promise.take_unseen())

        for thread in [in_thread(take) for _ in range(64)]:
            thread.join(SOON_S)
        assert [error for error in found if error is not None] == [promise.handle.exception()]


# ---- what it keeps


class Tensor:
    """Something large that must not be kept."""


def test_a_handle_that_is_done_keeps_nothing_of_the_save_alive():
    tensor = Tensor()
    known = weakref.ref(tensor)
    meter = ProgressMeter(lambda _, tensor=tensor: None, operation="save")
    promises = [promised(on_cancel=lambda tensor=tensor: False, meter=meter) for _ in range(2)]
    for promise in promises:
        promise.handle.add_done_callback(lambda _, tensor=tensor: None)
    with meter.phase("write", 10):
        pass

    def fail(tensor):
        try:
            raise OSError("disk")
        except OSError as cause:
            raise NoSpaceError("full") from cause

    end_well(promises[0])
    try:
        fail(tensor)
    except NoSpaceError as error:
        end_badly(promises[1], error)
    del tensor, meter
    gc.collect()
    assert known() is None
    assert [promise.handle.progress().done_bytes for promise in promises] == [10, 10]
    with pytest.raises(NoSpaceError):
        promises[1].handle.result()


def test_an_error_that_was_raised_leaves_no_cycle():
    promise = failed()
    handle = weakref.ref(promise.handle)
    gc.disable()
    try:
        with contextlib.suppress(NoSpaceError):
            promise.handle.result()
        with contextlib.suppress(NoSpaceError):
            promise.handle.__await__().send(None)
        del promise
        assert handle() is None, "the handle waits for the garbage collector"
    finally:
        gc.enable()


# ---- in words


def test_a_handle_says_how_far_it_is():
    meter = ProgressMeter(None, operation="save")
    promise = promised(meter=meter)
    handle, told = promise.handle, []
    told.append(repr(handle))
    with meter.phase("agree"):
        told.append(repr(handle))
    with meter.phase("write", 1024 * MIB):
        meter.tick(512 * MIB)
        told.append(repr(handle))
        assert handle.progress().done_bytes == 512 * MIB
    with meter.phase("tidy"):
        told.append(repr(handle))
    handle.cancel()
    told.append(repr(handle))
    end_well(promise)
    told.append(repr(handle))
    assert told == [
        "SaveHandle(step 100: starting)",
        "SaveHandle(step 100: agreeing)",
        "SaveHandle(step 100: writing, 512 MiB of 1 GiB)",
        "SaveHandle(step 100: tidy)",
        "SaveHandle(step 100: being cancelled)",
        "SaveHandle(step 100: saved as step_100)",
    ]


def test_a_handle_without_a_step_goes_by_its_name():
    promise = promised(step=None)
    assert repr(promise.handle) == "SaveHandle(starting)"
    promise.set_prefix("a")
    assert repr(promise.handle) == "SaveHandle(a: starting)"


def test_a_handle_says_that_it_failed():
    assert repr(failed().handle) == "SaveHandle(step 100: failed, NoSpaceError)"
    cancelled = failed(concurrent.futures.CancelledError()).handle
    assert repr(cancelled) == "SaveHandle(step 100: cancelled)"


def test_the_handle_is_public():
    assert holdfast.SaveHandle is SaveHandle


# ---- any order, any thread

ENDS = {
    "result": lambda: None,
    "error": lambda: NoSpaceError("full"),
    "cancelled": concurrent.futures.CancelledError,
}


@settings(deadline=None, max_examples=200)
@given(
    steps=st.lists(st.sampled_from(["callback", "cancel", "look", *ENDS]), max_size=12),
    agrees=st.booleans(),
)
def test_in_whatever_order_things_happen(steps, agrees):
    promise = promised(on_cancel=lambda: agrees)
    handle, called, over, asked = promise.handle, [], None, False
    callbacks = itertools.count()
    for step in steps:
        if step == "callback":
            number = next(callbacks)
            handle.add_done_callback(lambda _, number=number: called.append(number))
        elif step == "cancel":
            wanted = agrees if over is None else over == "cancelled"
            assert handle.cancel() is wanted
            asked = asked or (over is None and agrees)
        elif step in ENDS and over is None:
            end(promise, ENDS[step]())
            over = "cancelled" if asked and step == "error" else step
        assert handle.done() is (over is not None)
        assert handle.cancelled() is (over == "cancelled")
        assert (handle.record is not None) is handle.done()
    if over is None:
        assert called == []
        end(promise, None)
    assert called == list(range(next(callbacks)))


def end(promise, error):
    if error is None:
        end_well(promise)
    else:
        end_badly(promise, error)


def outcome_of(ask):
    try:
        return ask()
    except concurrent.futures.CancelledError:
        return "cancelled"
    except NoSpaceError:
        return "error"


@pytest.mark.parametrize("ending", ENDS)
def test_many_threads_at_once_agree(ending):
    """64 threads ask, await, add callbacks and cancel while the save ends."""
    rng = random.Random(ending)
    for _ in range(8):
        _one_race(ending, rng)


def _one_race(ending, rng):
    may_cancel = ending != "result"
    promise = promised(on_cancel=lambda: may_cancel)
    handle = promise.handle
    ready, lock = threading.Barrier(65), threading.Lock()
    outcomes, called, agreed, problems = [], [], [], []

    def note(into, value):
        with lock:
            into.append(value)

    def exception():
        error = handle.exception(SOON_S)
        if isinstance(error, concurrent.futures.CancelledError):
            return "cancelled"
        return NAME if error is None else "error"

    kinds = {
        "result": lambda: note(outcomes, outcome_of(lambda: handle.result(SOON_S))),
        "exception": lambda: note(outcomes, outcome_of(exception)),
        "wait": lambda: handle.wait(SOON_S) or note(problems, "no end"),
        "await": lambda: note(outcomes, outcome_of(awaiting(handle))),
        "callback": lambda: handle.add_done_callback(lambda _: note(called, 1)),
        "cancel": lambda: note(agreed, handle.cancel()),
        "look": lambda: (repr(handle), handle.progress(), handle.record, handle.prefix),
    }
    chosen = [*kinds, *rng.choices(list(kinds), k=57)]
    rng.shuffle(chosen)

    def work(kind):
        try:
            ready.wait(SOON_S)
            kinds[kind]()
        except BaseException as error:
            note(problems, repr(error))

    threads = [in_thread(lambda kind=kind: work(kind)) for kind in chosen]
    ready.wait(SOON_S)
    end(promise, ENDS[ending]())
    for thread in threads:
        thread.join(SOON_S)
        assert not thread.is_alive()
    assert problems == []
    final = "cancelled" if handle.cancelled() else NAME if ending == "result" else "error"
    assert set(outcomes) == {final}
    assert len(called) == chosen.count("callback")
    if final == "cancelled":
        assert ending != "result"
    else:
        assert True not in agreed
