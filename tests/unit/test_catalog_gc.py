import logging

import msgspec
import numpy as np
import pytest
from catalog_tools import Observed, Part, aged, begun, files_of, leftovers, put, reread, write_parts

from holdfast.catalog import Catalog
from holdfast.catalog._attempt import Attempt
from holdfast.catalog._collect import collect_garbage
from holdfast.catalog._committed import find_record
from holdfast.catalog._intents import encode_intent
from holdfast.errors import (
    CheckpointNotFoundError,
    CorruptedError,
    IncompatibleVersionError,
    NoSpaceError,
    ObjectNotFoundError,
    SaveError,
    StorageError,
    TransientStorageError,
)
from holdfast.format import StoredFile
from holdfast.reshard import Box, Grid
from holdfast.storage import LocalStorage, MemoryStorage, retrying
from holdfast.testing import FakeClock, Fault, FaultyStorage

ATTEMPT = "00000000000000aa"
INTENT = (
    b'{"format":"holdfast-intent","version":1,"attempt":"00000000000000dd","lease_s":%b,'
    b'"refers":[],"host":"h","pid":1}'
)


@pytest.fixture(params=["local", "memory"])
def storage(request, tmp_path):
    return LocalStorage(tmp_path / "root") if request.param == "local" else MemoryStorage()


def whole(array):
    return array, Grid.whole(array.shape), [Part(Box.whole(array.shape), 0)]


def referring(storage, prefix="ref", to="base"):
    """``base`` with a tensor of its own, and ``ref``, whose tensor is in the file of ``base``."""
    base = write_parts(storage, to, {"w": whole(np.arange(6.0))}, attempt="00000000000000bb")
    file = base.files[0]
    borrowed = StoredFile(name=file.name, size_bytes=file.size_bytes, digest=file.digest, prefix=to)
    write_parts(storage, prefix, {}, borrowed=[borrowed], more={"w": base.tensors["w"]}, ordinal=2)
    return f"{to}/{file.name}"


# --- files of other checkpoints


def test_a_checkpoint_that_refers_to_anothers_files_reads_and_verifies(storage):
    key = referring(storage)
    catalog = Catalog(storage)
    assert catalog.read("ref")["w"].tolist() == [0, 1, 2, 3, 4, 5]
    assert catalog.verify("ref").is_intact
    assert catalog.verify("ref").files == 1
    damaged = bytearray(storage.read(key))
    damaged[4096] ^= 1
    put(storage, key, bytes(damaged))
    (damage,) = catalog.verify("ref").damage
    assert (damage.file, damage.tensor) == (key, "w")


OPERATIONS = ["delete", "overwrite", "rollback", "gc"]


def remove(storage, prefix, operation):
    """By one of ``OPERATIONS``, and what nothing needs by gc."""
    catalog = Catalog(storage)
    if operation == "overwrite":
        catalog.write(prefix, {"n": 1}, overwrite=True)
    elif operation == "rollback":
        catalog.rollback(prefix)
    elif operation == "gc":
        storage.delete(f"{prefix}/metadata.json")
    else:
        catalog.delete(prefix)
    aged(storage, intent=10_000, clock=10_000).gc()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_files_that_another_checkpoint_names_outlive_their_own(storage, operation):
    key = referring(storage)
    catalog = Catalog(storage)
    remove(storage, "base", operation)
    assert storage.stat(key).size_bytes > 0
    assert catalog.read("ref")["w"].tolist() == [0, 1, 2, 3, 4, 5]
    catalog.delete("ref")
    with pytest.raises(ObjectNotFoundError):
        storage.stat(key)
    assert leftovers(storage) == []


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_a_store_needs_stays_if_the_folder_above_is_taken_for_a_store(tmp_path, operation):
    key = referring(LocalStorage(tmp_path / "runs/a"))
    remove(LocalStorage(tmp_path), "runs/a/base", operation)
    catalog = Catalog(tmp_path / "runs/a")
    assert catalog.read("ref")["w"].tolist() == [0, 1, 2, 3, 4, 5]
    catalog.delete("ref")
    assert not (tmp_path / "runs/a" / key).exists()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_a_store_needs_stays_if_a_folder_in_it_is_taken_for_a_store(tmp_path, operation):
    """As far as what needs it is in that folder, too."""
    key = referring(LocalStorage(tmp_path), "lora/ref", "lora/base")
    remove(LocalStorage(tmp_path / "lora"), "base", operation)
    catalog = Catalog(tmp_path)
    assert catalog.read("lora/ref")["w"].tolist() == [0, 1, 2, 3, 4, 5]
    catalog.delete("lora/ref")
    assert not (tmp_path / key).exists()


