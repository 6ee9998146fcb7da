"""Threads that ask a disk: everything is asked once and used by who wanted it; the threads are
shared, and end with the last who uses them; nothing is used by them after an error."""

import concurrent.futures
import contextlib
import gc
import multiprocessing
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest

from holdfast.storage import _disk_threads
from holdfast.storage._disk_threads import DiskThreads


def names():
    return [thread.name for thread in threading.enumerate() if thread.name == "holdfast-disk"]


@pytest.mark.parametrize("count", [0, 1, 2, 4, 50])
def test_every_item_is_asked_for_on_those_threads_and_used_on_the_callers_in_order(count):
    asked, used = [], []

    def ask(item):
        asked.append(threading.current_thread().name)
        return item * 10

    def use(item, answer):
        used.append((item, answer, threading.current_thread().name))

    DiskThreads(4).run_all(range(count), ask, use)
    assert asked == ["holdfast-disk"] * count
    assert used == [(n, n * 10, threading.current_thread().name) for n in range(count)]
    assert names() == []


@pytest.mark.parametrize(("count", "threads"), [(1, 1), (3, 3), (4, 4), (9, 4)])
def test_no_thread_is_started_that_has_nothing_to_do(count, threads):
    seen = []
    DiskThreads(4).run_all(range(count), lambda _: seen.append(len(names())), lambda *_: None)
    assert max(seen) == threads


def test_those_who_ask_at_the_same_time_share_the_threads():
    disk, all_in, seen = DiskThreads(2), threading.Barrier(3), []

    def work():
        def use(item, _):
            if item == 0:
                all_in.wait(30)
                seen.append(len(names()))

        disk.run_all(range(4), lambda item: item, use)

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(work) for _ in range(3)]:
            done.result(30)
    assert max(seen) == 2
    assert names() == []


def test_the_disk_is_asked_again_while_what_it_answered_is_used():
    """With one thread: it asks for the second although the first is not used up."""
    second = threading.Event()

    def ask(item):
        if item == 1:
            second.set()

    DiskThreads(1).run_all(range(2), ask, lambda *_: second.wait(30) or pytest.fail("not asked"))


def test_after_an_error_nothing_is_begun_and_it_is_raised_when_all_have_ended():
    begun, ended, both = [], [], threading.Barrier(2)

    def ask(item):
        begun.append(item)
        if item < 2:
            both.wait(30)
        if item == 0:
            raise ZeroDivisionError
        time.sleep(0.3)
        ended.append(item)

    with pytest.raises(ZeroDivisionError):
        DiskThreads(2).run_all(range(100), ask, lambda *_: None)
    assert sorted(begun)[:2] == [0, 1]
    assert sorted(ended) == sorted(begun)[1:]
    assert len(begun) < 10
    assert names() == []


def test_an_error_of_who_uses_an_answer_ends_it_too():
    begun = []

    def ask(item):
        begun.append(item)
        time.sleep(0.05)

    def use(_item, _answer):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        DiskThreads(1).run_all(range(100), ask, use)
    assert len(begun) < 10


@pytest.mark.parametrize("times", [1, 5])
def test_an_interrupt_is_raised_when_none_is_being_asked_any_more(times):
    """It comes while answers are waited for, and again while the last of them are."""
    begun, ended, main = [], [], threading.main_thread().ident

    def ask(item):
        begun.append(item)
        if item == 0:
            for _ in range(times):
                time.sleep(0.02)
                signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.3)
        ended.append(item)

    with pytest.raises(KeyboardInterrupt):
        DiskThreads(2).run_all(range(100), ask, lambda *_: None)
    assert sorted(ended) == sorted(begun)
    assert len(begun) < 10
    assert names() == []


def test_what_could_not_be_queued_is_not_waited_for(monkeypatch):
    """As after an interrupt, or without memory, just before."""

    class Full(_disk_threads.queue.SimpleQueue):
        def put(self, item):
            if item is not None:
                raise MemoryError
            super().put(item)

    monkeypatch.setattr(_disk_threads.queue, "SimpleQueue", Full)
    with pytest.raises(MemoryError):
        DiskThreads(2).run_all(range(3), lambda n: n, lambda *_: None)
    assert names() == []


