import logging
import os
import subprocess
import sys
from collections import Counter

import msgspec
import numpy as np
import pytest
from catalog_schedules import World
from catalog_tools import Observed, aged, begun, files_of, leftovers, put

from holdfast.catalog import (
    Attempt,
    Catalog,
    PruneReport,
    keep_best,
    keep_every,
    keep_last,
    keep_within,
)
from holdfast.catalog._committed import find_committed, utc_now
from holdfast.errors import (
    CheckpointNotFoundError,
    NoSpaceError,
    ObjectNotFoundError,
    SaveError,
    StorageError,
    TransientStorageError,
)
from holdfast.format import LeafRef, encode_record, encode_value
from holdfast.storage import LocalStorage, MemoryStorage
from holdfast.testing import Fault, FaultyStorage

SEED = int(os.environ.get("HOLDFAST_SCHEDULE_SEED", "0"))
WEEKS_S = 30 * 24 * 3600.0


@pytest.fixture(params=["local", "memory"])
def storage(request, tmp_path):
    return LocalStorage(tmp_path / "root") if request.param == "local" else MemoryStorage()


def filled(storage, count=5, *, nbytes=24):
    """Checkpoints ``s0`` to ``s4``, of steps 0 to 400, with losses 4 to 0."""
    catalog = Catalog(storage)
    for n in range(count):
        state = {"w": np.full(nbytes // 8, n), "n": n}
        catalog.write(f"s{n}", state, step=100 * n, metrics={"loss": float(count - 1 - n)})
    return catalog


def names(catalog):
    return [info.prefix for info in catalog.list()]


def shard_of(storage, prefix):
    (info,) = storage.list(f"{prefix}/shard-")
    return info.key


def missing(storage, key):
    storage.delete(key)


def cut(storage, key):
    put(storage, key, storage.read(key)[:-1])


def flipped(byte):
    def flip(storage, key):
        data = bytearray(storage.read(key))
        data[byte] ^= 1
        put(storage, key, bytes(data))

    return flip


# --- what goes, and what stays


def test_what_no_rule_holds_goes_and_the_rest_is_whole(storage):
    catalog = filled(storage, 10)
    report = catalog.prune(keep_last(2) | keep_every(400) | keep_best("loss", 3))
    assert report.deleted == ("s1", "s2", "s3", "s5", "s6")
    assert report.failed == {}
    assert report.kept == {
        "s9": ("the newest", "one of the 2 newest", "loss 0 is among the 3 lowest"),
        "s8": (
            "one of the 2 newest",
            "step 800 is a multiple of 400",
            "loss 1 is among the 3 lowest",
        ),
        "s7": ("loss 2 is among the 3 lowest",),
        "s4": ("step 400 is a multiple of 400",),
        "s0": ("step 0 is a multiple of 400",),
    }
    assert names(catalog) == ["s9", "s8", "s7", "s4", "s0"]
    assert all(catalog.verify(prefix).is_intact for prefix in names(catalog))
    assert leftovers(storage) == []
    assert catalog.prune(keep_last(2) | keep_every(400) | keep_best("loss", 3)).deleted == ()


def test_a_dry_run_says_what_would_go_and_changes_nothing(storage):
    catalog = filled(storage)
    before = files_of(storage)
    planned = catalog.prune(keep_last(2), dry_run=True)
    assert planned.deleted == ("s0", "s1", "s2")
    assert files_of(storage) == before
    assert catalog.prune(keep_last(2)) == planned
    assert names(catalog) == ["s4", "s3"]


def test_age_is_judged_by_the_time_in_the_record():
    storage = MemoryStorage()
    catalog = filled(storage, 3)
    found = catalog.find("s0").record
    old = msgspec.structs.replace(found, created="2020-01-01T00:00:00Z")
    put(storage, "s0/metadata.json", encode_record(old))
    assert catalog.prune(keep_within(24)).deleted == ("s0",)
    assert names(catalog) == ["s2", "s1"]


def test_an_empty_storage_is_pruned_without_a_trace(tmp_path):
    assert Catalog(tmp_path / "never").prune(keep_last(1)) == PruneReport()
    assert not (tmp_path / "never").exists()


def test_only_what_is_committed_is_judged_and_other_objects_stay(storage):
    catalog = filled(storage, 2)
    attempt, record = begun(storage, "under way", np.arange(3))
    put(storage, "s0/notes.txt", b"mine")
    put(storage, "tokenizer/metadata.json", b'{"hf": 1}')
    assert catalog.prune(keep_last(1)).deleted == ("s0",)
    assert storage.read("s0/notes.txt") == b"mine"
    with attempt:
        attempt.commit(record, next_ordinal=lambda: 9)
    assert names(catalog) == ["under way", "s1"]
    assert leftovers(storage) == ["s0/notes.txt", "tokenizer/metadata.json"]


def test_metrics_that_are_no_numbers_do_not_keep_a_checkpoint():
    catalog = Catalog("memory://")
    for n in range(3):
        catalog.write(f"s{n}", {"n": n}, metrics={"loss": float("nan")})
    assert catalog.prune(keep_best("loss", 2)).deleted == ("s0", "s1")


def test_a_policy_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="retention must be a Retention, not 3"):
        Catalog("memory://").prune(3)


# --- the newest that is whole


@pytest.mark.parametrize(
    "damage",
    [missing, cut, flipped(0), flipped(20), flipped(-1)],
    ids=["missing", "cut", "length of the header", "header", "table"],
)
def test_what_is_not_whole_does_not_make_older_ones_go(storage, damage, caplog):
    catalog = filled(storage)
    damage(storage, shard_of(storage, "s4"))
    damage(storage, shard_of(storage, "s3"))
    with caplog.at_level(logging.WARNING, "holdfast.catalog"):
        report = catalog.prune(keep_last(1))
    assert report.deleted == ("s0", "s1")
    assert report.kept["s4"] == ("newer than the newest that is whole", "the newest")
    assert report.kept["s3"] == ("newer than the newest that is whole",)
    assert report.kept["s2"] == ("the newest that is whole",)
    assert "not whole, and passed over when pruning: s4/shard-0" in caplog.text
    assert catalog.verify("s2").is_intact


def test_if_none_is_whole_all_stay(storage):
    catalog = filled(storage, 3)
    for prefix in ("s0", "s1", "s2"):
        missing(storage, shard_of(storage, prefix))
    report = catalog.prune(keep_last(1))
    assert report.deleted == ()
    assert report.kept["s0"] == ("no checkpoint here is whole, so that none is deleted",)
    assert names(catalog) == ["s2", "s1", "s0"]


def test_a_checkpoint_is_not_whole_without_the_files_it_refers_to(storage):
    catalog = filled(storage, 3)
    incremental(storage, "ref", 7, base="s0")
    missing(storage, shard_of(storage, "s0"))
    report = catalog.prune(keep_last(1))
    assert report.kept["ref"] == ("newer than the newest that is whole", "the newest")
    assert report.kept["s2"] == ("the newest that is whole",)


def test_to_know_that_one_is_whole_next_to_nothing_is_read():
    inner = MemoryStorage()
    filled(inner, 3, nbytes=32 * 1024 * 1024)
    watched = Observed(inner)
    assert Catalog(watched).prune(keep_last(1)).deleted == ("s0", "s1")
    assert sum(watched.read_bytes.values()) < 128 * 1024
    assert {key.partition("/")[0] for key in watched.read_bytes} == {"s2"}


def test_if_nothing_goes_there_is_only_a_look_at_the_records():
    inner = MemoryStorage()
    filled(inner, 3)
    watched = FaultyStorage(inner)
    catalog = Catalog(watched)
    catalog.list()
    seen = len(watched.calls)
    assert catalog.prune(keep_last(3)).deleted == ()
    assert {call.method for call in watched.calls[seen:]} == {"list", "next"}


# --- what goes wrong


def test_one_that_cannot_be_deleted_does_not_keep_the_others():
    inner = MemoryStorage()
    filled(inner)
    faults = [Fault("replace", 2, StorageError("refused", path="s1/metadata.json"))]
    report = Catalog(FaultyStorage(inner, faults)).prune(keep_last(2))
    assert report.deleted == ("s0", "s2")
    assert report.failed == {"s1": "refused [path s1/metadata.json]"}
    assert list(report.kept) == ["s4", "s3"]
    assert names(Catalog(inner)) == ["s4", "s3", "s1"]
    assert Catalog(inner).verify("s1").is_intact
    assert leftovers(inner) == []


def test_files_that_cannot_be_removed_are_told_of_and_left_to_gc():
    inner = MemoryStorage()
    filled(inner)
    faults = [Fault("delete", 4, StorageError("stuck", path="k"))]  # clock, shard, tombstone, shard
    report = Catalog(FaultyStorage(inner, faults)).prune(keep_last(2))
    assert report.deleted == ("s0", "s2")
    assert "no checkpoint any more, but not all of its files" in report.failed["s1"]
    assert names(Catalog(inner)) == ["s4", "s3"]
    Catalog(inner).gc()
    aged(inner, metadata=10**7).gc()
    assert leftovers(inner) == []


def test_if_the_storage_cannot_be_looked_at_nothing_is_lost():
    inner = MemoryStorage()
    filled(inner)
    before = files_of(inner)
    for method in ("list", "read", "read_into"):
        faulty = FaultyStorage(inner, [Fault(method, 1, TransientStorageError("down"))])
        with pytest.raises(TransientStorageError):
            Catalog(faulty).prune(keep_last(1))
        assert faulty.unfired == ()
    assert files_of(inner) == before


def test_if_nobody_can_see_who_needs_the_files_they_stay_and_gc_removes_them():
    inner = MemoryStorage()
    filled(inner, 3)
    faulty = FaultyStorage(inner, [Fault("create", 1, StorageError("no clock"))])
    report = Catalog(faulty).prune(keep_last(1))
    assert report.deleted == ()
    assert list(report.failed) == ["s0", "s1"]
    assert all("no checkpoint any more" in problem for problem in report.failed.values())
    assert names(Catalog(inner)) == ["s2"]
    assert [*inner.list("s1/shard")] != []
    Catalog(inner).gc()
    aged(inner, metadata=10**7).gc()
    assert leftovers(inner) == []


def test_while_a_record_cannot_be_read_all_stay(storage):
    catalog = filled(storage)
    data = bytearray(storage.read("s1/metadata.json"))
    data[len(data) // 2] ^= 4
    put(storage, "s1/metadata.json", bytes(data))
    before = files_of(storage)
    report = catalog.prune(keep_last(2))
    assert report.deleted == ()
    assert list(report.kept) == ["s4", "s3"]
    assert list(report.failed) == ["s0", "s2"]
    assert "what is in s1 cannot be read" in report.failed["s0"]
    assert "rollback" in report.failed["s0"]
    assert files_of(storage) == before
    catalog.rollback("s1")
    assert catalog.prune(keep_last(2)).deleted == ("s0", "s2")
    aged(storage, metadata=10**7).gc()
    assert leftovers(storage) == []


def test_a_full_disk_can_be_pruned():
    inner = MemoryStorage()
    filled(inner, 3)

    class Full(Observed):
        def replace(self, key, data, expected):
            raise NoSpaceError("full", path=key)

    assert Catalog(Full(inner)).prune(keep_last(1)).deleted == ("s0", "s1")
    assert names(Catalog(inner)) == ["s2"]
    assert leftovers(inner) == []


# --- files that others refer to


def incremental(storage, prefix, number, *, base=None, lease_s=600.0, clock=None):
    """Save a number, and refer to the ``w`` of another checkpoint, the newest if none is named.
    ``None`` if that was deleted meanwhile."""
    catalog = Catalog(storage, lease_s=lease_s, clock=clock)
    listed = catalog.list()
    if base is None and not listed:
        return None
    try:
        found = find_committed(storage, base or listed[0].prefix)
    except CheckpointNotFoundError:
        return None
    (file,) = found.record.files
    refers = [found.prefix, *([file.prefix] if file.prefix else [])]
    with Attempt.begin(storage, prefix, refers=refers, lease_s=lease_s, clock=clock) as attempt:
        try:
            again = find_committed(storage, found.prefix)
        except CheckpointNotFoundError:
            return None
        if again.record.attempt != found.record.attempt:
            return None
        record = msgspec.structs.replace(
            found.record,
            attempt=attempt.intent.attempt,
            created=utc_now(),
            step=None,
            files=(msgspec.structs.replace(file, prefix=file.prefix or found.prefix),),
            tree=encode_value({"w": LeafRef(kind="array", name="w"), "n": number}),
        )
        return catalog.commit(attempt, record)


def test_files_that_a_kept_checkpoint_refers_to_stay_until_it_goes_too(storage):
    catalog = filled(storage, 3)
    incremental(storage, "ref", 7, base="s1")
    incremental(storage, "ref2", 8, base="ref")
    key = shard_of(storage, "s1")
    assert catalog.prune(keep_last(2)).deleted == ("s0", "s1", "s2")
    assert catalog.read("ref")["w"].tolist() == catalog.read("ref2")["w"].tolist() == [1, 1, 1]
    catalog.gc()
    assert catalog.prune(keep_last(1)).deleted == ("ref",)
    assert catalog.read("ref2")["w"].tolist() == [1, 1, 1]
    assert leftovers(storage) == []
    catalog.write("new", {"n": 9})
    assert catalog.prune(keep_last(1)).deleted == ("ref2",)
    with pytest.raises(ObjectNotFoundError):
        storage.stat(key)
    assert leftovers(storage) == []


def test_files_that_a_save_under_way_refers_to_stay_until_it_is_over(storage):
    catalog = filled(storage, 3)
    key = shard_of(storage, "s1")
    attempt = Attempt.begin(storage, "new", refers=["s1"])
    assert catalog.prune(keep_last(1)).deleted == ("s0", "s1")
    catalog.gc()
    assert storage.stat(key).size_bytes > 0
    attempt.abort()
    catalog.gc()
    with pytest.raises(ObjectNotFoundError):
        storage.stat(key)
    aged(storage, metadata=10**7).gc()
    assert leftovers(storage) == []


# --- at the same time


def test_what_is_saved_again_or_deleted_meanwhile_is_left_as_it_is():
    inner = MemoryStorage()
    others = filled(inner)
    once = iter([1])

    def meanwhile(method, key):
        if method == "read_into" and next(once, None):  # while it looks whether s4 is whole
            others.write("s0", {"n": 100}, overwrite=True)
            others.delete("s1")

    report = Catalog(Observed(inner, before=meanwhile)).prune(keep_last(2))
    assert report.deleted == ("s2",)
    assert report.failed == {}
    assert report.kept["s0"] == ("saved again meanwhile",)
    assert "s1" not in report.kept
    assert names(others) == ["s0", "s4", "s3"]
    assert others.read("s0") == {"n": 100}


def test_a_newest_that_is_deleted_meanwhile_does_not_take_the_one_below_along():
    inner = MemoryStorage()
    others = filled(inner, 3)
    once = iter([1])

    def meanwhile(method, key):
        if key is not None and key.startswith("s2/shard") and next(once, None):
            others.delete("s2")

    report = Catalog(Observed(inner, before=meanwhile)).prune(keep_last(1))
    assert report.deleted == ("s0",)
    assert names(others) == ["s1"]


def save(prefix, number):
    def act(storage, clock):
        catalog = Catalog(storage, lease_s=10.0, clock=clock)
        return catalog.write(prefix, {"w": np.full(3, number), "n": number}).ordinal

    return act


def refer(prefix, number, base=None):
    def act(storage, clock):
        record = incremental(storage, prefix, number, base=base, lease_s=10.0, clock=clock)
        return None if record is None else record.ordinal

    return act


def prune(retention):
    def act(storage, clock):
        catalog = Catalog(storage)
        return [catalog.prune(retention) for _ in range(2)]

    return act


def collect(storage, clock):
    for _ in range(2):
        Catalog(storage).gc()


ACTORS = {
    "pruner": prune(keep_last(1)),
    "second pruner": prune(keep_last(1)),
    "other pruner": prune(keep_every(200)),
    "saver": save("b", 10),
    "referrer": refer("c", 11),
    "second referrer": refer("a", 12),
    "referrer to s0": refer("d", 13, "s0"),
    "gc": collect,
}
SAVERS = ("saver", "referrer", "second referrer", "referrer to s0")
SETS = [
    ("pruner", "second pruner"),
    ("pruner", "referrer"),
    ("pruner", "referrer to s0", "gc"),
    ("pruner", "other pruner", "referrer"),
    ("pruner", "saver", "referrer", "gc"),
    ("pruner", "second pruner", "referrer", "second referrer"),
    ("pruner", "second pruner", "other pruner", "saver", "referrer", "second referrer", "gc"),
]


def explore(seed):
    """One schedule. Returns what each actor came to, and how many references were made."""
    world = World(seed)
    clean = filled(world.storage, 3)
    incremental(world.storage, "r", 7, base="s1")
    chosen = SETS[seed % len(SETS)]
    world.run({name: ACTORS[name] for name in chosen})
    check(world, clean)
    listed = names(clean)
    world.clock.advance(WEEKS_S)
    for _ in range(3):  # the first fences, the second removes, the third lifts
        clean.gc()
        world.clock.advance(WEEKS_S)
    assert names(clean) == listed
    check(world, clean)
    lent = {file.prefix for prefix in listed for file in clean.find(prefix).record.files}
    for key in leftovers(world.storage):  # tombstones stay beside files that others refer to
        prefix, _, name = key.rpartition("/")
        assert name == "metadata.json"
        assert prefix in lent
    return {name: world.actors[name].error is None for name in chosen}


def check(world, clean):
    """All that is listed is whole, and the newest that was ever acknowledged is listed."""
    ordinals = {info.ordinal for info in clean.list()}
    for prefix in names(clean):
        report = clean.verify(prefix)
        assert report.is_intact, report.damage
        assert clean.read(prefix)["w"].shape == (3,)
    acknowledged = [world.actors[name].result for name in SAVERS if name in world.actors]
    assert max([4, *(ordinal for ordinal in acknowledged if ordinal is not None)]) in ordinals
    for name, actor in world.actors.items():
        if name in SAVERS and isinstance(actor.error, SaveError):
            assert "nothing was" in str(actor.error) or "unknown" in str(actor.error.__notes__)


def campaign(first, count):
    """Explore so many schedules. Returns how often each actor succeeded and failed."""
    outcomes = Counter()
    for seed in range(first, first + count):
        try:
            outcomes.update(explore(seed).items())
        except BaseException as error:
            error.add_note(f"HOLDFAST_SCHEDULE_SEED={seed} repeats this schedule")
            raise
    return outcomes


def test_whatever_the_order_of_calls_pruning_breaks_nothing_and_keeps_the_newest():
    outcomes = campaign(SEED, 700)
    for name in ACTORS:
        assert outcomes[name, True] > 20, outcomes


@pytest.mark.proof
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(25))
def test_fifty_thousand_orders_of_calls_while_pruning(part, record_property):
    count = 2000
    outcomes = campaign(SEED + 1_000_000 + part * count, count)
    assert sum(outcomes.values()) > 2 * count
    record_property("orders of calls while pruning", count)


PRUNER = """
import sys
from holdfast.catalog import Catalog, keep_last
catalog = Catalog(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
for _ in range(60):
    report = catalog.prune(keep_last(2))
    for problem in report.failed.values():
        assert "at the same time" in problem, problem
"""


def test_processes_that_prune_the_same_storage_at_the_same_time(tmp_path):
    root = tmp_path / "root"
    catalog = filled(LocalStorage(root), 12)
    command = [sys.executable, "-c", PRUNER, str(root)]
    pruners = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        for pruner in pruners:
            assert pruner.stdout.readline() == "ready\n"
        for pruner in pruners:
            pruner.stdin.write("\n")
            pruner.stdin.flush()
        for n in range(20):
            catalog.write(f"late{n}", {"w": np.arange(3), "n": n})
            assert catalog.list()[0].prefix == f"late{n}"
        assert [pruner.wait(timeout=60) for pruner in pruners] == [0, 0]
    finally:
        for pruner in pruners:
            pruner.kill()
            pruner.communicate()
    catalog.prune(keep_last(2))
    assert names(catalog) == ["late19", "late18"]
    assert all(catalog.verify(prefix).is_intact for prefix in names(catalog))
    catalog.gc()
    aged(catalog.storage, metadata=10**7).gc()
    assert leftovers(catalog.storage) == []


# --- what it costs


def test_many_are_deleted_after_one_look_for_all():
    calls = {}
    for count in (10, 40):
        inner = MemoryStorage()
        filled(inner, count)
        watched = FaultyStorage(inner)
        catalog = Catalog(watched)
        catalog.list()
        seen = len(watched.calls)
        assert len(catalog.prune(keep_last(2)).deleted) == count - 2
        calls[count] = Counter(call.method for call in watched.calls[seen:])
    assert calls[40]["list"] == calls[10]["list"] == 3
    assert calls[40]["create"] == 1
    deleted = 40 - 2
    assert calls[40]["replace"] == deleted
    assert calls[40]["delete"] == 2 * deleted + 1
    assert calls[40]["read"] == deleted + 1 + 2  # each to delete, the whole one, those that stay


class WithoutComparedDeletes(Observed):
    """As object stores are: every checkpoint that is deleted leaves a tombstone."""

    def delete(self, key, *, expected=None):
        if expected is not None:
            raise StorageError("this storage cannot delete one version", path=key)
        super().delete(key)


def test_tombstones_that_pile_up_are_not_read_again_and_again():
    inner = MemoryStorage()
    watched = FaultyStorage(WithoutComparedDeletes(inner))
    catalog = Catalog(watched)
    reads = []
    for n in range(30):
        catalog.write(f"s{n}", {"w": np.arange(3), "n": n})
        seen = len(watched.calls)
        catalog.prune(keep_last(2))
        reads.append(sum(call.method == "read" for call in watched.calls[seen:]))
    assert names(catalog) == ["s29", "s28"]
    assert len(leftovers(inner)) == 28
    assert reads[-1] == reads[5]