def test_what_a_save_may_refer_to_stays_if_the_folder_above_is_taken_for_a_store(tmp_path):
    above, inside = LocalStorage(tmp_path), LocalStorage(tmp_path / "run")
    write_parts(inside, "base", {"w": whole(np.arange(6.0))}, attempt="00000000000000bb")
    attempt = Attempt.begin(inside, "new", refers=["base"])
    Catalog(above).delete("run/base")
    assert [*inside.list("base/shard-")] != []
    attempt.abort()
    Catalog(above).gc()
    assert [*inside.list("base/shard-")] == []


def test_the_last_checkpoint_that_names_a_file_takes_it_along_and_no_other(storage):
    key = referring(storage)
    record = Catalog(storage).find("ref").record
    write_parts(storage, "ref2", {}, borrowed=record.files, more=record.tensors, ordinal=3)
    catalog = Catalog(storage)
    catalog.delete("ref")
    catalog.delete("base")
    assert catalog.read("ref2")["w"].tolist() == [0, 1, 2, 3, 4, 5]
    attempt = Attempt.begin(storage, "new", refers=["ref2", "base"])
    catalog.delete("ref2")
    assert storage.stat(key).size_bytes > 0
    attempt.abort()
    assert catalog.gc().deleted == (key,)
    aged(storage, metadata=10**7).gc()
    assert files_of(storage) == {}


def refer_to(storage, prefix, base):
    """A checkpoint with the tensor of ``base``, in the file where that has it, made as a save
    would: intent first, then a look whether ``base`` is still there."""
    found = Catalog(storage).find(base).record
    (file,) = found.files
    lender = file.prefix or base
    refers = [base, lender]
    with Attempt.begin(storage, prefix, refers=refers, overwrite=True) as attempt:
        assert Catalog(storage).find(base).record.attempt == found.attempt
        yield
        borrowed = msgspec.structs.replace(file, prefix=lender)
        name = attempt.intent.attempt
        attempt.commit(msgspec.structs.replace(found, attempt=name, ordinal=9, files=(borrowed,)))
    yield


@pytest.mark.parametrize("overwriting", [False, True])
def test_a_reference_that_is_handed_on_while_a_delete_looks_is_seen(storage, overwriting):
    referring(storage, prefix="r")
    if overwriting:
        Catalog(storage).write("a", {"n": 1})
    done = []

    def hand_on(method, key):
        if method == "stat" and key == "r/metadata.json" and not done:
            save = refer_to(storage, "a", "r")
            next(save)
            Catalog(storage).delete("r")
            done.append(next(save))

    Catalog(Observed(storage, before=hand_on)).delete("base")
    assert len(done) == 1
    assert Catalog(storage).verify("a").is_intact


def test_what_was_given_up_by_gc_but_has_committed_before_and_is_referred_to_stays():
    storage = MemoryStorage()
    attempt, record = begun(storage, "b", np.arange(3))
    done = []

    def wake_up(method, key):
        if method == "create" and key == "b/metadata.json" and not done:
            done.append(key)
            with attempt:
                attempt.commit(record)
            save = refer_to(storage, "a", "b")
            assert [*save] == [None, None]
            Catalog(storage).delete("b")

    observed = Observed(storage, before=wake_up)
    observed.ages = {"intent": 10_000.0}
    Catalog(observed).gc()
    assert len(done) == 1
    assert [info.prefix for info in Catalog(storage).list()] == ["a"]
    assert Catalog(storage).verify("a").is_intact


def test_what_a_living_save_refers_to_stays_though_another_of_its_name_is_given_up(storage):
    base = write_parts(storage, "base", {"w": whole(np.arange(6.0))})
    begun(storage, "new", np.arange(3))
    again = []

    def begin_again(method, key):
        if method == "create" and key == "new/metadata.json":
            again.append(Attempt.begin(storage, "new", refers=["base"]))
            Catalog(storage).delete("base")

    observed = Observed(storage, after=begin_again)
    observed.ages = {"intent": 10_000.0}
    Catalog(observed).gc()
    assert len(again) == 1
    assert storage.stat(f"base/{base.files[0].name}").size_bytes == base.files[0].size_bytes


