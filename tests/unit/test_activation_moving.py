"""Moving tensors to the disk and back: memory is really free, nothing is lost when the disk fails,
and everything ends."""

import contextlib
import errno
import gc
import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from activation_tier_tools import SIZE, WAIT_S, Bench, bits, some

from holdfast.activation._keeping.manager import CheckpointManager
from holdfast.errors import ClosedError, CorruptedError, RecomputationError


@pytest.fixture
def benches(tmp_path):
    """Makes tiers, and closes them in the end."""
    with contextlib.ExitStack() as stack:

        def make(disk=None, **limits):
            bench = Bench(tmp_path, disk, **limits)
            stack.callback(bench.close)
            return bench

        yield make


@pytest.fixture
def bench(benches):
    return benches()


@pytest.fixture
def no_gc():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(params=["inplace", "disk"])
def manager(request, tmp_path):
    folder = tmp_path if request.param == "disk" else None
    with CheckpointManager(request.param, folder=folder) as manager:
        yield manager


# Memory


def test_memory_is_free_as_soon_as_it_is_written(bench, no_gc):
    tensor = some()
    storage = weakref.ref(tensor.untyped_storage())
    held = bench.hold(tensor)
    del tensor
    bench.wait_for("moved", 1)
    assert storage() is None
    assert bench.account.current == 0
    assert bench.account.moved == held.size_bytes == SIZE


def test_dropping_frees_memory_at_once_and_room_at_the_next_use(bench, no_gc):
    bench.disk.may_write.clear()
    first = bench.hold(some())
    assert bench.disk.writing.wait(WAIT_S)
    tensor = some()
    waiting = weakref.ref(tensor.untyped_storage())
    held = bench.hold(tensor)
    del tensor
    assert waiting() is not None
    del held
    assert waiting() is None
    bench.disk.may_write.set()
    bench.wait_for("moved", 1)
    del first
    bench.tidy()
    assert (bench.account.current, bench.account.moved) == (0, 0)


def test_ten_thousand_abandoned_leave_memory_and_file_as_they_were(bench, no_gc):
    size = 128 * 1024
    for i in range(200):
        bench.hold(some(size, seed=i % 7))
    storages, file = [], bench.file_bytes()
    for i in range(10_000):
        tensor = torch.full((size,), i % 100, dtype=torch.uint8)
        storages.append(weakref.ref(tensor.untyped_storage()))
        bench.hold(tensor)
    del tensor
    (last,) = bench.hold_moved(some())  # after which the writer has let go of those before
    assert sum(storage() is not None for storage in storages) == 0
    assert bench.file_bytes() - file <= 16 * size
    assert len(bench.tier._index) == len(bench.tier._ahead.living()) == 1
    assert (bench.account.current, bench.account.moved) == (0, last.size_bytes)


def test_ten_thousand_abandoned_in_place_leave_nothing(no_gc):
    with CheckpointManager() as manager:
        for _ in range(10_000):
            manager.hold(torch.empty(1000))
        assert manager.get_memory_stats().current_memory_used == 0
        assert manager._tier._footprints == {}


