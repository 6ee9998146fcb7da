import logging
import time

import numpy as np
import pytest
import torch
from catalog_tools import Observed, begun, files_of, leftovers

from holdfast.catalog import Catalog, keep_every, keep_last
from holdfast.distributed import CheckpointOptions, DistributedCheckpoint, SaveOptions
from holdfast.distributed._upkeep import Upkeep
from holdfast.errors import SaveError, StorageError, TransientStorageError
from holdfast.storage import LocalStorage, MemoryStorage
from holdfast.testing import FakeClock, Fault, FaultyStorage

LEASE_S = 600.0


def saved(catalog, *names):
    for name in names:
        catalog.write(name, {"x": np.arange(3)})


def names(catalog):
    return [info.prefix for info in catalog.list()]


# --- when it does what


def killed(storage):
    """What a save left that was killed long ago."""
    attempt, _ = begun(storage, f"dead{len([*storage.list()])}", np.arange(9))
    return attempt.shard_key(0)


def long_after(storage):
    """A storage in which every intent is long out of its lease."""
    observed = Observed(storage)
    observed.ages = {"intent": 10_000.0}
    return observed


def test_what_killed_runs_left_is_collected_once_when_its_lease_must_be_over():
    storage, clock = MemoryStorage(), FakeClock()
    catalog = Catalog(long_after(storage), lease_s=LEASE_S)
    first = killed(storage)
    upkeep = Upkeep(catalog, keep_last(1), clock=clock)
    saved(catalog, "a", "b")
    clock.advance(LEASE_S)
    upkeep.after_save()
    assert names(catalog) == ["b"]
    assert first in files_of(storage)
    clock.advance(1.0)
    upkeep.after_save()
    assert first not in files_of(storage)
    second = killed(storage)
    clock.advance(10 * LEASE_S)
    upkeep.after_save()
    assert second in files_of(storage)


def test_a_save_under_way_elsewhere_is_not_collected():
    storage, clock = MemoryStorage(), FakeClock()
    upkeep = Upkeep(Catalog(storage), keep_last(1), clock=clock)
    attempt, record = begun(storage, "elsewhere", np.arange(3))
    saved(Catalog(storage), "a", "b")
    clock.advance(10 * LEASE_S)
    upkeep.after_save()
    with attempt:
        attempt.commit(record, next_ordinal=lambda: 9)
    assert names(Catalog(storage)) == ["elsewhere", "b"]
    assert Catalog(storage).verify("elsewhere").is_intact


def test_what_went_wrong_is_done_after_the_next_save():
    storage, clock = MemoryStorage(), FakeClock()
    faulty = FaultyStorage(long_after(storage), [Fault("sweep", 1, StorageError("busy"))])
    catalog = Catalog(faulty)
    upkeep = Upkeep(catalog, keep_last(1), clock=clock)
    clock.advance(LEASE_S + 1)
    saved(catalog, "a")
    with pytest.raises(StorageError, match="busy"):
        upkeep.after_save()
    left = killed(storage)
    upkeep.after_save()
    assert left not in files_of(storage)


def test_one_upkeep_at_a_time():
    storage = MemoryStorage()
    saved(Catalog(storage), "a", "b", "c")
    surveys = []

    def again(method, key):
        if method == "create" and key.startswith("clock-"):
            surveys.append(key)
            upkeep.after_save()

    upkeep = Upkeep(Catalog(Observed(storage, before=again)), keep_last(1))
    upkeep.after_save()
    assert len(surveys) == 1
    assert names(Catalog(storage)) == ["c"]
    saved(Catalog(storage), "d")
    upkeep.after_save()
    assert names(Catalog(storage)) == ["d"]


# --- after the saves of a checkpointer


def save(ckpt, step):
    return ckpt.save({"w": torch.arange(4.0)}, options=SaveOptions(step=step))


def steps(ckpt):
    return [info.step for info in ckpt.list_checkpoints()]