def test_what_a_living_save_refers_to_is_kept_until_it_is_over(storage):
    base = write_parts(storage, "base", {"w": whole(np.arange(6.0))})
    key = f"base/{base.files[0].name}"
    attempt = Attempt.begin(storage, "new", refers=["base"])
    catalog = Catalog(storage)
    catalog.delete("base")
    catalog.gc()
    assert storage.stat(key).size_bytes == base.files[0].size_bytes
    attempt.abort()
    assert key in catalog.gc().deleted
    aged(storage, metadata=10**7).gc()
    assert files_of(storage) == {}


def test_what_a_silent_save_refers_to_is_kept_until_it_is_given_up(storage):
    base = write_parts(storage, "base", {"w": whole(np.arange(6.0))})
    key = f"base/{base.files[0].name}"
    watched = Observed(storage)
    attempt, record = begun(watched, "new", np.arange(3), refers=["base"])
    file = base.files[0]
    borrowed = StoredFile(
        name=file.name, size_bytes=file.size_bytes, digest=file.digest, prefix="base"
    )

    def stop(method, k):
        if k == "new/metadata.json" and method == "create":
            watched.before = lambda m, k: None
            aged(storage, intent=10_000).delete("base")

    watched.before = stop
    with attempt:
        attempt.commit(msgspec.structs.replace(record, files=(*record.files, borrowed)))
    catalog = Catalog(storage)
    assert catalog.verify("new").is_intact
    catalog.gc()
    assert storage.stat(key).size_bytes == file.size_bytes


def test_a_silent_save_and_what_it_refers_to_go_together(storage):
    base = write_parts(storage, "base", {"w": whole(np.arange(6.0))})
    attempt = Attempt.begin(storage, "new", refers=["base"])
    Catalog(storage).delete("base")
    report = aged(storage, intent=10_000).gc()
    assert f"base/{base.files[0].name}" in report.deleted
    assert attempt.intent.key in report.deleted
    with pytest.raises(SaveError, match="lost its lease"):
        attempt.commit(base)


# --- what gc removes, and what not


def test_gc_of_an_empty_or_tidy_storage_removes_nothing(storage):
    catalog = Catalog(storage)
    assert catalog.gc().deleted == ()
    catalog.write("a", {"x": np.arange(3)})
    before = files_of(storage)
    report = catalog.gc()
    assert (report.deleted, dict(report.kept), report.swept) == ((), {}, 0)
    assert files_of(storage) == before


def test_gc_removes_files_that_no_checkpoint_names_and_leaves_foreign_ones(storage):
    catalog = Catalog(storage)
    catalog.write("a", {"x": np.arange(3)})
    for key in [
        "a/shard-7-00000000000000cc.safetensors",
        "z/shard-0-00000000000000cc-3.safetensors",
    ]:
        put(storage, key, b"left")
    foreign = ["notes.txt", "a/model.safetensors", "a/shard-x.safetensors", "z/metadata.json.bak"]
    for key in foreign:
        put(storage, key, b"not ours")
    report = catalog.gc()
    assert sorted(report.deleted) == [
        "a/shard-7-00000000000000cc.safetensors",
        "z/shard-0-00000000000000cc-3.safetensors",
    ]
    assert leftovers(storage) == sorted(foreign)


def test_gc_removes_a_file_of_the_committed_save_itself_that_its_record_does_not_name():
    storage = MemoryStorage()
    write_parts(storage, "a", {"w": whole(np.arange(3))})
    put(storage, f"a/shard-0-{ATTEMPT}-9.safetensors", b"a part that was given up")
    assert Catalog(storage).gc().deleted == (f"a/shard-0-{ATTEMPT}-9.safetensors",)
    assert Catalog(storage).verify("a").is_intact


def test_a_save_that_begins_while_gc_looks_is_left_alone():
    storage = MemoryStorage()
    state = {}

    def begin_after_listing(method, key):
        if method == "list" and key == "" and not state:
            state["save"] = begun(storage, "a", np.arange(3))
            put(storage, state["save"][0].intent.key + ".x", b"")

    def hide_intent_from_listing():
        class Late(Observed):
            def list(self, prefix=""):
                for info in super().list(prefix):
                    if "intent" not in info.key:
                        yield info

        return Late(storage, before=begin_after_listing)

    report = Catalog(hide_intent_from_listing()).gc()
    assert report.deleted == ()
    assert report.kept == {"a": "a save began while gc was looking"}
    attempt, record = state["save"]
    with attempt:
        attempt.commit(record)
    assert Catalog(storage).verify("a").is_intact