def test_step_after_step_the_file_stays_as_large_as_one_step(bench):
    sizes = [SIZE, 3 * SIZE, SIZE // 2 + 5, SIZE]
    ends = []
    for step in range(4):
        tensors = [some(size, seed=step) for size in sizes]
        held = bench.hold_moved(*tensors)
        ends.append(bench.file_bytes())
        while held:
            assert torch.equal(held.pop().get(), tensors.pop())
    assert ends == ends[:1] * 4


def test_whoever_holds_more_than_the_disk_takes_waits_for_it(benches):
    bench = benches(backlog_bytes=4 * SIZE)
    held = [bench.hold(some(seed=i)) for i in range(40)]
    bench.wait_for("moved", 40)
    assert bench.account.peak <= 4 * SIZE
    assert all(torch.equal(each.get(), some(seed=i)) for i, each in enumerate(held))


def test_a_tensor_larger_than_the_limit_is_held_alone(benches):
    bench = benches(backlog_bytes=SIZE)
    tensor = some(5 * SIZE)
    first, second = bench.hold(some()), bench.hold(tensor)
    bench.wait_for("moved", 2)
    assert torch.equal(second.get(), tensor)
    assert torch.equal(first.get(), some())


def test_what_waits_and_is_dropped_makes_room_for_who_waits(benches):
    bench = benches(backlog_bytes=2 * SIZE)
    bench.disk.may_write.clear()
    held = [bench.hold(some()), bench.hold(some())]
    assert bench.disk.writing.wait(WAIT_S)
    waiter = threading.Thread(target=lambda: held.append(bench.hold(some(seed=5))))
    waiter.start()
    del held[1]
    bench.disk.may_write.set()
    waiter.join(WAIT_S)
    assert not waiter.is_alive()
    assert torch.equal(held[-1].get(), some(seed=5))


# On the way there


def test_what_is_asked_for_while_it_waits_comes_from_memory_and_is_not_written(bench):
    bench.disk.may_write.clear()
    first = bench.hold(some(), "first")
    assert bench.disk.writing.wait(WAIT_S)
    tensors = [some(seed=1), some(seed=2)]
    held = [bench.hold(tensors[0], "asked"), bench.hold(tensors[1], "last")]
    assert held[0].get().data_ptr() == tensors[0].data_ptr()
    bench.disk.may_write.set()
    bench.wait_for("moved", 2)
    assert bench.layers("moved") == ["first", "last"]
    assert torch.equal(held[0].get(), tensors[0])
    assert first.size_bytes == SIZE
    assert bench.disk.reads == []


def test_what_is_asked_for_while_it_is_written_is_given_up_half_way(bench):
    tensor = some(20 * 1024 * 1024)
    bench.disk.may_write.clear()
    held = bench.hold(tensor, "large")
    assert bench.disk.writing.wait(WAIT_S)
    assert held.get().data_ptr() == tensor.data_ptr()
    bench.disk.may_write.set()
    (small,) = bench.hold_moved(some())
    assert bench.layers("moved") == ["layer 0"]
    assert torch.equal(held.get(), tensor)
    assert torch.equal(small.get(), some())
    del held
    bench.tidy()
    assert bench.account.current == 0


def test_what_is_registered_is_moved_although_it_was_asked_for(bench):
    bench.disk.may_write.clear()
    tensor = some()
    held = bench.hold(tensor, lasting=True)
    assert torch.equal(held.get(), tensor)
    bench.disk.may_write.set()
    bench.wait_for("moved", 1)
    assert torch.equal(held.get(), tensor)


# On the way back


def moved_six(bench):
    tensors = [some(seed=i) for i in range(6)]
    return bench.hold_moved(*tensors), tensors


def test_what_was_held_before_is_read_before_it_is_asked_for(benches):
    bench = benches(window_bytes=3 * SIZE)
    held, tensors = moved_six(bench)
    for i in (5, 4, 3, 2, 1, 0):
        assert torch.equal(held.pop().get(), tensors[i])
        for _ in range({5: 4, 4: 1, 3: 1}.get(i, 0)):
            assert bench.disk.read_done.acquire(timeout=WAIT_S)
    by_hand = [offset for thread, offset in bench.disk.reads if thread == threading.get_ident()]
    assert len(by_hand) <= 1 + 3  # a request may be done before its outcome is put
    assert len({offset for _, offset in bench.disk.reads}) == len(bench.disk.reads) == 6


def test_no_more_is_read_ahead_than_the_window_holds(benches):
    bench = benches(window_bytes=2 * SIZE + SIZE // 2)
    held, tensors = moved_six(bench)
    bench.account.reset_peak()
    assert torch.equal(held[5].get(), tensors[5])
    for _ in range(3):
        assert bench.disk.read_done.acquire(timeout=WAIT_S)
    while held:
        assert torch.equal(held.pop().get(), tensors[len(held)])
    assert SIZE <= bench.account.peak <= 2 * SIZE


def test_one_tensor_is_read_ahead_even_if_it_is_larger_than_the_window(benches):
    bench = benches(window_bytes=SIZE // 2)
    held, tensors = moved_six(bench)
    assert torch.equal(held[3].get(), tensors[3])
    for _ in range(2):
        assert bench.disk.read_done.acquire(timeout=WAIT_S)
    assert torch.equal(held[2].get(), tensors[2])
    assert len({offset for _, offset in bench.disk.reads}) == len(bench.disk.reads)


def test_who_asks_for_what_is_being_read_waits_for_it(benches):
    bench = benches()
    held, tensors = moved_six(bench)
    bench.disk.may_read.clear()
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(held[5].get())),
        threading.Thread(target=lambda: found.append(held[4].get())),
    ]
    threads[0].start()
    assert bench.disk.reading.wait(WAIT_S)
    threads[1].start()
    bench.disk.may_read.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert sorted(map(bits, found)) == sorted(map(bits, tensors[4:]))
    for _ in range(6):
        assert bench.disk.read_done.acquire(timeout=WAIT_S)
    assert len({offset for _, offset in bench.disk.reads}) == len(bench.disk.reads) == 6


def test_what_was_read_ahead_and_is_dropped_is_free(benches, no_gc):
    bench = benches()
    held, _ = moved_six(bench)
    held[5].get()
    for _ in range(6):
        assert bench.disk.read_done.acquire(timeout=WAIT_S)
    held.clear()
    bench.close()  # the reader has let go of all
    bench.tidy()
    assert (bench.account.current, bench.account.moved) == (0, 0)


def test_bytes_that_many_share_are_read_once(bench):
    tensor = some()
    bench.disk.may_write.clear()
    held = [bench.hold(tensor) for _ in range(3)]  # as by the projections to queries, keys, values
    bench.disk.may_write.set()
    bench.wait_for("moved", 1)
    for each in reversed(held):
        assert torch.equal(each.get(), tensor)
    assert len(bench.disk.reads) == 1
    assert bench.account.current == 0


def test_another_order_than_the_reverse_is_right_too(benches):
    bench = benches(window_bytes=2 * SIZE)
    held, tensors = moved_six(bench)
    for i in (0, 3, 1, 5, 2, 4, 0, 5):
        assert torch.equal(held[i].get(), tensors[i])


# What fails


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_what_the_disk_does_not_take_stays_in_memory_and_is_told_once(benches, caplog, code):
    bench = benches()
    bench.disk.write_error = code
    tensors = [some(seed=i) for i in range(3)]
    held = [bench.hold(tensor, f"layer {i}") for i, tensor in enumerate(tensors)]
    bench.wait_for("fell_back", 3)
    assert bench.layers("fell_back") == ["layer 0", "layer 1", "layer 2"]
    assert all(torch.equal(each.get(), tensor) for each, tensor in zip(held, tensors, strict=True))
    warned = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == 1
    assert os.strerror(code) in warned[0].getMessage()
    assert bench.account.current == 3 * SIZE
    held.clear()
    bench.tidy()
    assert bench.account.current == 0

    bench.disk.write_error = None
    (later,) = bench.hold_moved(tensors[0])
    assert torch.equal(later.get(), tensors[0])


def test_after_it_was_full_the_disk_is_tried_again_when_something_was_freed(benches):
    bench = benches()
    (first,) = bench.hold_moved(some())
    bench.disk.write_error = errno.ENOSPC
    second = bench.hold(some(seed=1))
    bench.wait_for("fell_back", 1)
    bench.disk.write_error = None
    third = bench.hold(some(seed=2))
    bench.wait_for("fell_back", 2)
    del first
    (fourth,) = bench.hold_moved(some(seed=3))
    for held, seed in ((second, 1), (third, 2), (fourth, 3)):
        assert torch.equal(held.get(), some(seed=seed))


def test_what_was_written_of_what_did_not_fit_is_given_back_to_the_disk(bench):
    (first,) = bench.hold_moved(some())
    bench.disk.write_error, bench.disk.writes_before_error = errno.ENOSPC, 2
    tensor = some(20 * 1024 * 1024)
    held = bench.hold(tensor)
    bench.wait_for("fell_back", 1)
    assert bench.file_bytes() == SIZE
    assert torch.equal(held.get(), tensor)
    assert torch.equal(first.get(), some())


def too_large_for(bench, error=errno.EIO):
    """Hold what the disk takes only a part of."""
    bench.disk.write_error, bench.disk.writes_before_error = error, 1
    return bench.hold(some(10 * 1024 * 1024))


def test_a_disk_that_cannot_even_be_cut_short_keeps_nobody_waiting(benches, caplog):
    bench = benches(backlog_bytes=SIZE)
    bench.disk.truncate_error = errno.EIO
    tensors, held = [some(seed=i) for i in range(4)], []

    def hold():
        held.append(too_large_for(bench))
        held.extend(map(bench.hold, tensors))  # each waits for the one before

    threading.Thread(target=hold, daemon=True).start()
    bench.wait_for("fell_back", 5)
    for each, tensor in zip(held[1:], tensors, strict=True):
        assert torch.equal(each.get(), tensor)
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 2
    assert all(os.strerror(errno.EIO) in each for each in warned)

    bench.disk.write_error = bench.disk.truncate_error = None
    (later,) = bench.hold_moved(some(seed=9))
    assert torch.equal(later.get(), some(seed=9))


def test_nobody_waits_for_a_file_that_is_cut_short(bench):
    first, second = bench.hold_moved(some(), some(seed=1))
    bench.disk.may_truncate.clear()
    large = too_large_for(bench)
    assert bench.disk.truncating.wait(WAIT_S)
    assert torch.equal(first.get(), some())
    del first
    bench.tidy()
    bench.tier.trim()
    third = bench.hold(some(seed=2))
    assert torch.equal(third.get(), some(seed=2))
    bench.disk.may_truncate.set()
    bench.wait_for("fell_back", 1)
    assert torch.equal(second.get(), some(seed=1))
    assert torch.equal(large.get(), some(10 * 1024 * 1024))


@pytest.fixture
def with_free_end(bench):
    """A tier whose file is longer than what is in it, and two that are in it."""
    first, second, last = bench.hold_moved(some(), some(seed=1), some(seed=2))
    del first
    bench.tidy()
    (again,) = bench.hold_moved(some(seed=3))  # in its place, and the writer is past the last
    del last
    bench.tidy()
    assert bench.file_bytes() == 3 * SIZE
    return bench, (again, second)


def test_nothing_is_written_while_the_file_is_cut_short(with_free_end):
    bench, (again, second) = with_free_end
    bench.disk.may_truncate.clear()
    bench.disk.writing.clear()
    cutting = threading.Thread(target=bench.tier.trim)
    cutting.start()
    assert bench.disk.truncating.wait(WAIT_S)
    held = bench.hold(some(seed=4), lasting=True)  # it would get the room that is being cut off
    assert not bench.disk.writing.wait(0.1)
    bench.disk.may_truncate.set()
    bench.wait_for("moved", 5)
    cutting.join(WAIT_S)
    for each, seed in ((held, 4), (again, 3), (second, 1)):
        assert torch.equal(each.get(), some(seed=seed))


def test_closing_waits_for_a_file_that_is_cut_short(with_free_end):
    bench, _ = with_free_end
    bench.disk.may_truncate.clear()
    cutting, closing = (threading.Thread(target=f) for f in (bench.tier.trim, bench.tier.close))
    cutting.start()
    assert bench.disk.truncating.wait(WAIT_S)
    closing.start()
    bench.tier._workers.join()
    closing.join(0.1)
    assert closing.is_alive()
    bench.disk.may_truncate.set()
    for thread in (cutting, closing):
        thread.join(WAIT_S)
        assert not thread.is_alive()
    bench.tier.trim()  # of a file that is gone: nothing happens


def test_room_that_the_disk_does_not_take_back_is_logged_and_used_again(with_free_end, caplog):
    bench, (again, second) = with_free_end
    bench.disk.truncate_error = errno.EIO
    bench.tier.trim()
    bench.tier.trim()
    assert [os.strerror(errno.EIO) in each.getMessage() for each in caplog.records] == [True]
    (held,) = bench.hold_moved(some(seed=4))
    assert bench.file_bytes() == 3 * SIZE
    for each, seed in ((held, 4), (again, 3), (second, 1)):
        assert torch.equal(each.get(), some(seed=seed))


def test_a_subscriber_that_ends_its_thread_does_not_end_the_writer(bench, caplog):
    def leave(event):
        if event.kind == "moved":
            sys.exit("on purpose")

    bench.subscribers.add(leave)
    held = bench.hold_moved(some(), some(seed=1))
    assert torch.equal(held[1].get(), some(seed=1))
    assert "goes on" in caplog.text


@pytest.fixture
def small_disk(tmp_path):
    """A filesystem of a few megabytes on a real block device."""
    image, folder = tmp_path / "image", tmp_path / "small"
    folder.mkdir()
    image.write_bytes(bytes(16 * 1024 * 1024))
    commands = [["mkfs.ext4", "-q", "-m", "0", image], ["mount", "-o", "loop", image, folder]]
    for command in commands:
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=30)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("mounting a filesystem takes root and loop devices")
    yield folder
    subprocess.run(["umount", folder], check=True, timeout=30)


