"""Work side by side: all of it, on no more threads than there is work for, and no more after an
error."""

import contextlib
import signal
import threading
import time

import pytest
from interrupt_tools import wait_until_it_waits

from holdfast._lanes import Lane, join_all, run_all, uninterrupted
from holdfast.contracts import ReadRange
from holdfast.storage import LocalStorage
from holdfast.storage._streams import BUFFER_BYTES
from holdfast.storage._system import System


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 50])
def test_every_item_is_run_once(count):
    done = []
    run_all(iter(range(count)), done.append, lanes=4)
    assert sorted(done) == [*range(count)]


@pytest.mark.parametrize(("count", "threads"), [(1, 0), (2, 1), (4, 3), (9, 3)])
def test_no_thread_is_started_that_has_nothing_to_do(count, threads):
    before = threading.active_count()
    together = threading.Barrier(threads + 1)
    seen = []

    def run(item):
        if item <= threads:  # the first of every lane
            together.wait(30)
            seen.append(threading.active_count() - before)

    run_all(range(count), run, lanes=4)
    assert max(seen) == threads
    assert threading.active_count() == before


def test_after_an_error_nothing_is_begun_and_the_first_is_raised():
    begun = []

    def run(item):
        begun.append(item)
        raise ZeroDivisionError(item)

    with pytest.raises(ZeroDivisionError, match="0"):
        run_all(range(100), run, lanes=1)
    assert begun == [0]


def test_an_interrupt_within_the_waiting_does_not_end_it():
    ended, both, main = [], threading.Barrier(2), threading.main_thread().ident

    def run(item):
        both.wait(30)
        if threading.current_thread() is not threading.main_thread():
            wait_until_it_waits(main)
            signal.pthread_kill(main, signal.SIGINT)
            time.sleep(0.5)
            ended.append(item)

    with pytest.raises(KeyboardInterrupt):
        run_all(range(2), run, lanes=2)
    assert len(ended) == 1


@pytest.fixture
def interrupts(monkeypatch):
    """Has whoever waits for a thread be interrupted so often, as by Ctrl-C. Gives an event that is
    set when he waits all the same: a thread that ends earlier is not waited for at all."""
    wait = Lane.wait

    def interrupt(times):
        left = [KeyboardInterrupt] * times
        waits = threading.Event()

        def interrupted(lane, timeout_s=None):
            if left:
                raise left.pop()
            waits.set()
            return wait(lane, timeout_s)

        monkeypatch.setattr(Lane, "wait", interrupted)
        return waits

    return interrupt


@pytest.mark.parametrize("times", [1, 3])
def test_an_interrupt_is_raised_when_all_threads_have_ended_and_nothing_more_is_begun(
    times, interrupts
):
    begun, ended, both = [], [], threading.Barrier(2)

    def run(item):
        begun.append(item)
        if item < 2:
            both.wait(30)
        if threading.current_thread() is not threading.main_thread():
            assert waits.wait(30)
            time.sleep(0.3)  # and goes on
            ended.append(item)

    before = threading.active_count()
    waits = interrupts(times)
    with pytest.raises(KeyboardInterrupt):
        run_all(range(2), run, lanes=2)
    assert threading.active_count() == before
    assert (len(begun), len(ended)) == (2, 1)