def test_a_save_that_commits_while_gc_looks_is_left_alone():
    storage = MemoryStorage()
    attempt, record = begun(storage, "a", np.arange(3))
    done = []

    def commit(method, key):
        if method == "create" and key == "a/metadata.json" and not done:
            done.append(key)
            with attempt:
                attempt.commit(record)

    observed = Observed(storage, before=commit)
    observed.ages = {"intent": 10_000.0}
    report = Catalog(observed).gc()
    assert report.deleted == ()
    assert list(report.kept) == ["a"]
    assert "it changed while gc was looking" in report.kept["a"]
    assert Catalog(storage).verify("a").is_intact
    assert leftovers(storage) == []


def test_a_file_that_comes_while_gc_looks_and_is_of_no_checkpoint_is_left_alone():
    storage = MemoryStorage()
    Catalog(storage).write("a", {"n": 1})

    def come(method, key):
        if method == "list":
            put(storage, "metadata.json", b'{"format":"holdfast"}')

    report = Catalog(Observed(storage, after=come)).gc()
    assert (report.deleted, report.kept) == ((), {})
    assert storage.read("metadata.json") == b'{"format":"holdfast"}'


def test_a_save_that_is_over_before_its_intent_is_read_has_its_files():
    storage = MemoryStorage()
    attempt, record = begun(storage, "a", np.arange(3))
    done = []

    def commit(method, key):
        if method == "stat" and key == attempt.intent.key and not done:
            done.append(key)
            with attempt:
                attempt.commit(record)

    report = Catalog(Observed(storage, before=commit)).gc()
    assert (len(done), report.deleted, report.kept) == (1, (), {})
    assert Catalog(storage).verify("a").is_intact


def test_tombstones_are_not_listed_and_stay_for_a_week(storage):
    begun(storage, "a", np.arange(3))
    catalog = Catalog(storage)
    aged(storage, intent=10_000).gc()
    assert leftovers(storage) == ["a/metadata.json"]
    assert catalog.list() == []
    for call in (catalog.info, catalog.read, catalog.open, catalog.delete, catalog.verify):
        with pytest.raises(CheckpointNotFoundError):
            call("a")
    week_s = 7 * 24 * 3600
    aged(storage, metadata=week_s - 100).gc()
    assert leftovers(storage) == ["a/metadata.json"]
    assert aged(storage, metadata=week_s).gc().deleted == ("a/metadata.json",)
    assert files_of(storage) == {}


def test_a_tombstone_that_a_save_replaces_while_gc_looks_is_left_alone():
    storage = MemoryStorage()
    begun(storage, "a", np.arange(3))
    aged(storage, intent=10_000).gc()
    saved = []

    def save(method, key):
        if method == "delete" and key == "a/metadata.json":
            saved.append(Catalog(storage).write("a", {"n": 1}))

    observed = Observed(storage, before=save)
    observed.ages = {"metadata": 8 * 24 * 3600.0}
    assert Catalog(observed).gc().deleted == ()
    assert len(saved) == 1
    assert Catalog(storage).read("a") == {"n": 1}


def test_old_clock_objects_are_removed():
    storage = MemoryStorage()
    put(storage, "clock-0123456789abcdef", b"")
    put(storage, "clock-of-mine", b"")
    assert Catalog(storage).gc().deleted == ()
    assert aged(storage, clock=3500).gc().deleted == ()
    assert aged(storage, clock=3600).gc().deleted == ("clock-0123456789abcdef",)


# --- records and intents that cannot be read


def newer(storage, prefix):
    put(storage, f"{prefix}/metadata.json", b'{"format":"holdfast","version":2,"what":"ever"}')


