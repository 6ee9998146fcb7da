"""What the wrappers add: retries, deadlines, a breaker, a rate; and the faults that show it."""

import concurrent.futures
import contextlib
import logging
import subprocess
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.contracts import ReadRange
from holdfast.errors import (
    CircuitOpenError,
    ClosedError,
    NoSpaceError,
    ObjectChangedError,
    ObjectExistsError,
    ObjectNotFoundError,
    OperationTimeoutError,
    StorageError,
    TransientStorageError,
)
from holdfast.resilience import CircuitBreaker, CircuitState, RetryBudget, RetryPolicy
from holdfast.storage import MemoryStorage, breaking, deadlined, limited, retrying
from holdfast.testing import FakeClock, Fault, FaultyStorage, StorageCall, seeded_rng

SOON = 0.05
MIB = 1024 * 1024


def passing(*_):
    return TransientStorageError("slow down")


def patient(storage, **options):
    return retrying(storage, clock=FakeClock(), rng=seeded_rng(1), **options)


def put(storage, key, data):
    with storage.open_writer(key) as writer:
        writer.write_at(0, data)
        return writer.finish()


def into(start, size):
    return ReadRange(start=start, into=memoryview(bytearray(size)))


class Asked(MemoryStorage):
    """Notes of each range whether it was to be uncached."""

    def __init__(self):
        super().__init__()
        self.uncached = []

    def read_into(self, key, ranges):
        self.uncached += [wanted.uncached for wanted in ranges]
        super().read_into(key, ranges)


@pytest.mark.parametrize(
    "wrap",
    [
        patient,
        lambda storage: deadlined(storage, 60),
        lambda storage: limited(storage, read_bytes_per_s=2 * MIB, clock=FakeClock()),
        lambda storage: FaultyStorage(storage, faults=[Fault("read_into", flip_bit=0)]),
    ],
    ids=["retrying", "deadlined", "limited", "faulty"],
)
@pytest.mark.parametrize("uncached", [False, True])
def test_what_is_asked_of_the_storage_alone_reaches_it(wrap, uncached):
    asked = Asked()
    put(asked, "a", bytes(3 * MIB))
    wanted = ReadRange(start=0, into=memoryview(bytearray(3 * MIB)), uncached=uncached)
    wrap(asked).read_into("a", [wanted])
    assert set(asked.uncached) == {uncached}


class Stuck(MemoryStorage):
    """Methods named in ``stuck`` wait for ``go`` before they do anything."""

    def __init__(self, *stuck):
        super().__init__()
        self.stuck = set(stuck)
        self.go = threading.Event()
        self.hangs = threading.Event()
        self.aborted = threading.Event()

    def wait_in(self, name):
        if name in self.stuck:
            self.hangs.set()
            assert self.go.wait(60)

    def open_writer(self, key, *, size_bytes=None):
        self.wait_in("open_writer")
        return StuckWriter(self, super().open_writer(key, size_bytes=size_bytes))

    def create(self, key, data):
        self.wait_in("create")
        return super().create(key, data)

    def read(self, key):
        self.wait_in("read")
        return super().read(key)

    def read_into(self, key, ranges):
        self.wait_in("read_into")
        super().read_into(key, ranges)

    def list(self, prefix=""):
        for info in super().list(prefix):
            self.wait_in("list")
            yield info

    def delete(self, key, *, expected=None):
        self.wait_in("delete")
        super().delete(key, expected=expected)

    def free_bytes(self):
        self.wait_in("free_bytes")
        return super().free_bytes()


class StuckWriter:
    def __init__(self, storage, writer):
        self.storage = storage
        self.writer = writer

    def write_at(self, offset, data):
        self.storage.wait_in("write_at")
        self.writer.write_at(offset, data)

    def finish(self):
        self.storage.wait_in("finish")
        return self.writer.finish()

    def abort(self):
        self.storage.wait_in("abort")
        self.writer.abort()
        self.storage.aborted.set()


@contextlib.contextmanager
def late_only_where_it(hangs):
    """A deadline passes when the call hangs, and sets the event: neither before it has begun nor
    where it does not hang, however long the machine stands still."""

    def wait(outcomes, timeout_s):
        assert timeout_s == SOON
        while not all(outcome.done() for outcome in outcomes):
            if hangs.wait(0.001):
                hangs.clear()
                return

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(concurrent.futures, "wait", wait)
        yield