def test_a_disk_that_is_really_full(small_disk, caplog):
    tensors = [some(1024 * 1024, seed=i) for i in range(24)]
    told = threading.Semaphore(0)
    kinds = []

    def hear(event):
        if event.kind in {"moved", "fell_back"}:
            kinds.append(event.kind)
            told.release()

    with CheckpointManager("disk", folder=small_disk) as manager:
        manager.on_event(hear)
        held = [manager.hold(tensor, f"layer {i}") for i, tensor in enumerate(tensors)]
        for _ in tensors:
            assert told.acquire(timeout=WAIT_S)
        assert kinds.count("moved") > 3
        assert kinds.count("fell_back") > 3
        stats = manager.get_memory_stats()
        assert stats.current_memory_used == kinds.count("fell_back") * 1024 * 1024
        for each, tensor in zip(reversed(held), reversed(tensors), strict=True):
            assert torch.equal(each.get(), tensor)
        held.clear()
        kinds.clear()
        again = manager.hold(some(seed=99))
        assert told.acquire(timeout=WAIT_S)
        assert kinds == ["moved"]
        assert torch.equal(again.get(), some(seed=99))
    assert sum("stay in memory" in record.getMessage() for record in caplog.records) == 1
    os.sync()
    free = os.statvfs(small_disk)
    assert free.f_bavail * free.f_frsize > 8 * 1024 * 1024  # the file is gone