def test_no_more_is_asked_for_than_a_few_ahead_of_what_was_used():
    asked, most = [], []

    def use(item, _):
        time.sleep(0.02)
        most.append(len(asked) - item)

    DiskThreads(4).run_all(range(30), asked.append, use)
    assert sorted(asked) == [*range(30)]
    assert max(most) == 6


def test_what_was_used_is_not_kept():
    class Memory:
        pass

    made = {}

    def ask(item):
        memory = Memory()
        made[item] = weakref.ref(memory)
        return memory

    def use(item, _):
        assert [earlier for earlier in range(item) if made[earlier]() is not None] == []

    DiskThreads(2).run_all(range(20), ask, use)


def test_an_interrupt_while_a_thread_starts_leaves_nothing_to_it(monkeypatch):
    begun, start = [], threading.Thread.start

    def interrupted(thread):
        start(thread)
        raise KeyboardInterrupt

    disk = DiskThreads(2)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            disk.run_all(range(10), begun.append, lambda *_: None)
    assert begun == []
    assert names() == []
    disk.run_all(range(10), begun.append, lambda *_: None)
    assert sorted(begun) == [*range(10)]


def test_where_no_thread_is_to_be_had_the_caller_asks(monkeypatch):
    def start(_thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    used = []
    DiskThreads(4).run_all(range(3), lambda n: n * 10, lambda n, answer: used.append((n, answer)))
    assert used == [(0, 0), (1, 10), (2, 20)]
    asked = []

    def ask(item):
        asked.append(item)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        DiskThreads(4).run_all(range(3), ask, lambda *_: None)
    assert asked == [0]


def test_who_has_threads_is_not_left_alone_by_one_that_cannot_start(monkeypatch):
    """The second caller gets no thread of his own, and uses that of the first."""
    start, disk = threading.Thread.start, DiskThreads(4)

    def use(item, _):
        if item == 0:
            with monkeypatch.context() as patched:
                patched.setattr(threading.Thread, "start", refuse)
                disk.run_all(range(3), lambda n: n, lambda n, _: used.append(n))

    def refuse(thread):
        if thread.name == "holdfast-disk":
            raise RuntimeError("can't start new thread")
        start(thread)

    used = []
    disk.run_all(range(1), lambda n: n, use)
    assert used == [0, 1, 2]
    assert names() == []


def test_threads_that_a_dead_mount_holds_are_left_to_who_waits_for_them(monkeypatch):
    monkeypatch.setattr(_disk_threads, "_STUCK_S", 0.2)
    disk, back, used = DiskThreads(1), threading.Event(), []
    asked = threading.Event()

    def ask(_item):
        asked.set()
        back.wait(30)

    hung = threading.Thread(target=disk.run_all, args=([0], ask, lambda *_: used.append("late")))
    hung.start()
    assert asked.wait(30)
    time.sleep(0.4)
    disk.run_all([1], lambda n: n, lambda *_: used.append("other"))
    assert used == ["other"]
    back.set()
    hung.join(30)
    assert used == ["other", "late"]
    assert names() == []


@pytest.mark.parametrize("is_locked", [False, True])
def test_a_process_that_was_forked_meanwhile_has_threads_of_its_own(is_locked):
    """A fork has the object, and none of its threads; nor that which was to free its lock."""
    disk, held, go_on = DiskThreads(2), threading.Event(), threading.Event()

    def hold():  # not by who forks: the lock would be the child's, too
        with disk._lock if is_locked else contextlib.nullcontext():
            held.set()
            go_on.wait(60)

    def in_the_fork():
        disk.run_all(range(3), lambda n: n, lambda *_: None)

    def use(item, _):
        if item == 0:
            child = multiprocessing.get_context("fork").Process(target=in_the_fork)
            holder = threading.Thread(target=hold)
            holder.start()
            assert held.wait(30)
            child.start()
            child.join(30)
            go_on.set()
            holder.join(30)
            ended.append(child.exitcode)
            child.kill()

    ended = []
    disk.run_all(range(2), lambda n: n, use)
    assert ended == [0]


@pytest.mark.parametrize("where", ["_join", "_leave"])
@pytest.mark.parametrize("at", range(18))
def test_what_interrupts_a_reader_may_read_itself(where, at):
    """A signal handler, or a finalizer, between any two lines, whose own reads end the threads."""
    disk, code, used, others = DiskThreads(2), getattr(DiskThreads, where).__code__, [], []
    left = [at]

    def trace_call(frame, _event, _argument):
        return trace_line if frame.f_code is code else None

    def trace_line(_frame, event, _argument):
        left[0] -= event == "line"
        if event == "line" and left[0] == -1:
            disk.run_all(range(3), lambda n: n, lambda n, _: others.append(n))
        return trace_line

    before = sys.gettrace()
    sys.settrace(trace_call)
    try:
        disk.run_all(range(3), lambda n: n, lambda n, _: used.append(n))
    finally:
        sys.settrace(before)
    assert used == [0, 1, 2]
    assert others == ([0, 1, 2] if left[0] < 0 else [])
    assert names() == []


def test_garbage_that_reads_may_be_collected_on_one_of_the_threads(monkeypatch):
    """And be the last that uses them."""
    disk, inside, go_on, ended = DiskThreads(2), *(threading.Event() for _ in range(3))
    begun = []

    class Clock:  # what a thread does once it has answered
        sleep = time.sleep

        @staticmethod
        def monotonic():
            on_disk = threading.current_thread().name == "holdfast-disk"
            if on_disk and not begun:
                begun.append(True)
                disk.run_all([1], lambda _: inside.set(), lambda *_: go_on.wait(30))
                ended.set()
            return time.monotonic()

    monkeypatch.setattr(_disk_threads, "time", Clock)
    disk.run_all([0], lambda n: n, lambda *_: inside.wait(30))
    go_on.set()
    assert ended.wait(30)


def test_garbage_that_reads_on_the_only_thread_that_is_to_be_had_reads_by_itself(monkeypatch):
    disk, start, begun, read = DiskThreads(2), threading.Thread.start, [], []

    def scarce(thread):
        if thread.name == "holdfast-disk":
            begun.append(thread)
            if len(begun) > 1:
                raise RuntimeError("can't start new thread")
        start(thread)

    def ask(number):
        disk.run_all([number], lambda n: n, lambda n, _: read.append(n))
        return number

    monkeypatch.setattr(threading.Thread, "start", scarce)
    disk.run_all([1, 2, 3], ask, lambda *_: None)
    assert read == [1, 2, 3]


_LATE = """
import os
from holdfast.storage._disk_threads import DiskThreads

class Late:
    def __init__(self):
        self.disk, self.write = DiskThreads(2), os.write

    def __del__(self):
        self.disk.run_all(range(2), lambda n: n, lambda n, _: self.write(1, b"read"))

late = Late()
"""


def test_what_reads_while_the_interpreter_exits_does_so_without_threads():
    ran = subprocess.run(
        [sys.executable, "-c", _LATE], capture_output=True, timeout=60, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"readread", b"")


def test_an_error_does_not_keep_what_was_read():
    """Neither it nor its frames are in a circle that only the collector of garbage would break."""

    class Memory:
        pass

    kept = []

    def ask(item):
        memory = Memory()
        kept.append(weakref.ref(memory))
        if item:
            raise ZeroDivisionError
        return memory

    def run():
        with pytest.raises(ZeroDivisionError):
            DiskThreads(1).run_all(range(3), ask, lambda *_: None)

    gc.disable()
    try:
        run()
        assert {memory() for memory in kept} == {None}
    finally:
        gc.enable()
