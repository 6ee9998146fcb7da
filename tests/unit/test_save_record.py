"""What a save took: how it is counted, told, logged and handed on."""

import concurrent.futures
import logging
import pickle
import threading

import pytest

import holdfast
from holdfast.distributed._save_record import SaveRecord, Timings, log_record, tell_of_save
from holdfast.distributed._timed import timed
from holdfast.errors import NoSpaceError, RankFailedError
from holdfast.storage import LocalStorage, MemoryStorage
from holdfast.testing import FakeClock, Fault, FaultyStorage

GIB = 2**30


def record_of(timings, **facts):
    given = {
        "prefix": "step_100",
        "step": 100,
        "rank": 0,
        "world_size": 1,
        "is_async": True,
        "state_bytes": GIB,
        "written_bytes": GIB,
    }
    return timings.record(**(given | facts))


def after(seconds=2.5, stall_s=0.012, **facts):
    """The record of a save that took that long."""
    clock = FakeClock()
    timings = Timings(clock=clock)
    timings.add("stall", stall_s)
    clock.advance(seconds)
    return record_of(timings, **facts)


# ---- counting


def test_the_seconds_of_each_part_are_added_up():
    clock = FakeClock(start=50)
    timings = Timings(clock=clock)
    parts = ("stall", "copy", "agree", "begin", "write", "fsync", "commit")
    for turn in (1, 2):
        for nth, part in enumerate(parts):
            with timings.measure(part):
                clock.advance(turn * 2**nth)
    found = record_of(timings)
    assert [getattr(found, f"{part}_s") for part in parts] == [3, 6, 12, 24, 48, 96, 192]
    assert found.total_s == 381
    assert timings.elapsed_s() == 381
    assert timings.seconds("copy") == 6


def test_what_was_not_measured_took_no_time():
    assert record_of(Timings(clock=FakeClock())).commit_s == 0


def test_a_part_that_fails_is_counted_too():
    clock = FakeClock()
    timings = Timings(clock=clock)
    with pytest.raises(OSError, match="disk"), timings.measure("write"):
        clock.advance(3)
        raise OSError("disk")
    assert timings.seconds("write") == 3


def test_no_second_of_many_threads_is_lost():
    timings = Timings(clock=FakeClock())
    ready = threading.Barrier(16)

    def work():
        ready.wait(30)
        for _ in range(1000):
            timings.add("copy", 1)

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert timings.seconds("copy") == 16_000


def test_a_save_that_is_waited_for_holds_the_training_up_all_the_time():
    assert after(2.5, is_async=False).stall_s == 2.5
    assert after(2.5, is_async=True).stall_s == 0.012


def test_a_record_knows_its_speed():
    assert after(2.0).bytes_per_s == GIB / 2
    assert after(0).bytes_per_s == 0


def test_a_record_is_a_value():
    assert after() == after()
    assert pickle.loads(pickle.dumps(after())) == after()
    assert holdfast.SaveRecord is SaveRecord


# ---- in words


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({}, "saved step_100 (step 100): 1 GiB in 2.50 s, 0.40 GiB/s; training waited 0.012 s"),
        ({"step": None}, "saved step_100: 1 GiB in 2.50 s, 0.40 GiB/s; training waited 0.012 s"),
        (
            {"rank": 1, "world_size": 4, "predicted_stall_s": 0.5},
            (
                "saved step_100 (step 100, rank 1 of 4): 1 GiB in 2.50 s, 0.40 GiB/s; training "
                "waited 0.012 s, 0.500 s were predicted"
            ),
        ),
        (
            {"written_bytes": 12 * 2**20, "referred_bytes": GIB},
            (
                "saved step_100 (step 100): 12 MiB beside 1 GiB unchanged in 2.50 s, 0.00 GiB/s; "
                "training waited 0.012 s"
            ),
        ),
        (
            {"error": NoSpaceError("the disk\nis full", path="a/b")},
            (
                "the save of step_100 (step 100) failed after 2.50 s: NoSpaceError: the disk is "
                "full [path a/b]; training waited 0.012 s"
            ),
        ),
        (
            {"error": OSError(), "prefix": None, "step": None},
            "the save failed after 2.50 s: OSError; training waited 0.012 s",
        ),
        (
            {"error": concurrent.futures.CancelledError(), "prefix": None},
            "the save of step 100 was cancelled after 2.50 s; training waited 0.012 s",
        ),
    ],
)
def test_a_record_is_a_line(facts, words):
    assert str(after(**facts)) == words


