import errno
import itertools
import random
import threading
import time

import msgspec
import numpy as np
import pytest
from catalog_tools import Observed, aged, begun, files_of, leftovers, memory_of, put

from holdfast.catalog import Catalog
from holdfast.catalog._attempt import Attempt
from holdfast.catalog._collect import collect_garbage
from holdfast.catalog._committed import find_record, new_tombstone, utc_now
from holdfast.catalog._shard_write import ArraySource, write_shard
from holdfast.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CircuitOpenError,
    ObjectExistsError,
    OperationTimeoutError,
    SaveError,
    StorageError,
    TransientStorageError,
)
from holdfast.format import CommitRecord, ShardEntry, encode_record
from holdfast.storage import LocalStorage, MemoryStorage, retrying
from holdfast.storage._system import System
from holdfast.testing import FakeClock, Fault, FaultyStorage

OLD, NEW = {"x": np.arange(5.0), "n": 1}, {"x": np.arange(9.0), "n": 2}
OTHER = {"y": np.arange(3), "n": 3}


@pytest.fixture(params=["local", "memory"])
def storage(request, tmp_path):
    return LocalStorage(tmp_path / "root") if request.param == "local" else MemoryStorage()


def numbers(catalog):
    """What every listed checkpoint holds; reading verifies it."""
    return {info.prefix: catalog.read(info.prefix)["n"] for info in catalog.list()}


def test_a_checkpoint_is_invisible_until_write_returns(storage):
    seen = []

    def look(method, key):
        others = Catalog(storage)
        seen.append(numbers(others))
        with pytest.raises(CheckpointNotFoundError):
            others.info("a")

    watched = Observed(storage, before=lambda m, k: committed or look(m, k))
    committed = []
    watched.after = lambda m, k: committed.append(k) if k == "a/metadata.json" else None
    Catalog(watched).write("a", NEW)
    assert len(seen) > 8
    assert all(found == {} for found in seen)
    assert numbers(Catalog(storage)) == {"a": 2}
    assert leftovers(storage) == []


def test_overwriting_shows_the_old_or_the_new_one_at_every_call(storage):
    Catalog(storage).write("a", OLD)
    seen = []

    def look(method, key):
        seen.append(numbers(Catalog(storage))["a"])

    Catalog(Observed(storage, before=look, after=look)).write("a", NEW, overwrite=True)
    assert seen == sorted(seen)
    assert {1, 2} == set(seen)
    assert leftovers(storage) == []


def test_a_reader_in_another_thread_always_gets_the_old_or_the_new_one_whole(storage):
    catalog = Catalog(storage)
    catalog.write("a", {"x": np.full(1000, 0), "n": 0})
    stop = threading.Event()
    problems = []

    def read():
        reader = Catalog(storage)
        while not stop.is_set():
            try:
                found = reader.read("a")
                if set(found["x"].tolist()) != {found["n"]}:
                    problems.append(found)
            except BaseException as error:
                problems.append(error)
                return

    thread = threading.Thread(target=read)
    thread.start()
    try:
        for n in range(1, 15):
            catalog.write("a", {"x": np.full(1000, n), "n": n}, overwrite=True)
    finally:
        stop.set()
        thread.join()
    assert problems == []


def test_a_taken_prefix_is_refused_and_left_as_it_is(storage):
    catalog = Catalog(storage)
    catalog.write("a", OLD)
    before = files_of(storage)
    with pytest.raises(
        CheckpointExistsError, match="choose another name, or pass overwrite=True"
    ) as caught:
        catalog.write("a", NEW)
    assert caught.value.path == f"{storage.url}/a"
    assert files_of(storage) == before


def test_the_newest_comes_first_whatever_the_names_are():
    catalog = Catalog(MemoryStorage())
    for prefix in ["b", "z/9", "a", "z/10"]:
        catalog.write(prefix, {})
    catalog.write("b", {}, overwrite=True)
    assert [info.prefix for info in catalog.list()] == ["b", "z/10", "a", "z/9"]
    assert [info.ordinal for info in catalog.list()] == [5, 4, 3, 2]