def corrupted(storage, prefix):
    data = bytearray(storage.read(f"{prefix}/metadata.json"))
    data[len(data) // 2] ^= 4
    put(storage, f"{prefix}/metadata.json", bytes(data))


@pytest.mark.parametrize(
    ("damage", "error"), [(newer, IncompatibleVersionError), (corrupted, CorruptedError)]
)
def test_a_record_that_cannot_be_read(storage, caplog, damage, error):
    catalog = Catalog(storage)
    catalog.write("a", {"x": np.arange(3)})
    catalog.write("b", {"x": np.arange(3)})
    damage(storage, "a")
    put(storage, "c/shard-0-00000000000000cc.safetensors", b"left")
    begun(storage, "d", np.arange(3))
    before = files_of(storage)

    with caplog.at_level(logging.WARNING, "holdfast.catalog"):
        assert [info.prefix for info in catalog.list()] == ["b"]
    assert "left out of the list" in caplog.text
    assert "a/metadata.json" in caplog.text

    report = aged(storage, intent=10_000).gc()
    assert report.deleted == ()
    assert "may refer to these files" in report.kept["c"]
    assert "may refer to these files" in report.kept["d"]
    assert "its commit record cannot be read" in report.kept["a"]
    assert files_of(storage) == before

    for call in (catalog.info, catalog.read, catalog.open, catalog.delete):
        with pytest.raises(error, match=r"a/metadata\.json"):
            call("a")
    with pytest.raises(error) as caught:
        catalog.write("a", {})
    with pytest.raises(error) as caught:
        catalog.delete("a")
    assert "rollback removes" in caught.value.__notes__[0]
    (found,) = catalog.verify("a").damage
    assert (found.file, found.tensor) == ("a/metadata.json", None)

    catalog.rollback("a")
    assert [info.prefix for info in catalog.list()] == ["b"]
    assert [info.key for info in storage.list("a/shard")] == []
    aged(storage, intent=10_000).gc()
    aged(storage, metadata=10**7).gc()
    assert leftovers(storage) == []
    assert catalog.verify("b").is_intact


def test_while_one_record_cannot_be_read_no_file_of_another_is_deleted(storage):
    catalog = Catalog(storage)
    for prefix in "abc":
        catalog.write(prefix, {"x": np.arange(3)})
    corrupted(storage, "a")
    shards = [info.key for info in storage.list() if "shard" in info.key]
    for remove in (lambda: catalog.delete("b"), lambda: catalog.rollback("c")):
        with pytest.raises(StorageError, match=r"no checkpoint any more, .* what is in a cannot"):
            remove()
    assert [info.key for info in storage.list() if "shard" in info.key] == shards
    assert catalog.list() == []
    catalog.rollback("a")
    catalog.gc()
    aged(storage, metadata=10**7).gc()
    assert files_of(storage) == {}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b'{"format":"holdfast-intent","version":2}',
        INTENT % b"1e308",
        INTENT % b"-5",
        b"x" * (17 * 1024 * 1024),
    ],
    ids=["empty", "cut", "deep", "newer", "huge lease", "negative lease", "huge"],
)
def test_an_intent_that_cannot_be_read_counts_as_alive_for_a_usual_lease(data):
    storage = MemoryStorage()
    catalog = Catalog(storage)
    catalog.write("a", {"x": np.arange(3)})
    put(storage, "z/intent-00000000000000dd.json", data)
    put(storage, "c/shard-0-00000000000000cc.safetensors", b"left")
    assert [info.prefix for info in catalog.list()] == ["a"]
    report = catalog.gc()
    assert report.deleted == ()
    assert report.kept["z"] == "a save is under way"
    assert "cannot be read, and it may refer" in report.kept["c"]
    report = aged(storage, intent=1000).gc()
    assert "z/intent-00000000000000dd.json" in report.deleted
    assert "c/shard-0-00000000000000cc.safetensors" in report.deleted
    assert catalog.verify("a").is_intact


def test_an_intent_under_the_name_of_another_attempt_counts_as_unreadable():
    storage = MemoryStorage()
    attempt = Attempt.begin(storage, "a")
    storage.create("b/intent-00000000000000dd.json", encode_intent(attempt.intent))
    attempt.abort()
    assert Catalog(storage).gc().kept == {"b": "a save is under way"}


# --- delete and rollback


def test_delete_removes_a_checkpoint_and_nothing_else(storage):
    catalog = Catalog(storage)
    catalog.write("a", {"x": np.arange(3)})
    catalog.write("a/inner", {"x": np.arange(4)})
    catalog.delete("a")
    assert [info.prefix for info in catalog.list()] == ["a/inner"]
    assert catalog.verify("a/inner").is_intact
    assert leftovers(storage) == []
    with pytest.raises(CheckpointNotFoundError, match="no committed checkpoint") as caught:
        catalog.delete("a")
    assert caught.value.path == f"{storage.url}/a"