def test_an_error_is_told_without_its_notes_and_whatever_its_methods_do():
    class HostileError(Exception):
        def __str__(self):
            raise ValueError("no")

    error = NoSpaceError("full")
    error.add_note("On rank 3:\nTraceback ...")
    assert after(error=error).error == "NoSpaceError: full"
    assert after(error=HostileError()).error.startswith("HostileError: ")


# ---- logged and handed on


@pytest.mark.parametrize(
    ("facts", "level"),
    [
        ({}, logging.INFO),
        ({"error": NoSpaceError("full")}, logging.ERROR),
        ({"error": concurrent.futures.CancelledError()}, logging.INFO),
        ({"error": RankFailedError("told to stop", error_type="CancelledError")}, logging.INFO),
        ({"error": RankFailedError("disk", error_type="OSError")}, logging.ERROR),
        ({"error": NoSpaceError("full"), "is_async": False}, logging.INFO),
    ],
)
def test_a_failure_that_nobody_may_have_seen_is_an_error(facts, level, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    found = after(**facts)
    log_record(found)
    assert caplog.record_tuples == [("holdfast.distributed", level, str(found))]
    assert capfd.readouterr() == ("", "")


def test_a_callback_is_given_the_record():
    told = []
    tell_of_save(told.append, after())
    tell_of_save(None, after())
    assert told == [after()]


def test_a_callback_that_fails_is_logged_and_fails_nothing(caplog):
    def upload(record):
        raise ConnectionError("no network")

    tell_of_save(upload, after())
    (message,) = caplog.records
    assert (message.name, message.levelno) == ("holdfast.distributed", logging.ERROR)
    assert "upload" in message.getMessage()
    assert str(after()) in message.getMessage()
    assert isinstance(message.exc_info[1], ConnectionError)


def test_a_callback_can_end_the_program_but_not_a_save_in_the_background(caplog):
    def leave(record):
        raise SystemExit(1)

    with pytest.raises(SystemExit):
        tell_of_save(leave, after(is_async=False))
    assert caplog.records == []
    tell_of_save(leave, after(is_async=True))
    assert len(caplog.records) == 1


# ---- the time to make files durable


def slow(clock, **at_the_end):
    """Writing takes 1 s and finishing 10 s, twice."""
    faults = [Fault("write_at", nth, delay_s=1) for nth in (1, 2)]
    faults += [Fault("finish", nth, delay_s=10, **at_the_end) for nth in (1, 2)]
    return FaultyStorage(MemoryStorage(), faults, clock=clock)


def put(storage, key, data):
    with storage.open_writer(key, size_bytes=len(data)) as writer:
        writer.write_at(0, data)
        return writer.finish()


def test_only_the_end_of_a_file_is_counted():
    clock = FakeClock()
    timings = Timings(clock=clock)
    storage = timed(slow(clock), timings)
    with timings.measure("write"):
        for key in ("a", "b"):
            put(storage, key, b"123")
    assert (timings.seconds("write"), timings.seconds("fsync")) == (22, 20)
    assert storage.read("b") == b"123"


def test_an_end_that_fails_is_counted_and_leaves_nothing():
    clock = FakeClock()
    timings = Timings(clock=clock)
    storage = timed(slow(clock, error=NoSpaceError("full")), timings)
    with pytest.raises(NoSpaceError, match="full"):
        put(storage, "a", b"123")
    assert timings.seconds("fsync") == 10
    assert list(storage.list()) == []


def test_what_is_written_through_is_what_is_stored(tmp_path):
    timings = Timings()
    storage = timed(LocalStorage(tmp_path), timings)
    info = put(storage, "folder/file", b"x" * 100_000)
    assert (tmp_path / "folder" / "file").read_bytes() == b"x" * 100_000
    assert info == storage.stat("folder/file")
    assert storage.url == LocalStorage(tmp_path).url
    assert timings.seconds("fsync") > 0