def run_python(source, **options):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(source)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        **options,
    )


def test_a_limit_on_the_size_of_files_is_a_full_disk(tmp_path):
    done = run_python(
        """
        import logging, resource, threading
        import torch
        from holdfast.activation._keeping.manager import CheckpointManager

        logging.basicConfig()
        MIB = 1024 * 1024
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 * MIB, 3 * MIB))
        kinds, told = [], threading.Semaphore(0)
        with CheckpointManager("disk", folder=FOLDER) as manager:
            manager.on_event(lambda event: (kinds.append(event.kind), told.release()))
            tensors = [torch.full((MIB,), i, dtype=torch.uint8) for i in range(6)]
            held = [manager.hold(tensor) for tensor in tensors]
            for _ in held:
                assert told.acquire(timeout=60)
            assert kinds == ["moved"] * 3 + ["fell_back"] * 3, kinds
            for each, tensor in zip(held, tensors):
                assert torch.equal(each.get(), tensor)
        """.replace("FOLDER", repr(str(tmp_path)))
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("stay in memory") == 1


def test_what_cannot_be_read_is_an_error_with_its_cause_and_only_for_that_one(benches):
    bench = benches()
    first, second = bench.hold_moved(some(seed=1), some(seed=2))
    bench.disk.read_error = errno.EIO
    with pytest.raises(RecomputationError, match=r"'layer 1' cannot be read back.*Input") as caught:
        second.get()
    assert caught.value.layer_id == "layer 1"
    assert isinstance(caught.value.__cause__, OSError)
    bench.disk.read_error = None
    assert torch.equal(second.get(), some(seed=2))
    assert torch.equal(first.get(), some(seed=1))


def test_a_file_that_was_cut_short_is_an_error(bench):
    (held,) = bench.hold_moved(some())
    os.truncate(f"/proc/self/fd/{bench.file._fd}", SIZE // 2)
    with pytest.raises(RecomputationError, match="cannot be read back") as caught:
        held.get()
    assert isinstance(caught.value.__cause__, OSError)


def test_a_byte_that_changed_on_the_disk_is_an_error(bench):
    (held,) = bench.hold_moved(some())
    with Path(f"/proc/self/fd/{bench.file._fd}").open("r+b", buffering=0) as file:
        file.seek(SIZE // 2)
        (byte,) = file.read(1)
        file.seek(SIZE // 2)
        file.write(bytes([byte ^ 1]))
        os.fsync(file.fileno())
    with pytest.raises(RecomputationError, match="cannot be read back") as caught:
        held.get()
    assert isinstance(caught.value.__cause__, CorruptedError)


# The end


def threads_of_tiers():
    return [thread for thread in threading.enumerate() if thread.name == "holdfast-tier"]


def files_open():
    return sum(
        "holdfast-scratch" in str(link.readlink())
        for link in Path("/proc/self/fd").iterdir()
        if link.is_symlink()  # the one that lists them is gone
    )


def test_closing_ends_the_threads_and_the_file_and_frees_the_memory(bench, no_gc):
    tensor = some()
    storage = weakref.ref(tensor.untyped_storage())
    bench.hold_moved(some(seed=1))
    bench.disk.may_write.clear()
    held = bench.hold(tensor)
    del tensor
    bench.disk.may_write.set()
    bench.tier.close()
    bench.tier.close()
    assert threads_of_tiers() == []
    assert files_open() == 0
    assert storage() is None
    with pytest.raises(ClosedError, match="closed"):
        held.get()
    with pytest.raises(ClosedError, match="closed"):
        bench.hold(some())
    with pytest.raises(ClosedError, match="closed"):
        bench.hold(torch.ones(3))


def test_closing_wakes_who_waits(benches):
    bench = benches(backlog_bytes=SIZE)
    bench.disk.may_write.clear()
    first = bench.hold(some())
    assert bench.disk.writing.wait(WAIT_S)
    errors = []

    def hold():
        try:
            bench.hold(some())
        except ClosedError as error:
            errors.append(error)

    waiter = threading.Thread(target=hold)
    waiter.start()
    closer = threading.Thread(target=bench.tier.close)
    closer.start()
    waiter.join(WAIT_S)
    assert len(errors) == 1
    bench.disk.may_write.set()
    closer.join(WAIT_S)
    with pytest.raises(ClosedError):
        first.get()


def test_closing_waits_for_who_is_reading(bench):
    held, tensors = moved_six(bench)
    bench.disk.may_read.clear()
    found = []
    reader = threading.Thread(target=lambda: found.append(held[0].get()))
    reader.start()
    assert bench.disk.reading.wait(WAIT_S)
    closer = threading.Thread(target=bench.tier.close)
    closer.start()
    while not bench.tier.closed:
        os.sched_yield()
    bench.disk.may_read.set()
    reader.join(WAIT_S)
    closer.join(WAIT_S)
    assert torch.equal(found[0], tensors[0])
    assert files_open() == 0


def test_a_subscriber_may_hold_and_close(benches):
    bench = benches(backlog_bytes=SIZE)
    kept = []

    def hear(event):
        if event.layer_id == "first":
            kept.extend(bench.hold(some(seed=i)) for i in range(3))
        else:
            bench.tier.close()
            closed.set()

    closed = threading.Event()
    bench.subscribers.add(hear)
    first = bench.hold(some(), "first")
    assert closed.wait(WAIT_S)
    with pytest.raises(ClosedError):
        first.get()


def test_a_manager_that_nobody_knows_any_more_ends_with_what_it_holds(tmp_path, no_gc):
    manager = CheckpointManager("disk", folder=tmp_path)
    moved = threading.Event()
    manager.on_event(lambda event: moved.set())
    held = manager.hold(some())
    assert moved.wait(WAIT_S)
    threads = threads_of_tiers()
    assert len(threads) == 2
    del manager
    assert torch.equal(held.get(), some())
    del held
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert files_open() == 0


def test_the_interpreter_ends_although_a_manager_was_forgotten(tmp_path):
    done = run_python(
        """
        import torch
        from holdfast.activation._keeping.manager import CheckpointManager

        manager = CheckpointManager("disk", folder=FOLDER)
        held = [manager.hold(torch.ones(1 << 20)) for _ in range(20)]
        held[3].get()
        print("end")
        """.replace("FOLDER", repr(str(tmp_path)))
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_a_forked_process_holds_in_memory_and_reads_what_was_moved(tmp_path):
    done = run_python(
        """
        import os, threading
        import torch
        from holdfast.activation._keeping.manager import CheckpointManager

        torch.set_num_threads(1)  # a forked process has no threads for OpenMP either
        manager = CheckpointManager("disk", folder=FOLDER)
        moved = threading.Event()
        manager.on_event(lambda event: moved.set())
        held = manager.hold(torch.arange(1 << 16))
        assert moved.wait(60)
        child = os.fork()
        if child == 0:
            own = [manager.hold(torch.ones(1 << 20)) for _ in range(100)]  # none would be written
            ok = own[9].get().sum() == 1 << 20 and held.get()[-1] == (1 << 16) - 1
            del held
            manager.clear_checkpoints()  # which must not cut the parent's file
            os._exit(0 if ok else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert held.get()[-1] == (1 << 16) - 1
        """.replace("FOLDER", repr(str(tmp_path)))
    )
    assert done.returncode == 0, done.stderr


# All together


def test_many_threads_hold_ask_and_drop_and_each_gets_its_own(benches):
    bench = benches(backlog_bytes=6 * SIZE, window_bytes=3 * SIZE)
    errors = []

    def work(number):
        try:
            generator = torch.Generator().manual_seed(number)
            held = []
            for step in range(60):
                value = number * 1000 + step
                tensor = torch.full((SIZE // 8,), value)
                held.append((bench.hold(tensor), bench.hold(tensor[8:]), value))
                del tensor
                while len(held) > int(torch.randint(1, 8, (), generator=generator)):
                    whole, part, value = held.pop()
                    if step % 3:
                        assert (part.get() == value).all()
                    if step % 5:
                        assert (whole.get() == value).all()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert errors == []
    bench.close()
    bench.tidy()
    assert (bench.account.current, bench.account.moved) == (0, 0)
    assert bench.tier._store._extents.end == 0


def test_gradients_of_tensors_that_went_to_the_disk_are_bit_equal(manager, no_gc):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(
            layer
            for _ in range(4)
            for layer in (torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.LayerNorm(256))
        )
    )
    x = torch.randn(512, 256)

    def gradients(**kept):
        model.zero_grad()
        with (
            torch.autograd.graph.saved_tensors_hooks(
                lambda tensor: manager.hold(tensor, "saved"), lambda held: held.get()
            )
            if kept
            else contextlib.nullcontext()
        ):
            loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return [bits(parameter.grad) for parameter in model.parameters()]

    assert gradients(kept=True) == gradients()
    until = time.monotonic() + WAIT_S
    while (stats := manager.get_memory_stats()).current_memory_used or stats.moved_bytes:
        assert time.monotonic() < until, stats
        time.sleep(0.001)  # the thread that wrote the last may not have let go of it