def test_a_delete_does_not_take_a_checkpoint_that_has_just_replaced_the_one_it_meant():
    storage = MemoryStorage()
    catalog = Catalog(storage)
    catalog.write("a", {"n": 1})
    once = iter([1])

    def overwrite(method, key):
        if method == "replace" and key == "a/metadata.json" and next(once, None):
            catalog.write("a", {"n": 2}, overwrite=True)

    with pytest.raises(StorageError, match="what they made of it is left as it is; try again"):
        Catalog(Observed(storage, before=overwrite)).delete("a")
    assert catalog.read("a") == {"n": 2}


def test_a_save_that_overwrites_what_is_deleted_meanwhile_fails_cleanly(storage):
    catalog = Catalog(storage)
    catalog.write("a", {"x": np.arange(2)})
    attempt, record = begun(storage, "a", np.arange(5), overwrite=True)
    catalog.delete("a")
    with pytest.raises(SaveError, match="deleted or gave up"), attempt:
        attempt.commit(record)
    assert catalog.list() == []
    catalog.gc()
    aged(storage, metadata=10**7).gc()
    assert files_of(storage) == {}


def test_files_that_cannot_be_deleted_are_reported_and_left_to_gc():
    inner = MemoryStorage()
    write_parts(
        inner,
        "a",
        {"w": (np.arange(4), Grid((4,), (1,)), [Part(Box((i,), (i + 1,)), i) for i in range(4)])},
    )
    faults = [Fault("delete", 3, StorageError("stuck", path="k")), Fault("delete", 4, OSError("x"))]
    with pytest.raises(StorageError, match=r"not all of its files are removed: 1 could not be"):
        Catalog(FaultyStorage(inner, faults[:1])).delete("a")
    assert Catalog(inner).list() == []
    assert len([*inner.list("a/shard")]) == 1
    assert len(Catalog(inner).gc().deleted) == 1


@pytest.mark.parametrize("operation", ["delete", "rollback"])
def test_a_storage_without_room_for_a_tombstone_can_be_emptied(operation):
    inner = MemoryStorage()
    Catalog(inner).write("a", {"x": np.arange(3)})
    faulty = FaultyStorage(inner, [Fault("replace", 1, NoSpaceError("full"))])
    getattr(Catalog(faulty), operation)("a")
    assert faulty.unfired == ()
    assert files_of(inner) == {}


@pytest.mark.parametrize("operation", ["delete", "rollback"])
def test_without_room_for_a_tombstone_a_record_stays_that_keeps_a_given_up_save_out(operation):
    inner = MemoryStorage()
    Catalog(inner).write("a", {"x": np.arange(3)})
    begun(inner, "a", np.arange(9), overwrite=True)
    aged(inner, intent=10_000).gc()
    before = files_of(inner)
    faulty = FaultyStorage(inner, [Fault("replace", 1, NoSpaceError("full"))])
    with pytest.raises(NoSpaceError) as caught:
        getattr(Catalog(faulty), operation)("a")
    assert "delete another checkpoint first" in caught.value.__notes__[0]
    assert files_of(inner) == before


def test_without_room_a_record_that_was_just_replaced_stays():
    inner = MemoryStorage()
    saver = Catalog(inner)
    saver.write("a", {"n": 1})

    class Full(Observed):
        def replace(self, key, data, expected):
            raise NoSpaceError("full", path=key)

    def overwrite(method, key):
        if method == "delete" and key == "a/metadata.json":
            saver.write("a", {"n": 2}, overwrite=True)

    with pytest.raises(StorageError, match="what they made of it is left as it is"):
        Catalog(Full(inner, before=overwrite)).delete("a")
    assert saver.read("a") == {"n": 2}


def test_a_delete_that_lifts_its_tombstone_does_not_take_the_save_that_came_just_before():
    inner = MemoryStorage()
    saver = Catalog(inner)
    saver.write("a", {"x": np.arange(3), "n": 1})
    saved = []

    def save(method, key):
        if method == "delete" and key == "a/metadata.json":
            saved.append(saver.write("a", {"x": np.arange(4), "n": 2}))

    Catalog(Observed(inner, before=save)).delete("a")
    assert len(saved) == 1
    assert saver.read("a")["n"] == 2
    assert leftovers(inner) == []


class WithoutComparedDeletes(Observed):
    """As object stores are."""

    def delete(self, key, *, expected=None):
        if expected is not None:
            raise StorageError("this storage cannot delete one version", path=key)
        super().delete(key)