@pytest.mark.parametrize("overwrite", [False, True])
def test_of_two_saves_of_one_name_at_the_same_time_one_wins(storage, overwrite):
    if overwrite:
        Catalog(storage).write("a", OLD)
    barrier = threading.Barrier(2)
    outcomes, refused = [], []

    def save(n):
        gate = Observed(storage, before=lambda m, k: barrier.wait(10) if m == "finish" else None)
        try:
            Catalog(gate).write("a", {"n": n, "x": np.full(4, n)}, overwrite=overwrite)
            outcomes.append(n)
        except SaveError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=save, args=(n,)) for n in (10, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 1
    assert len(refused) == 1
    assert "nothing was committed" in refused[0]
    found = Catalog(storage).read("a")
    assert found["n"] == outcomes[0]
    assert set(found["x"].tolist()) == {outcomes[0]}
    assert leftovers(storage) == []


# --- saves that were stopped


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_save_that_was_given_up_cannot_commit(storage, overwrite):
    if overwrite:
        Catalog(storage).write("a", OLD)
    attempt, record = begun(storage, "a", np.arange(4), overwrite=overwrite)
    report = aged(storage, intent=10_000).gc()
    assert attempt.intent.key in report.deleted
    assert attempt.shard_key(0) in report.deleted
    with pytest.raises(SaveError, match="nothing was committed"), attempt:
        attempt.commit(record)
    assert numbers(Catalog(storage)) == ({"a": 1} if overwrite else {})
    Catalog(storage).write("a", NEW, overwrite=overwrite)
    assert numbers(Catalog(storage)) == {"a": 2}
    assert leftovers(storage) == []


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_save_given_up_between_its_last_look_and_its_commit_cannot_commit(storage, overwrite):
    if overwrite:
        Catalog(storage).write("a", OLD)
    watched = Observed(storage)
    attempt, record = begun(watched, "a", np.arange(4), overwrite=overwrite)

    def stop(method, key):
        if key == "a/metadata.json" and method in {"create", "replace"}:
            aged(storage, intent=10_000).gc()

    watched.before = stop
    with pytest.raises(SaveError, match="gave up this checkpoint"), attempt:
        attempt.commit(record)
    assert numbers(Catalog(storage)) == ({"a": 1} if overwrite else {})
    assert [key for key in leftovers(storage) if "metadata" not in key] == []


@pytest.mark.parametrize("then", ["rollback", "save and delete", "rollback twice"])
def test_a_save_that_was_given_up_cannot_commit_after_the_name_was_used_again(then):
    storage = MemoryStorage()
    watched = Observed(storage)
    attempt, record = begun(watched, "a", np.arange(4))
    catalog = Catalog(storage)

    def stop(method, key):
        if key == "a/metadata.json" and method == "create":
            aged(storage, intent=10_000).gc()
            if then == "save and delete":
                catalog.write("a", NEW)
                catalog.delete("a")
            else:
                catalog.rollback("a")
            if then == "rollback twice":
                catalog.rollback("a")

    watched.before = stop
    with pytest.raises(SaveError, match="nothing was committed"), attempt:
        attempt.commit(record)
    assert catalog.list() == []
    assert leftovers(storage) == ["a/metadata.json"]
    catalog.write("a", NEW)
    assert numbers(catalog) == {"a": 2}


def test_a_living_save_is_left_alone_by_gc_and_then_commits(storage):
    attempt, record = begun(storage, "a", np.arange(4))
    before = files_of(storage)
    report = Catalog(storage).gc()
    assert report.deleted == ()
    assert report.kept == {"a": "a save is under way"}
    assert files_of(storage) == before
    with attempt:
        attempt.commit(record)
    assert Catalog(storage).read("a")["x"].tolist() == [0, 1, 2, 3]


def test_a_living_save_does_not_fail_because_one_before_it_was_given_up(storage):
    dead, _ = begun(storage, "a", np.arange(4))
    alive, record = begun(storage, "a", np.arange(4))
    observed = Observed(storage)
    observed.ages = {dead.intent.attempt: 10_000.0}
    report = Catalog(observed).gc()
    assert report.deleted == ()
    with alive:
        alive.commit(record)
    assert Catalog(storage).read("a")["x"].tolist() == [0, 1, 2, 3]
    Catalog(observed).gc()
    assert leftovers(storage) == []


def test_a_lease_ends_in_real_time_too(storage):
    attempt, record = begun(storage, "a", np.arange(4), lease_s=0.05)
    time.sleep(0.2)
    assert attempt.shard_key(0) in Catalog(storage).gc().deleted
    with pytest.raises(SaveError, match=r"lost its lease of 0\.05 s"), attempt:
        attempt.commit(record)


def test_a_lease_is_renewed_while_the_save_goes_on():
    storage = MemoryStorage()
    clock = FakeClock()
    watched = Observed(storage)
    writes = []

    def note(method, key):
        if method == "write_at":
            clock.advance(200)
        if method in {"create", "finish"} and "intent" in key:
            writes.append(method)

    watched.before = note
    Catalog(watched, clock=clock).write("a", {f"t{i}": np.zeros(10_000) for i in range(10)})
    assert writes.count("create") == 1
    assert writes.count("finish") >= 9


def test_a_long_save_works_where_there_are_no_locks(tmp_path):
    class WithoutLocks(System):
        def locked(self, fd):
            raise OSError(errno.ENOLCK, "No locks available")

    clock = FakeClock()
    catalog = Catalog(LocalStorage(tmp_path, system=WithoutLocks()), clock=clock)
    catalog.write("a", {"x": np.zeros(1 << 20)}, progress=lambda _: clock.sleep(100))
    assert clock.now() > 3000
    assert catalog.verify("a").is_intact
    assert leftovers(catalog.storage) == []


def test_a_renewal_that_fails_is_tried_again_and_does_not_stop_the_save():
    inner = MemoryStorage()
    clock = FakeClock()
    renewals = []

    def fail(method, key):
        if method == "open_writer" and "intent" in key:
            renewals.append(clock.now())
            if len(renewals) < 4:
                raise OperationTimeoutError("no answer", path=key, timeout_s=1.0)

    state = {"x": np.zeros(1 << 20)}
    catalog = Catalog(Observed(inner, before=fail), clock=clock)
    catalog.write("a", state, progress=lambda _: clock.sleep(10))
    assert renewals == [150, 190, 230, 270]
    assert Catalog(inner).verify("a").is_intact


def test_files_are_looked_at_side_by_side_before_the_commit_and_the_lease_goes_on():
    storage = MemoryStorage()
    clock = FakeClock()
    watched = Observed(storage)
    attempt = Attempt.begin(watched, "a", clock=clock)
    entry = ShardEntry(name="x", dtype="U8", shape=(1,))
    source = ArraySource(entry=entry, array=np.zeros(1, np.uint8))
    files = [write_shard(storage, attempt.shard_key(rank), [source]).file for rank in range(200)]
    renewed, looks = [], itertools.count()
    together = threading.Barrier(2)

    def note(method, key):
        if method == "stat" and "shard" in key:
            clock.advance(10)
            if next(looks) < together.parties:
                together.wait(60)  # for another that is looked at meanwhile
        elif method == "finish":
            renewed.append(clock.now())

    watched.before = note
    record = CommitRecord(
        state="committed",
        ordinal=1,
        attempt=attempt.intent.attempt,
        created=utc_now(),
        world_size=200,
        writer="holdfast test",
        files=tuple(files),
    )
    with attempt:
        attempt.commit(record)
    assert next(looks) == 200
    assert len(renewed) >= 3


# --- the order of commits


def test_a_save_is_newer_than_all_that_committed_before_it_did():
    inner = MemoryStorage()
    other = Catalog(inner)

    def save(method, key):
        if method == "finish":
            other.write("B", {})
            other.write("C", {})

    Catalog(Observed(inner, before=save)).write("A", {"x": np.arange(3)})
    assert [info.prefix for info in other.list()] == ["A", "C", "B"]


def test_saves_that_commit_at_the_same_time_are_listed_in_one_order():
    inner = MemoryStorage()
    other = Catalog(inner)

    def save(method, key):
        if method == "create" and key == "A/metadata.json":
            time.sleep(0.002)
            other.write("B", {})

    Catalog(Observed(inner, before=save)).write("A", {})
    assert [(info.prefix, info.ordinal) for info in other.list()] == [("B", 1), ("A", 1)]


def test_a_save_whose_lease_was_lost_on_the_way_stops_writing():
    storage = MemoryStorage()
    clock = FakeClock()

    def lose(method, key):
        clock.advance(1000)
        if method == "finish":
            raise AssertionError("it went on")
        for info in [*storage.list("a/intent")]:
            storage.delete(info.key)

    watched = Observed(
        storage, before=lambda m, k: lose(m, k) if m in {"write_at", "finish"} else 0
    )
    with pytest.raises(SaveError, match="somebody cleaned up after it"):
        Catalog(watched, clock=clock).write("a", NEW)
    assert files_of(storage) == {}


def test_a_file_that_vanishes_or_changes_before_the_commit_stops_it():
    for damage in (lambda s, k: s.delete(k), lambda s, k: put(s, k, b"short")):
        storage = MemoryStorage()
        attempt, record = begun(storage, "a", np.arange(4))
        damage(storage, attempt.shard_key(0))
        with pytest.raises(SaveError, match="nothing was committed"), attempt:
            attempt.commit(record)
        assert files_of(storage) == {}


def test_a_save_that_is_left_without_a_commit_leaves_nothing():
    storage = MemoryStorage()
    attempt, _ = begun(storage, "a", np.arange(4))
    with attempt:
        pass
    assert files_of(storage) == {}
    attempt.abort()


def test_a_record_that_cannot_be_written_leaves_nothing():
    storage = MemoryStorage()
    huge = {"x": np.zeros(2), "text": "t" * (65 * 1024 * 1024)}
    with pytest.raises(SaveError, match="a commit record holds 67108864; nothing was written"):
        Catalog(storage).write("a", huge)
    assert files_of(storage) == {}


# --- answers that get lost


def test_a_commit_whose_answer_was_lost_counts_as_committed():
    inner = MemoryStorage()
    fault = Fault("create", 2, TransientStorageError("lost"), "after")
    faulty = FaultyStorage(inner, [fault])
    info = Catalog(faulty).write("a", NEW)
    assert faulty.unfired == ()
    assert info == Catalog(inner).info("a")
    assert leftovers(inner) == []


def test_an_overwrite_whose_answer_was_lost_counts_as_committed():
    inner = MemoryStorage()
    Catalog(inner).write("a", OLD)
    faulty = FaultyStorage(inner, [Fault("replace", 1, TransientStorageError("lost"), "after")])
    Catalog(faulty).write("a", NEW, overwrite=True)
    assert faulty.unfired == ()
    assert numbers(Catalog(inner)) == {"a": 2}
    assert leftovers(inner) == []


def test_a_commit_whose_answer_was_lost_counts_as_committed_though_gc_has_fenced_it():
    inner = MemoryStorage()

    class Lossy(Observed):
        lost = False

        def create(self, key, data):
            info = super().create(key, data)
            if key.endswith("metadata.json") and not self.lost:
                self.lost = True
                assert "a/metadata.json" not in aged(inner, intent=10_000).gc().deleted
                raise TransientStorageError("connection reset", path=key)
            return info

    lossy = Lossy(inner)
    info = Catalog(retrying(lossy, clock=FakeClock())).write("a", NEW)
    assert lossy.lost
    assert info == Catalog(inner).info("a")
    assert Catalog(inner).verify("a").is_intact
    assert find_record(inner, "a").record.fence == 1
    assert leftovers(inner) == []


def test_a_refused_commit_after_which_nothing_can_be_read_removes_nothing():
    inner = MemoryStorage()
    watched = Observed(inner)
    attempt, record = begun(watched, "a", np.arange(4))
    refused = []

    def before(method, key):
        if key == "a/metadata.json" and method == "create":
            refused.append(key)
            raise ObjectExistsError("the key is taken", path=key)
        if key == "a/metadata.json" and refused:
            raise OperationTimeoutError("no answer", path=key, timeout_s=1.0)

    watched.before = before
    with pytest.raises(ObjectExistsError) as caught, attempt:
        attempt.commit(record)
    assert "is unknown" in caught.value.__notes__[0]
    assert sorted(files_of(inner)) == sorted([attempt.intent.key, attempt.shard_key(0)])


def test_a_save_that_was_replaced_before_its_answer_came_leaves_what_others_refer_to():
    inner = MemoryStorage()
    watched = Observed(inner)
    attempt, record = begun(watched, "a", np.arange(4))

    def refuse(method, key):
        if key == "a/metadata.json" and method == "create":
            watched.before = lambda m, k: None
            file = msgspec.structs.replace(record.files[0], prefix="a")
            other = msgspec.structs.replace(record, files=(file,), attempt="00000000000000ff")
            inner.create("b/metadata.json", encode_record(other))
            inner.create("a/metadata.json", encode_record(new_tombstone()))

    watched.before = refuse
    with pytest.raises(SaveError, match="nothing was committed"), attempt:
        attempt.commit(record)
    assert Catalog(inner).verify("b").is_intact


def test_a_save_that_was_replaced_leaves_its_files_while_nobody_can_tell_who_needs_them():
    inner = MemoryStorage()
    watched = Observed(inner)
    attempt, record = begun(watched, "a", np.arange(4))
    put(inner, "b/metadata.json", b'{"format":"holdfast","version":1,"digest":"?","record":{}}')

    def refuse(method, key):
        if key == "a/metadata.json" and method == "create":
            watched.before = lambda m, k: None
            inner.create("a/metadata.json", encode_record(new_tombstone()))

    watched.before = refuse
    with pytest.raises(SaveError, match="nothing was committed"), attempt:
        attempt.commit(record)
    assert attempt.shard_key(0) in files_of(inner)


@pytest.mark.parametrize(
    "error", [OperationTimeoutError("late", timeout_s=1.0), CircuitOpenError("open")]
)
def test_nothing_is_raised_after_the_commit(error):
    inner = MemoryStorage()

    def fail(method, key):
        if method == "delete" or (method == "list" and Catalog(inner).list()):
            raise error

    watched = Observed(inner, before=fail)
    assert Catalog(watched).write("a", OLD) == Catalog(inner).info("a")
    watched.before = lambda m, k: None
    Catalog(watched).write("b", OLD)
    watched.before = lambda m, k: fail(m, k) if m == "delete" else None
    Catalog(watched).write("b", NEW, overwrite=True)
    assert numbers(Catalog(inner)) == {"a": 1, "b": 2}


def test_a_save_interrupted_while_it_looks_for_its_lost_commit_removes_no_checkpoint():
    inner = MemoryStorage()
    lost = []

    def lose_answer(method, key):
        if method == "create" and key == "a/metadata.json":
            lost.append(key)
            raise TransientStorageError("the answer was lost")

    def interrupt(method, key):
        if method == "stat" and key == "a/metadata.json" and len(lost) == 1:
            lost.append(method)
            raise KeyboardInterrupt

    attempt, record = begun(Observed(inner, before=interrupt, after=lose_answer), "a", np.arange(3))
    with pytest.raises(KeyboardInterrupt), attempt:
        attempt.commit(record)
    assert lost == ["a/metadata.json", "stat"]
    assert Catalog(inner).verify("a").is_intact


def test_a_commit_that_was_interrupted_may_still_take_effect_and_removes_nothing():
    inner = MemoryStorage()

    def interrupt(method, key):
        if (method, key) == ("create", "a/metadata.json"):
            raise KeyboardInterrupt

    attempt, record = begun(Observed(inner, before=interrupt), "a", np.arange(3))
    with pytest.raises(KeyboardInterrupt) as caught, attempt:
        attempt.commit(record)
    assert "is unknown" in caught.value.__notes__[0]
    assert sorted(files_of(inner)) == sorted([attempt.intent.key, attempt.shard_key(0)])


def test_a_commit_that_shows_but_may_not_be_durable_is_not_acknowledged():
    inner = MemoryStorage()
    faulty = FaultyStorage(inner, [Fault("create", 2, StorageError("fsync failed"), "after")])
    with pytest.raises(StorageError, match="fsync failed") as caught:
        Catalog(faulty).write("a", NEW)
    assert "is unknown" in caught.value.__notes__[0]
    assert numbers(Catalog(inner)) == {"a": 2}


def test_a_commit_that_was_refused_is_cleaned_up():
    inner = MemoryStorage()
    faulty = FaultyStorage(inner, [Fault("create", 2, StorageError("no"), "before")])
    with pytest.raises(StorageError, match="no"):
        Catalog(faulty).write("a", NEW)
    assert files_of(inner) == {}


def test_an_intent_whose_answer_was_lost_is_not_left():
    inner = MemoryStorage()
    faulty = FaultyStorage(inner, [Fault("create", 1, TransientStorageError("lost"), "after")])
    with pytest.raises(TransientStorageError):
        Catalog(faulty).write("a", NEW)
    assert files_of(inner) == {}


def test_a_failing_cleanup_does_not_hide_why_the_save_failed():
    inner = MemoryStorage()
    faults = [Fault("finish", 1, StorageError("disk")), Fault("delete", 1, StorageError("stuck"))]
    with pytest.raises(StorageError, match="disk") as caught:
        Catalog(FaultyStorage(inner, faults)).write("a", NEW)
    assert "could not be removed: stuck" in caught.value.__notes__[0]


# --- a crash at every call


def prepared():
    """Two checkpoints, one that was given up, and a file without an intent."""
    storage = MemoryStorage()
    Catalog(storage).write("a", OLD)
    Catalog(storage).write("b", OTHER)
    begun(storage, "c", np.arange(4))
    put(storage, "b/shard-0-00000000000000ff.safetensors", b"left by somebody")
    put(storage, "d/shard-3-00000000000000ff-1.safetensors", b"left by somebody")
    return files_of(storage)


PREPARED = prepared()


OPERATIONS = {
    "write": (lambda c: c.write("e", NEW), {"e": {None, 2}}),
    "overwrite": (lambda c: c.write("a", NEW, overwrite=True), {"a": {1, 2}}),
    "delete": (lambda c: c.delete("a"), {"a": {None, 1}}),
    "rollback": (lambda c: c.rollback("a"), {"a": {None, 1}}),
    "rollback of a leftover": (lambda c: c.rollback("c"), {}),
    "save where one was given up": (lambda c: c.write("c", NEW), {"c": {None, 2}}),
    "gc": (lambda c: c.gc(), {}),
}


def old_intents(storage):
    observed = Observed(storage)
    observed.ages = {"intent": 10_000.0, "clock": 10_000.0}
    return observed


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    ("when", "error"),
    [
        ("before", StorageError),
        ("after", StorageError),
        ("before", TransientStorageError),
        ("after", TransientStorageError),
        ("after", KeyboardInterrupt),
    ],
)
def test_a_crash_at_any_call_leaves_only_whole_checkpoints_and_nothing_gc_cannot_remove(
    operation, when, error
):
    run, outcomes = OPERATIONS[operation]
    calls = FaultyStorage(old_intents(memory_of(PREPARED)))
    run(Catalog(calls))
    for nth in range(1, len(calls.calls) + 1):
        inner = memory_of(PREPARED)
        faulty = FaultyStorage(old_intents(inner), [Fault("any", nth, error("boom"), when)])
        done = False
        try:
            run(Catalog(faulty))
            done = True
        except (CheckpointError, KeyboardInterrupt):
            pass
        assert faulty.unfired == ()
        found = numbers(Catalog(inner))
        place = f"call {nth}, {calls.calls[nth - 1]}"
        for prefix, value in {"a": 1, "b": 3, "c": None, "e": None}.items():
            possible = outcomes.get(prefix, {value})
            assert found.get(prefix) in possible, place
            if done and prefix in outcomes:
                expected = None if operation in {"delete", "rollback"} else 2
                assert found.get(prefix) == expected, place
        Catalog(old_intents(inner)).gc()
        left = leftovers(inner)
        assert all(key.endswith("/metadata.json") for key in left), place
        collect_garbage(inner, tombstone_s=-1)
        assert leftovers(inner) == [], place
        assert {info.prefix for info in Catalog(inner).list()} == found.keys(), place