@pytest.mark.parametrize(
    "wrap",
    [retrying, breaking, limited, FaultyStorage, lambda storage: deadlined(storage, 1)],
)
def test_a_wrapper_says_where_the_storage_inside_is(wrap):
    storage = MemoryStorage()
    assert wrap(storage).url == storage.url
    with pytest.raises(ValueError, match="storage must be"):
        wrap("runs/a")


class TestRetrying:
    @pytest.mark.parametrize("when", ["before", "after"])
    @pytest.mark.parametrize(
        ("method", "use", "expected"),
        [
            ("read", lambda s: s.read("a"), b"abc"),
            ("read_into", lambda s: s.read_into("a", [into(0, 3)]), None),
            ("stat", lambda s: s.stat("a").size_bytes, 3),
            ("list", lambda s: [i.key for i in s.list()], ["a", "b"]),
            ("delete", lambda s: s.delete("a"), None),
            ("free_bytes", lambda s: s.free_bytes(), None),
            ("sweep", lambda s: s.sweep(0), 0),
            ("open_writer", lambda s: put(s, "c", b"x").size_bytes, 1),
        ],
    )
    def test_what_may_be_repeated_is(self, method, use, expected, when):
        faulty = FaultyStorage(MemoryStorage(), [Fault(method, n, passing(), when) for n in (1, 2)])
        faulty._inner.create("a", b"abc")
        faulty._inner.create("b", b"")
        assert use(patient(faulty)) == expected
        assert [call.method for call in faulty.calls].count(method) == 3
        assert faulty.unfired == ()

    def test_it_ends_as_the_policy_and_the_budget_say(self):
        faulty = FaultyStorage(MemoryStorage(), error_rate=1)
        faulty._inner.create("a", b"")
        with pytest.raises(TransientStorageError) as caught:
            patient(faulty, policy=RetryPolicy(max_retries=2)).read("a")
        assert len(faulty.calls) == 3
        assert "gave up after 3 attempts" in caught.value.__notes__[0]
        budget = RetryBudget(reserve=1)
        for storage in (patient(faulty, budget=budget), patient(faulty, budget=budget)):
            with pytest.raises(TransientStorageError):
                storage.stat("a")
        assert len(faulty.calls) == 3 + 2 + 1

    @pytest.mark.parametrize("error", [StorageError, ObjectNotFoundError, NoSpaceError, ValueError])
    def test_what_will_not_pass_is_raised_at_once(self, error):
        faulty = FaultyStorage(MemoryStorage(), [Fault("read", 1, error("no"))])
        with pytest.raises(error):
            patient(faulty).read("a")
        assert len(faulty.calls) == 1

    def test_a_create_that_worked_though_it_failed_has_succeeded(self):
        faulty = FaultyStorage(MemoryStorage(), [Fault("create", 1, passing(), "after")])
        info = patient(faulty).create("a", memoryview(bytearray(b"mine")).cast("B", (2, 2)))
        assert info == faulty.stat("a")
        assert faulty.read("a") == b"mine"

    def test_a_create_that_lost_to_others_is_refused(self):
        faulty = FaultyStorage(MemoryStorage(), [Fault("create", 1, passing())])
        faulty._inner.create("a", b"theirs")
        with pytest.raises(ObjectExistsError):
            patient(faulty).create("a", b"mine")
        assert faulty.read("a") == b"theirs"

    def test_a_create_that_never_failed_does_not_take_equal_bytes_for_its_own(self):
        faulty = FaultyStorage(MemoryStorage())
        faulty.create("a", b"same")
        with pytest.raises(ObjectExistsError):
            patient(faulty).create("a", b"same")
        assert [call.method for call in faulty.calls] == ["create", "create"]

    def test_a_replace_that_worked_though_it_failed_has_succeeded(self):
        faulty = FaultyStorage(
            MemoryStorage(),
            [Fault("replace", 1, passing(), "after"), Fault("stat", 1, passing())],
        )
        version = faulty.create("a", b"old").version
        info = patient(faulty).replace("a", b"new", version)
        assert info == faulty.stat("a")
        assert patient(faulty).replace("a", b"newer", info.version).size_bytes == 5
        assert faulty.unfired == ()

    def test_a_replace_that_lost_to_others_is_refused(self):
        faulty = FaultyStorage(MemoryStorage(), [Fault("replace", 1, passing())])
        version = faulty.create("a", b"old").version
        faulty._inner.replace("a", b"theirs", version)
        with pytest.raises(ObjectChangedError):
            patient(faulty).replace("a", b"mine", version)
        assert faulty.read("a") == b"theirs"

    @pytest.mark.parametrize("when", ["before", "after"])
    def test_a_version_is_deleted_though_the_answer_was_lost(self, when):
        faulty = FaultyStorage(MemoryStorage(), [Fault("delete", 1, passing(), when)])
        version = faulty.create("a", b"old").version
        patient(faulty).delete("a", expected=version)
        assert [call.method for call in faulty.calls] == ["create", "delete", "delete"]
        assert list(faulty.list()) == []

    def test_a_newer_object_is_not_deleted_by_another_attempt(self):
        class Overtaken(MemoryStorage):
            def delete(self, key, *, expected=None):
                super().delete(key, expected=expected)
                if not overtaken:
                    overtaken.append(self.create(key, b"newer"))
                    raise passing()

        overtaken = []
        storage = Overtaken()
        version = storage.create("a", b"old").version
        with pytest.raises(ObjectChangedError):
            patient(storage).delete("a", expected=version)
        assert overtaken == [storage.stat("a")]

    def test_an_object_that_changes_while_it_is_read_back_is_not_taken_for_ours(self):
        class Racing(FaultyStorage):
            def read(self, key):
                data = super().read(key)
                self._inner.replace(key, b"theirs", self._inner.stat(key).version)
                return data

        racing = Racing(MemoryStorage(), [Fault("create", 1, passing(), "after")])
        with pytest.raises(ObjectExistsError):
            patient(racing).create("a", b"mine")

    def test_an_object_deleted_before_it_is_read_back_is_a_refusal(self):
        class Racing(FaultyStorage):
            def stat(self, key):
                self._inner.delete(key)
                return super().stat(key)

        racing = Racing(MemoryStorage(), [Fault("create", 1, passing(), "after")])
        with pytest.raises(ObjectExistsError):
            patient(racing).create("a", b"mine")

    @settings(max_examples=50)
    @given(
        keys=st.sets(
            st.text("ab/", min_size=1, max_size=3).map(lambda t: f"k{t}k".replace("//", "")),
            max_size=12,
        ),
        failing=st.sets(st.integers(1, 40), max_size=10),
        data=st.data(),
    )
    def test_a_listing_goes_on_where_it_failed(self, keys, failing, data):
        faults = [
            Fault("next", n, passing(), data.draw(st.sampled_from(["before", "after"])))
            for n in failing
        ]
        faulty = FaultyStorage(MemoryStorage(), faults)
        for key in keys:
            faulty._inner.create(key, b"")
        storage = patient(faulty, policy=RetryPolicy(max_retries=10))
        assert [info.key for info in storage.list()] == sorted(keys)

    def test_a_long_listing_neither_repeats_nor_loses_an_entry(self):
        faulty = FaultyStorage(MemoryStorage(), [Fault("next", 2600, passing())])
        keys = [f"{n:05d}" for n in range(2500)]
        for key in keys:
            faulty._inner.create(key, b"")
        entries = patient(faulty).list()
        first = [next(entries).key for _ in range(2100)]
        faulty._faults.append(Fault("next", faulty._counts["next"] + 1, passing()))
        assert first + [info.key for info in entries] == keys

    def test_a_writer_is_not_retried(self):
        for method in ("write_at", "finish"):
            faulty = FaultyStorage(MemoryStorage(), [Fault(method, 1, passing())])
            with pytest.raises(TransientStorageError):
                put(patient(faulty), "a", b"x")
            assert [c.method for c in faulty.calls].count(method) == 1
            assert list(faulty.list()) == []