def test_a_checkpointer_with_a_retention_prunes_after_every_save(tmp_path, caplog):
    options = CheckpointOptions(storage=tmp_path, retention=keep_last(2) | keep_every(4))
    seen = []
    with (
        caplog.at_level(logging.INFO, "holdfast"),
        DistributedCheckpoint.create(options=options) as ckpt,
    ):
        for step in range(1, 8):
            name = save(ckpt, step)
            seen.append(steps(ckpt))
            assert ckpt.list_checkpoints()[0].prefix == name
        assert seen[:4] == [[1], [2, 1], [3, 2], [4, 3]]
        assert seen[4:] == [[5, 4], [6, 5, 4], [7, 6, 4]]
        assert all(ckpt.catalog.verify(i.prefix).is_intact for i in ckpt.list_checkpoints())
    assert sum("pruned from" in line for line in caplog.messages) == 4
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []
    assert leftovers(LocalStorage(tmp_path)) == []


def test_a_save_in_the_background_prunes_as_well(tmp_path):
    with DistributedCheckpoint(storage=tmp_path, retention=keep_last(1)) as ckpt:
        for step in (1, 2, 3):
            ckpt.save_async({"w": torch.arange(4.0)}, options=SaveOptions(step=step)).result()
    assert [info.step for info in Catalog(tmp_path).list()] == [3]


def test_without_a_retention_nothing_is_ever_deleted(tmp_path):
    with DistributedCheckpoint(storage=tmp_path) as ckpt:
        for step in range(4):
            save(ckpt, step)
        assert steps(ckpt) == [3, 2, 1, 0]


def test_a_save_that_fails_prunes_nothing():
    storage = MemoryStorage()
    saved(Catalog(storage), "a", "b", "c")
    with DistributedCheckpoint(storage=storage, retention=keep_last(1)) as ckpt:
        with pytest.raises(SaveError):
            ckpt.save({"w": lambda: None})
        assert names(ckpt.catalog) == ["c", "b", "a"]


def test_what_cannot_be_pruned_is_a_warning_and_the_save_is_saved(caplog):
    inner = MemoryStorage()
    saved(Catalog(inner), "a", "b")
    faulty = FaultyStorage(inner, [Fault("replace", 1, StorageError("read-only", path="a"))])
    with (
        caplog.at_level(logging.WARNING, "holdfast"),
        DistributedCheckpoint(storage=faulty, retention=keep_last(1)) as ckpt,
    ):
        name = save(ckpt, 1)
        assert names(ckpt.catalog) == [name, "a"]
    assert "a could not be pruned: read-only" in caplog.text


def test_a_storage_that_fails_while_it_is_pruned_does_not_fail_the_save(caplog):
    inner = MemoryStorage()
    saved(Catalog(inner), "a", "b")
    faulty = FaultyStorage(inner, [Fault("read_into", 1, TransientStorageError("down"))])
    with (
        caplog.at_level(logging.WARNING, "holdfast"),
        DistributedCheckpoint(storage=faulty, retention=keep_last(1)) as ckpt,
    ):
        name = save(ckpt, 1)
        assert faulty.unfired == ()
        assert names(ckpt.catalog) == [name, "b", "a"]
        assert "the upkeep after a save failed; it is tried after the next: down" in caplog.text
        assert names(ckpt.catalog)[0] != save(ckpt, 2)
        assert steps(ckpt) == [2]


def test_a_restarted_training_collects_what_the_killed_one_left(tmp_path):
    storage = LocalStorage(tmp_path)
    lease_s = 0.05
    # A shorter one: it is looked at once, and by the coarse clock of a file system must be over.
    begun(storage, "killed", np.arange(9), lease_s=lease_s / 5)
    catalog = Catalog(storage, lease_s=lease_s)
    with DistributedCheckpoint(storage=catalog, retention=keep_last(2)) as ckpt:
        made_s = time.monotonic()  # only now: it collects once it is a lease old
        while time.monotonic() <= made_s + 2 * lease_s:
            save(ckpt, 1)
        save(ckpt, 2)  # two, also where there was no time for the others
        save(ckpt, 3)
    assert [key for key in files_of(storage) if key.startswith("killed/shard")] == []
    assert len(ckpt.catalog.list()) == 2


@pytest.mark.parametrize("make", [CheckpointOptions, DistributedCheckpoint])
def test_a_retention_of_another_kind_is_refused(make):
    with pytest.raises(ValueError, match="retention must be a Retention, not 'all'"):
        make(storage=MemoryStorage(), retention="all")