def run_one(catalog, operation, prefix, n):
    state = {"n": n, "x": np.full(50, n)}
    {
        "gc": catalog.gc,
        "delete": lambda: catalog.delete(prefix),
        "rollback": lambda: catalog.rollback(prefix),
        "write": lambda: catalog.write(prefix, state),
        "overwrite": lambda: catalog.write(prefix, state, overwrite=True),
    }[operation]()


@pytest.mark.parametrize("seed", range(6))
def test_under_errors_by_chance_what_was_acknowledged_is_there(seed):
    rng = random.Random(seed)
    inner = MemoryStorage()
    faulty = FaultyStorage(inner, rng=rng, error_rate=0.02)
    catalog = Catalog(faulty)
    possible: dict[str, set[int | None]] = {prefix: {None} for prefix in "abc"}
    acknowledged = 0
    for n in range(60):
        prefix = rng.choice("abc")
        operation = rng.choice(["write", "overwrite", "overwrite", "delete", "rollback", "gc"])
        target: set[int | None] = {n} if "write" in operation else {None}
        try:
            run_one(catalog, operation, prefix, n)
        except (CheckpointExistsError, CheckpointNotFoundError):
            pass
        except CheckpointError:
            if operation != "gc":
                possible[prefix] |= target
        else:
            acknowledged += 1
            if operation != "gc":
                possible[prefix] = target
        found = numbers(Catalog(inner))
        for each, values in possible.items():
            assert found.get(each) in values, (n, operation, each)
            possible[each] = {found.get(each)} if each != prefix else values
    assert acknowledged > 20
    Catalog(old_intents(inner)).gc()
    assert all(key.endswith("/metadata.json") for key in leftovers(inner))


def test_a_record_that_makes_no_sense_is_not_committed():
    inner = MemoryStorage()
    attempt, record = begun(inner, "a", np.arange(3))
    with pytest.raises(SaveError, match="nothing was committed"), attempt:
        attempt.commit(msgspec.structs.replace(record, metrics={"x" * 100_000: 1.0}))
    assert files_of(inner) == {}