class TestDeadlined:
    def test_a_late_call_says_what_was_waited_for(self):
        stuck = Stuck("read", "create", "free_bytes")
        storage = deadlined(stuck, SOON)
        with pytest.raises(
            OperationTimeoutError, match=r"read of 'a' did not finish in 0\.05 s"
        ) as c:
            storage.read("a")
        assert (c.value.path, c.value.timeout_s) == ("a", SOON)
        assert stuck.url in str(c.value)
        assert "nothing was changed" in c.value.message
        with pytest.raises(OperationTimeoutError, match=r"create of 'a' .* may still take effect"):
            storage.create("a", b"")
        with pytest.raises(OperationTimeoutError, match="free_bytes did not finish"):
            storage.free_bytes()
        stuck.go.set()

    def test_late_reads_may_be_tried_again_and_late_changes_not(self):
        stuck = Stuck("read", "delete", "list", "open_writer")
        version = MemoryStorage.create(stuck, "a", b"x").version
        storage = deadlined(stuck, SOON)
        transient = {}
        for name, use in {
            "read": lambda: storage.read("a"),
            "list": lambda: list(storage.list()),
            "open_writer": lambda: storage.open_writer("a"),
            "delete": lambda: storage.delete("a"),
            "delete one": lambda: storage.delete("a", expected=version),
        }.items():
            with pytest.raises(OperationTimeoutError) as caught:
                use()
            transient[name] = caught.value.transient
        stuck.go.set()
        changes = {"delete": False, "delete one": False}
        assert transient == {"read": True, "list": True, "open_writer": True, **changes}

    def test_the_callers_memory_is_not_touched_after_a_timeout(self):
        stuck = Stuck("read_into")
        MemoryStorage.create(stuck, "a", b"abcdef")
        memory = bytearray(6)
        with pytest.raises(OperationTimeoutError):
            deadlined(stuck, SOON).read_into("a", [ReadRange(start=0, into=memoryview(memory))])
        stuck.go.set()
        wait_for_threads()
        assert memory == bytes(6)
        memory.extend(b"no view of it is left")

    def test_what_is_stored_late_is_what_was_given(self):
        stuck = Stuck("create")
        data = bytearray(b"given")
        with pytest.raises(OperationTimeoutError):
            deadlined(stuck, SOON).create("a", data)
        data[:] = b"other"
        stuck.go.set()
        wait_for_threads()
        assert stuck.read("a") == b"given"

    @pytest.mark.parametrize("method", ["write_at", "finish"])
    def test_a_writer_is_closed_by_a_late_call_and_tidied_up_behind_it(self, method):
        stuck = Stuck(method)
        with (
            late_only_where_it(stuck.hangs),
            deadlined(stuck, SOON).open_writer("a") as writer,
        ):
            with pytest.raises(OperationTimeoutError, match=f"{method} of 'a'"):
                writer.write_at(0, b"x")
                writer.finish()
            for use in (lambda: writer.write_at(1, b"x"), writer.finish):
                with pytest.raises(ClosedError, match="given up"):
                    use()
            writer.abort()
            assert not stuck.aborted.is_set()
        stuck.go.set()
        assert stuck.aborted.wait(10)
        wait_for_threads()
        kept = {"a"} if method == "finish" else set()
        assert {info.key for info in stuck.list()} == kept

    def test_abort_is_bounded_too(self):
        stuck = Stuck("abort")
        with late_only_where_it(stuck.hangs):
            writer = deadlined(stuck, SOON).open_writer("a")
            with pytest.raises(OperationTimeoutError, match="abort of 'a'"):
                writer.abort()
            writer.abort()
        stuck.go.set()
        assert stuck.aborted.wait(10)

    def test_what_cannot_be_tidied_up_behind_a_late_call_harms_nobody(self, caplog):
        class Broken(Stuck):
            def open_writer(self, key, *, size_bytes=None):
                return BrokenWriter(self, MemoryStorage.open_writer(self, key))

        class BrokenWriter(StuckWriter):
            def abort(self):
                self.storage.aborted.set()
                raise StorageError("the disk is gone")

        stuck = Broken("write_at")
        with late_only_where_it(stuck.hangs):
            writer = deadlined(stuck, SOON).open_writer("a")
            with caplog.at_level(logging.DEBUG), pytest.raises(OperationTimeoutError):
                writer.write_at(0, b"x")
        with caplog.at_level(logging.DEBUG):
            stuck.go.set()
            assert stuck.aborted.wait(10)
            wait_for_threads()
        assert "could not be dropped" in caplog.text

    def test_a_call_that_waits_for_a_late_one_never_begins(self):
        stuck = Stuck("write_at")
        with late_only_where_it(stuck.hangs):
            writer = deadlined(stuck, SOON).open_writer("a")
        refused = []

        def write():
            try:
                writer.write_at(0, b"x")
            except (OperationTimeoutError, ClosedError) as error:
                refused.append(type(error))

        threads = [threading.Thread(target=write) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stuck.go.set()
        assert stuck.aborted.wait(10)
        wait_for_threads()
        assert len(refused) == 3
        assert [*stuck.list()] == []

    def test_a_writer_that_was_opened_late_is_aborted(self):
        stuck = Stuck("open_writer")
        late = pytest.raises(OperationTimeoutError, match="open_writer of 'a'")
        with late_only_where_it(stuck.hangs), late:
            deadlined(stuck, SOON).open_writer("a")
        stuck.go.set()
        assert stuck.aborted.wait(10)

    def test_an_inner_deadline_speaks_for_itself(self):
        stuck = Stuck("delete")
        with pytest.raises(OperationTimeoutError, match=r"in 0\.05 s"):
            deadlined(deadlined(stuck, SOON), 30).delete("a")
        stuck.go.set()

    def test_errors_come_through_as_they_are(self):
        storage = deadlined(MemoryStorage(), 30)
        with pytest.raises(ObjectNotFoundError):
            storage.read("a")
        storage.create("a", b"")
        with pytest.raises(ObjectExistsError):
            storage.create("a", b"")

    @pytest.mark.parametrize("wrong", [0, -1, "soon", None])
    def test_an_impossible_timeout_is_refused(self, wrong):
        with pytest.raises(ValueError, match="timeout_s"):
            deadlined(MemoryStorage(), wrong)


class TestBreaking:
    @pytest.mark.parametrize(
        "error",
        [passing(), OperationTimeoutError("late"), ConnectionError("gone"), OSError(5, "io")],
    )
    def test_failures_in_a_row_open_it(self, error):
        breaker = CircuitBreaker(failure_threshold=2)
        faulty = FaultyStorage(MemoryStorage(), [Fault("any", n, error) for n in (1, 2)])
        storage = breaking(faulty, breaker)
        for use in (lambda: storage.read("a"), lambda: list(storage.list())):
            with pytest.raises(type(error)):
                use()
        for use in (lambda: storage.stat("a"), lambda: list(storage.list()), storage.free_bytes):
            with pytest.raises(CircuitOpenError):
                use()
        assert len(faulty.calls) == 2

    def test_answers_of_a_working_storage_do_not(self):
        breaker = CircuitBreaker(failure_threshold=1)
        storage = breaking(MemoryStorage(), breaker)
        storage.create("a", b"abc")
        answers = [
            (ObjectNotFoundError, lambda: storage.read("b")),
            (ObjectExistsError, lambda: storage.create("a", b"")),
            (ObjectChangedError, lambda: storage.replace("a", b"", "other")),
            (ObjectChangedError, lambda: storage.delete("a", expected="other")),
            (StorageError, lambda: storage.read_into("a", [into(0, 9)])),
            (ValueError, lambda: storage.delete("../a")),
            (TypeError, lambda: storage.create("c", "text")),
            (StorageError, lambda: put_with_a_hole(storage)),
            (NoSpaceError, lambda: breaking(full(), breaker).create("a", b"")),
        ]
        for error, use in answers:
            with pytest.raises(error):
                use()
            assert breaker.state is CircuitState.CLOSED

    def test_a_refused_finish_aborts_and_abort_always_goes_through(self):
        clock = FakeClock()
        breaker = CircuitBreaker(failure_threshold=1, clock=clock)
        faulty = FaultyStorage(MemoryStorage(), [Fault("read", 1, passing())])
        storage = breaking(faulty, breaker)
        writer, other = storage.open_writer("a"), storage.open_writer("b")
        with pytest.raises(TransientStorageError):
            storage.read("x")
        with pytest.raises(CircuitOpenError):
            writer.finish()
        with pytest.raises(CircuitOpenError), other:
            other.write_at(0, b"x")
        assert [c.method for c in faulty.calls].count("abort") == 2
        clock.advance(60)
        with pytest.raises(ClosedError):
            writer.finish()
        assert list(storage.list()) == []

    def test_it_closes_again_when_the_storage_works(self):
        clock = FakeClock()
        breaker = CircuitBreaker(failure_threshold=1, recovery_timeout_s=5, clock=clock)
        storage = breaking(FaultyStorage(MemoryStorage(), [Fault("any", 1, passing())]), breaker)
        with pytest.raises(TransientStorageError):
            storage.stat("a")
        clock.advance(5)
        with pytest.raises(ObjectNotFoundError):
            storage.stat("a")
        assert breaker.state is CircuitState.CLOSED

    def test_a_breaker_must_be_one(self):
        with pytest.raises(ValueError, match="breaker"):
            breaking(MemoryStorage(), "often")


class TestLimited:
    @pytest.mark.parametrize("size", [0, 1, 64 * 1024, 10 * MIB + 1])
    def test_bytes_take_their_time_beyond_the_first_piece(self, size):
        rate = MIB
        piece = rate / 4
        data = bytes(size)
        expected = max(0.0, (size - piece) / rate)
        for use, limits in {
            lambda s: put(s, "b", data): "write_bytes_per_s",
            lambda s: s.create("b", data): "write_bytes_per_s",
            lambda s: s.replace("a", data, s.stat("a").version): "write_bytes_per_s",
            lambda s: s.read("a"): "read_bytes_per_s",
            lambda s: s.read_into("a", [into(0, size)]): "read_bytes_per_s",
        }.items():
            inner, clock = MemoryStorage(), FakeClock()
            inner.create("a", data)
            use(limited(inner, **{limits: rate}, clock=clock))
            assert clock.now() == pytest.approx(expected)
            clock = FakeClock()
            other = "read_bytes_per_s" if limits.startswith("write") else "write_bytes_per_s"
            inner.delete("b")
            use(limited(inner, **{other: rate}, clock=clock))
            assert clock.now() == 0

    def test_large_transfers_are_cut(self):
        inner, clock = FaultyStorage(MemoryStorage()), FakeClock()
        storage = limited(inner, read_bytes_per_s=MIB, write_bytes_per_s=MIB, clock=clock)
        put(storage, "a", bytes(MIB))
        assert [c.method for c in inner.calls].count("write_at") == 4
        storage.read_into("a", [into(0, MIB // 2), into(5, MIB // 2), into(0, 0), into(9, 1)])
        assert [c.method for c in inner.calls].count("read_into") == 5
        assert max(clock.slept) <= 0.25 + 1e-9

    def test_the_burst_is_bounded_however_long_it_was_quiet(self):
        clock = FakeClock()
        storage = limited(MemoryStorage(), write_bytes_per_s=MIB, clock=clock)
        clock.advance(3600)
        put(storage, "a", bytes(MIB))
        assert clock.now() - 3600 == pytest.approx(0.75)

    @settings(max_examples=30)
    @given(sizes=st.lists(st.integers(0, MIB), min_size=1, max_size=8))
    def test_no_span_of_time_lets_more_through_than_the_rate_and_a_piece(self, sizes):
        clock, rate = FakeClock(), MIB
        passed = []

        class Timed(MemoryStorage):
            def read_into(self, key, ranges):
                passed.append((clock.now(), sum(r.into.nbytes for r in ranges)))
                super().read_into(key, ranges)

        inner = Timed()
        inner.create("a", bytes(MIB))
        storage = limited(inner, read_bytes_per_s=rate, clock=clock)
        for size in sizes:
            storage.read_into("a", [into(0, size)])
        assert sum(size for _, size in passed) == sum(sizes)
        for first, (start, _) in enumerate(passed):
            through = 0
            for at, size in passed[first:]:
                through += size
                assert through <= (at - start) * rate + rate / 4 * 1.001 + 1

    def test_threads_share_the_rate_and_do_not_wait_for_one_another(self):
        waiting = threading.Barrier(4)

        class Together(FakeClock):
            def sleep(self, seconds):
                waiting.wait(10)  # breaks if a lock were held while sleeping
                super().sleep(seconds)

        storage = limited(MemoryStorage(), write_bytes_per_s=MIB, clock=Together())
        storage.create("burst", bytes(MIB // 4))
        threads = [
            threading.Thread(target=storage.create, args=(f"{n}", bytes(1000))) for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not waiting.broken
        assert len(list(storage.list())) == 5

    def test_a_replaced_object_is_not_read_as_a_mixture(self):
        inner = MemoryStorage()
        inner.create("a", b"a" * MIB)

        class Replacing(FakeClock):
            def sleep(self, seconds):
                super().sleep(seconds)
                put(inner, "a", b"b" * MIB)

        storage = limited(inner, read_bytes_per_s=MIB, clock=Replacing())
        with pytest.raises(TransientStorageError, match="replaced while it was being read"):
            storage.read_into("a", [into(0, MIB)])

    @pytest.mark.parametrize("wrong", [0, -1, "fast", float("nan"), float("inf")])
    def test_an_impossible_rate_is_refused(self, wrong):
        with pytest.raises(ValueError, match="read_bytes_per_s"):
            limited(MemoryStorage(), read_bytes_per_s=wrong)


class TestTogether:
    def test_reads_that_hang_or_fail_are_tried_again(self):
        go, hangs = threading.Event(), threading.Event()

        class UntilGo(FakeClock):
            def sleep(self, seconds):
                hangs.set()
                go.wait(60)

        faults = [Fault("read", 1, delay_s=60), Fault("read", 2, passing())]
        faulty = FaultyStorage(MemoryStorage(), faults, clock=UntilGo())
        faulty.create("a", b"x")
        breaker = CircuitBreaker()
        storage = retrying(breaking(deadlined(faulty, SOON), breaker), clock=FakeClock())
        with late_only_where_it(hangs):
            assert storage.read("a") == b"x"
        go.set()
        assert [call.method for call in faulty.calls] == ["create", "read", "read", "read"]
        assert breaker.state is CircuitState.CLOSED

    def test_a_storage_that_stays_down_is_left_alone_and_retries_end(self):
        faulty = FaultyStorage(MemoryStorage(), error_rate=1)
        faulty._inner.create("a", b"")
        clock = FakeClock()
        storage = retrying(
            breaking(deadlined(faulty, 30), CircuitBreaker(failure_threshold=3, clock=clock)),
            RetryPolicy(max_retries=10),
            clock=clock,
        )
        with pytest.raises(CircuitOpenError):
            storage.read("a")
        assert len(faulty.calls) == 3

    def test_a_late_change_is_not_repeated(self):
        stuck = Stuck("delete")
        storage = retrying(breaking(deadlined(stuck, SOON)))
        with pytest.raises(OperationTimeoutError, match="may still take effect"):
            storage.delete("a")
        stuck.go.set()


class TestFaults:
    def test_they_fire_once_at_their_call_and_are_noted(self):
        fault = Fault("read", 2, ConnectionError("gone"))
        storage = FaultyStorage(MemoryStorage(), [fault])
        storage.create("a", b"x")
        assert storage.read("a") == b"x"
        assert storage.unfired == (fault,)
        with pytest.raises(ConnectionError):
            storage.read("a")
        assert storage.read("a") == b"x"
        assert storage.unfired == ()
        assert storage.calls == (
            StorageCall(method="create", key="a", fault=None),
            StorageCall(method="read", key="a", fault=None),
            StorageCall(method="read", key="a", fault=fault),
            StorageCall(method="read", key="a", fault=None),
        )

    def test_any_counts_every_call(self):
        storage = FaultyStorage(MemoryStorage(), [Fault("any", 3, OSError("third"))])
        with storage.open_writer("a") as writer:
            writer.write_at(0, b"x")
            with pytest.raises(OSError, match="third"):
                writer.finish()
        assert [c.method for c in storage.calls] == ["open_writer", "write_at", "finish", "abort"]
        assert list(storage.list()) == []

    @pytest.mark.parametrize(
        ("method", "use"),
        [
            ("create", lambda s: s.create("b", b"new")),
            ("replace", lambda s: s.replace("a", b"new", s.stat("a").version)),
            ("finish", lambda s: put(s, "a", b"new")),
            ("delete", lambda s: s.delete("a")),
        ],
    )
    def test_after_means_that_it_took_effect(self, method, use):
        results = {}
        for when in ("before", "after"):
            storage = FaultyStorage(MemoryStorage(), [Fault(method, 1, OSError("lost"), when)])
            storage._inner.create("a", b"old")
            with pytest.raises(OSError, match="lost"):
                use(storage)
            results[when] = {info.key: storage.read(info.key) for info in storage.list()}
        assert results["before"] == {"a": b"old"}
        assert results["after"] != results["before"]

    def test_data_is_damaged_silently(self):
        def storage(fault):
            faulty = FaultyStorage(MemoryStorage(), [fault])
            faulty._inner.create("a", b"abc")
            return faulty

        assert storage(Fault("read", flip_bit=8)).read("a") == b"acc"
        assert storage(Fault("read", flip_bit=24)).read("a") == b"`bc"
        assert storage(Fault("read", keep_bytes=2)).read("a") == b"ab"
        memory = bytearray(b"-----")
        view = memoryview(memory)
        ranges = [ReadRange(start=1, into=view[:2]), ReadRange(start=0, into=view[2:])]
        storage(Fault("read_into", keep_bytes=3, flip_bit=0)).read_into("a", ranges)
        assert memory == b"cca--"
        for method, use in {
            "create": lambda s: s.create("b", b"abc"),
            "write_at": lambda s: put(s, "b", b"abc"),
            "replace": lambda s: s.replace("b", b"abc", s._inner.create("b", b"").version),
        }.items():
            faulty = storage(Fault(method, keep_bytes=2))
            assert use(faulty).size_bytes == 2
            assert faulty.read("b") == b"ab"

    def test_delays_are_slept_on_the_clock(self):
        clock = FakeClock()
        storage = FaultyStorage(MemoryStorage(), [Fault("free_bytes", delay_s=5)], clock=clock)
        assert storage.free_bytes() is None
        assert clock.slept == [5]

    def test_chance_repeats_with_its_seed(self):
        def run(seed):
            storage = FaultyStorage(
                MemoryStorage(), rng=seeded_rng(seed), error_rate=0.2, flip_rate=0.2
            )
            outcomes = []
            for n in range(100):
                try:
                    storage.create(f"{n % 7}", b"abc")
                    outcomes.append(storage.read(f"{n % 7}"))
                except StorageError as error:
                    outcomes.append(str(error))
            return outcomes, storage

        outcomes, storage = run(5)
        assert run(5)[0] == outcomes
        assert run(6)[0] != outcomes
        assert any("seeded_rng(5)" in str(outcome) for outcome in outcomes)
        fired = [call.fault for call in storage.calls if call.fault]
        assert {fault.when for fault in fired if fault.error} == {"before", "after"}
        assert any(fault.flip_bit is not None for fault in fired)

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            ({"method": "raed"}, "raed"),
            ({"method": "read", "nth": 0}, "nth"),
            ({"method": "read", "when": "during"}, "when"),
            ({"method": "stat", "flip_bit": 1}, "flip_bit"),
            ({"method": "read", "keep_bytes": -1}, "keep_bytes"),
            ({"method": "read", "delay_s": -1}, "delay_s"),
        ],
    )
    def test_a_fault_that_could_never_fire_is_refused(self, arguments, named):
        with pytest.raises(ValueError, match=named):
            Fault(**arguments)


def test_the_tools_need_no_pytest_until_the_suite_is_asked_for():
    code = """
import sys
sys.modules["pytest"] = sys.modules["hypothesis"] = None
import holdfast.testing
assert holdfast.testing.FaultyStorage and not hasattr(holdfast.testing, "Suite")
try:
    holdfast.testing.StorageConformance
except ImportError:
    print("needs pytest")
"""
    run = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True
    )
    assert run.stdout == "needs pytest\n"


def put_with_a_hole(storage):
    with storage.open_writer("hole") as writer:
        writer.write_at(1, b"x")
        writer.finish()


def full():
    return FaultyStorage(MemoryStorage(), [Fault("create", 1, NoSpaceError("full"))])


def wait_for_threads():
    """Until every thread that holdfast started has ended."""
    for thread in threading.enumerate():
        if thread.name.startswith("holdfast:"):
            thread.join(10)