def test_a_tombstone_that_could_not_be_lifted_just_now_is_told():
    storage = MemoryStorage()
    Catalog(storage).write("a", {"n": 1})

    def fail(method, key):
        if method == "delete" and key == "a/metadata.json":
            raise TransientStorageError("slow down")

    with pytest.raises(StorageError, match="not all of its files are removed: slow down"):
        Catalog(Observed(storage, before=fail)).delete("a")
    assert Catalog(storage).list() == []


def test_a_storage_that_cannot_delete_one_version_keeps_tombstones_and_takes_new_saves():
    inner = MemoryStorage()
    catalog = Catalog(WithoutComparedDeletes(inner))
    for n in range(3):
        catalog.write("a", {"x": np.arange(3), "n": n})
        assert catalog.read("a")["n"] == n
        catalog.delete("a")
        assert catalog.list() == []
        assert leftovers(inner) == ["a/metadata.json"]
        assert inner.stat("a/metadata.json").size_bytes < 350
    catalog.rollback("a")
    assert leftovers(inner) == ["a/metadata.json"]
    assert aged(inner, metadata=10**7).gc().deleted == ("a/metadata.json",)


def test_a_delete_whose_answer_was_lost_and_whose_tombstone_was_fenced_has_deleted():
    inner = MemoryStorage()
    Catalog(inner).write("a", {"x": np.arange(3)})
    begun(inner, "a", np.arange(9), overwrite=True)

    class Lossy(Observed):
        lost = False

        def replace(self, key, data, expected):
            info = super().replace(key, data, expected)
            if not self.lost:
                self.lost = True
                aged(inner, intent=10_000).gc()
                raise TransientStorageError("connection reset", path=key)
            return info

    Catalog(retrying(Lossy(inner), clock=FakeClock())).delete("a")
    assert Catalog(inner).list() == []
    assert leftovers(inner) == ["a/metadata.json"]
    assert find_record(inner, "a").record.fence == 1


# --- files of others


@pytest.mark.parametrize("data", [b'{"hf": 1}', b"[1, 2]", b"x" * (65 * 1024 * 1024)])
def test_a_metadata_file_of_somebody_else_is_left_alone_and_disturbs_nobody(storage, data, caplog):
    put(storage, "tokenizer/metadata.json", data)
    catalog = Catalog(storage)
    with caplog.at_level(logging.INFO, "holdfast.catalog"):
        catalog.write("a", {"x": np.arange(3)})
        catalog.write("b", {"x": np.arange(3)})
        assert [(info.prefix, info.ordinal) for info in catalog.list()] == [("b", 2), ("a", 1)]
        catalog.delete("a")
        put(storage, "c/shard-0-00000000000000cc.safetensors", b"left")
        report = catalog.gc()
    assert "tokenizer" not in caplog.text
    assert report.deleted == ("c/shard-0-00000000000000cc.safetensors",)
    assert dict(report.kept) == {}
    assert leftovers(storage) == ["tokenizer/metadata.json"]
    with pytest.raises(StorageError, match="this file is not holdfast's, so it stays"):
        catalog.rollback("tokenizer")
    for overwrite in (False, True):
        with pytest.raises(CorruptedError, match="this file is not holdfast's"):
            catalog.write("tokenizer", {"n": 1}, overwrite=overwrite)
    assert storage.read("tokenizer/metadata.json") == data


@pytest.mark.parametrize("damage", ["first bytes", "zeroed", "empty"])
def test_a_record_whose_first_bytes_are_damaged_is_not_taken_for_somebody_elses(storage, damage):
    referring(storage)
    Catalog(storage).delete("base")
    data = storage.read("ref/metadata.json")
    broken = {"first bytes": b"[" + data[1:], "zeroed": bytes(len(data)), "empty": b""}[damage]
    put(storage, "ref/metadata.json", broken)
    before = files_of(storage)
    report = aged(storage, intent=10_000).gc()
    assert report.deleted == ()
    assert "its commit record cannot be read" in report.kept["ref"]
    assert files_of(storage) == before
    with pytest.raises(CorruptedError) as caught:
        Catalog(storage).write("ref", {}, overwrite=True)
    assert "rollback" in caught.value.__notes__[0]
    Catalog(storage).rollback("ref")
    Catalog(storage).write("ref", {"n": 1})
    assert Catalog(storage).read("ref") == {"n": 1}