def test_an_interrupt_while_the_others_start_leaves_nothing_to_them(monkeypatch):
    """Starting waits for the thread, and may be interrupted before it runs."""
    begun, late = [], []

    def start(thread):
        late.append(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(KeyboardInterrupt):
            run_all(range(10), begun.append, lanes=2)
    for thread in late:
        thread.start()
        thread.join()
    assert begun == []


def test_a_thread_that_would_wait_for_itself_is_told_when_the_others_have_ended():
    told = []

    def wait():
        try:
            join_all([this, other])
        except RuntimeError as error:
            told.extend([str(error), other.is_at_work()])

    other = Lane(time.sleep, 0.2, name="other")
    this = Lane(wait, name="this")
    other.start()
    this.start()
    assert this.wait(30)
    assert told == ["a thread cannot wait for itself", False]


def test_a_wait_that_is_bounded_says_whether_the_work_is_over():
    end = threading.Event()
    lane = Lane(end.wait, 30, name="lane")
    assert lane.wait(0)  # not begun
    lane.start()
    assert not lane.wait(0)
    assert not lane.wait(0.05)
    end.set()
    assert lane.wait(30)
    assert lane.wait()


def test_a_thread_that_dies_before_its_work_begins_is_not_waited_for(monkeypatch):
    """As when a signal handler raises while it starts: the thread does not find itself then."""

    def die(thread):
        thread._set_ident()
        thread._started.set()
        threading._limbo.pop(thread)
        raise SystemExit

    monkeypatch.setattr(threading.Thread, "_bootstrap_inner", die)
    lane = Lane(pytest.fail, "it ran", name="lane")
    lane.start()
    assert lane.wait(30)


@pytest.mark.parametrize("daemon", [False, True])
def test_threads_end_with_the_interpreter_if_who_starts_them_does(daemon):
    seen = []

    def work():
        run_all(range(2), lambda _: both.wait(30), lanes=2)

    def look():
        lanes = [each for each in threading.enumerate() if each.name == "holdfast-lane"]
        seen.extend(each.daemon for each in lanes)

    both = threading.Barrier(2, action=look)
    starts = threading.Thread(target=work, daemon=daemon)
    starts.start()
    starts.join(30)
    assert seen == [daemon]


def test_all_who_wait_for_one_thread_go_on():
    end, gone_on = threading.Event(), []
    lane = Lane(end.wait, 30, name="lane")
    lane.start()
    waiters = [threading.Thread(target=lambda: gone_on.append(lane.wait(30))) for _ in range(4)]
    for waiter in waiters:
        waiter.start()
    end.set()
    for waiter in waiters:
        waiter.join(30)
    assert gone_on == [True] * 4


def test_what_must_be_done_is_begun_anew_and_the_first_interrupt_is_raised_then():
    tries = []

    def work():
        tries.append(len(tries))
        if len(tries) < 3:
            raise KeyboardInterrupt(tries[-1])

    with pytest.raises(KeyboardInterrupt, match="0"):
        uninterrupted(work)
    assert tries == [0, 1, 2]


class Slow(System):
    """Reads and writes only a while after ``begin``, in threads that are not the main one. Notes
    who is about to when a file is closed: its descriptor may be another file's by then."""

    def __init__(self, begin):
        self._begin = begin
        self.busy = []  # threads of one kind have one name
        self.closed_under = []

    def is_cached(self, fd, offset, size):
        return True  # so that it is read on threads that are waited for by a join

    def read_parts(self, fd, into, offset):
        with self._slowly(fd):
            return super().read_parts(fd, into, offset)

    def write(self, fd, data, offset):
        with self._slowly(fd):
            return super().write(fd, data, offset)

    def close(self, fd):
        self.closed_under += [thread for used, thread in self.busy if used == fd]
        super().close(fd)

    @contextlib.contextmanager
    def _slowly(self, fd):
        mine = fd, threading.current_thread().name
        self.busy.append(mine)
        if threading.current_thread() is not threading.main_thread():
            assert self._begin.wait(30)
            time.sleep(0.3)
        yield
        self.busy.remove(mine)


def test_nobody_reads_for_a_read_that_was_interrupted(tmp_path, interrupts):
    size = 4 * BUFFER_BYTES
    LocalStorage(tmp_path).create("a", b"a" * size)
    data = bytearray(size)
    slow = Slow(interrupts(1))
    with pytest.raises(KeyboardInterrupt):
        LocalStorage(tmp_path, system=slow).read_into(
            "a", [ReadRange(start=0, into=memoryview(data))]
        )
    assert slow.closed_under == []
    assert data == b"a" * size


@pytest.mark.parametrize("end", ["finish", "abort"])
def test_nobody_writes_for_a_writer_that_was_interrupted_and_nothing_is_left(
    tmp_path, interrupts, end
):
    slow = Slow(interrupts(1))
    storage = LocalStorage(tmp_path, system=slow)
    with pytest.raises(KeyboardInterrupt), storage.open_writer("a") as writer:
        for at in range(4):
            writer.write_at(at * BUFFER_BYTES, bytes(BUFFER_BYTES))
        getattr(writer, end)()
    assert slow.closed_under == []
    assert [path.name for path in tmp_path.rglob("*") if path.stat().st_size] == []


def test_a_thread_that_began_although_its_start_failed_is_waited_for(tmp_path, monkeypatch):
    """As for lack of memory once the system has made it."""
    start, failed, wrote = threading.Thread.start, [], []

    def failing(thread):
        start(thread)
        if not failed:
            failed.append(thread)
            raise MemoryError

    class SlowThreads(System):
        def write(self, fd, data, offset):
            this = threading.current_thread()
            if this is not threading.main_thread():
                time.sleep(0.6 if this in failed else 0.1)
                wrote.append(this)
            return super().write(fd, data, offset)

    storage = LocalStorage(tmp_path, system=SlowThreads())
    data = bytes(range(256)) * (8 * BUFFER_BYTES // 256)
    with monkeypatch.context() as patched, storage.open_writer("a") as writer:
        patched.setattr(threading.Thread, "start", failing)
        writer.write_at(0, data)
        writer.finish()
    assert failed[0] in wrote
    assert storage.read("a") == data