def test_looking_after_a_place_where_nothing_is_makes_nothing(tmp_path):
    catalog = Catalog(tmp_path / "never")
    assert catalog.gc().deleted == ()
    assert catalog.list() == []
    catalog.rollback("a")
    with pytest.raises(CheckpointNotFoundError):
        catalog.delete("a")
    assert not (tmp_path / "never").exists()


def test_a_lease_is_honoured_for_a_day_at_most():
    storage = MemoryStorage()
    put(storage, "z/intent-00000000000000dd.json", INTENT % b"1e9")
    assert aged(storage, intent=23 * 3600).gc().kept == {"z": "a save is under way"}
    assert "z/intent-00000000000000dd.json" in aged(storage, intent=25 * 3600).gc().deleted
    for make in (Catalog, lambda s, **k: Attempt.begin(s, "a", **k)):
        with pytest.raises(ValueError, match="lease_s must be at most 86400 seconds, not 100000"):
            make(storage, lease_s=100_000)


def test_gc_of_a_full_storage_removes_what_needs_no_tombstone():
    inner = MemoryStorage()
    attempt, _ = begun(inner, "a", np.arange(9))
    put(inner, "b/shard-0-00000000000000cc.safetensors", b"left")
    faulty = FaultyStorage(inner, [Fault("create", 2, NoSpaceError("full"))])
    report = aged(faulty, intent=10_000).gc()
    assert report.deleted == ("b/shard-0-00000000000000cc.safetensors",)
    assert "no room for a tombstone; try again" in report.kept["a"]
    assert attempt.shard_key(0) in aged(faulty, intent=10_000).gc().deleted


def test_a_save_is_newer_than_those_that_cannot_be_read_just_now():
    inner = MemoryStorage()
    for prefix in "abc":
        Catalog(inner).write(prefix, {})
    faults = [Fault("read", nth, StorageError("bad sector")) for nth in (2, 3)]
    Catalog(FaultyStorage(inner, faults)).write("d", {})
    assert [info.prefix for info in Catalog(inner).list()] == ["d", "c", "b", "a"]
    assert Catalog(inner).info("d").ordinal == 4


def test_rollback_removes_everything_under_a_prefix_committed_or_not(storage):
    catalog = Catalog(storage)
    catalog.write("a", {"x": np.arange(3)})
    put(storage, "a/shard-5-00000000000000cc.safetensors", b"left")
    catalog.rollback("a")
    assert files_of(storage) == {}
    catalog.rollback("a")
    catalog.rollback("never there")
    put(storage, "b/shard-5-00000000000000cc.safetensors", b"left")
    catalog.rollback("b")
    assert files_of(storage) == {}


def test_rollback_refuses_while_a_save_is_under_way(storage):
    catalog = Catalog(storage)
    catalog.write("a", {"x": np.arange(3)})
    attempt, record = begun(storage, "a", np.arange(5), overwrite=True)
    before = files_of(storage)
    with pytest.raises(StorageError, match=r"a save is under way here \(process \d+ on .*\); wait"):
        catalog.rollback("a")
    assert files_of(storage) == before
    with attempt:
        attempt.commit(record)
    catalog.gc()
    assert catalog.verify("a").is_intact
    assert leftovers(storage) == []


def test_a_save_that_began_before_a_rollback_of_a_silent_one_cannot_commit(storage):
    watched = Observed(storage)
    attempt, record = begun(watched, "a", np.arange(5))

    def stop(method, key):
        if key == "a/metadata.json" and method == "create":
            aged(storage, intent=10_000).rollback("a")

    watched.before = stop
    with pytest.raises(SaveError, match="nothing was committed"), attempt:
        attempt.commit(record)
    assert Catalog(storage).list() == []
    assert leftovers(storage) == ["a/metadata.json"]
    found = find_record(storage, "a")
    assert found is not None
    assert (found.is_committed, found.record.fence) == (False, 1)
    collect_garbage(storage, tombstone_s=-1)
    assert files_of(storage) == {}


def test_a_fenced_record_is_the_same_checkpoint(storage):
    catalog = Catalog(storage)
    info = catalog.write("a", {"x": np.arange(3)}, step=4)
    begun(storage, "a", np.arange(9), overwrite=True)
    aged(storage, intent=10_000).gc()
    assert catalog.info("a") == info
    assert catalog.read("a")["x"].tolist() == [0, 1, 2]
    record = catalog.open("a")._found.record
    assert record.fence == 1
    assert reread(record, fence=0) != storage.read("a/metadata.json")
