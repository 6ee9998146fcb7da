"""Disks that are full, for real, and disks whose power is cut, for real."""

import os

import numpy as np
import pytest
from campaign import observe, state_of
from cutting import cut_again_and_again
from mounts import Ext4, cut_power, small_memory

from holdfast.catalog import Catalog
from holdfast.errors import CheckpointError, NoSpaceError
from holdfast.storage import LocalStorage

MIB = 1024 * 1024


@pytest.fixture(params=["tmpfs", "ext4"])
def small(request, tmp_path):
    """A filesystem with some 8 MiB of room."""
    if request.param == "tmpfs":
        with small_memory(tmp_path / "small", "8m") as path:
            yield path
    else:
        with Ext4(tmp_path, 16 * MIB).mounted() as path:
            while (room := LocalStorage(path).free_bytes() - 8 * MIB) > 64 * 1024:
                with (path / "ballast").open("ab") as file:
                    file.write(os.urandom(room))
                    os.fsync(file.fileno())
            yield path


def _large(mib: int, seed: int = 1) -> dict[str, object]:
    return {"weight": np.random.default_rng(seed).integers(0, 256, mib * MIB, np.uint8)}


def _fill(path) -> None:
    """Leave not a byte."""
    with (path / "filler").open("ab", buffering=0) as file:
        for size in (MIB, 4096, 1):
            try:
                while True:
                    file.write(bytes(size))
                    os.fsync(file.fileno())
            except OSError:
                continue


def _files(root) -> set[str]:
    return {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()}


@pytest.mark.parametrize("compression", ["none", "fast"])
def test_a_save_that_finds_no_room_says_so_and_leaves_nothing(small, compression):
    root = small / "runs"
    catalog = Catalog(LocalStorage(root))
    catalog.write("step_1", state_of(1))
    before = _files(root)
    with pytest.raises(NoSpaceError) as caught:
        catalog.write("step_2", _large(12), compression=compression)
    assert "step_2/shard-0-" in caught.value.path
    assert "make room" in caught.value.message
    assert _files(root) == before
    assert observe(LocalStorage(root)) == {"checkpoint step_1": "value 1"}


def test_a_writer_that_announced_nothing_meets_the_end_and_says_so(small):
    storage = LocalStorage(small / "runs")
    data = os.urandom(12 * MIB)
    with pytest.raises(NoSpaceError), storage.open_writer("a") as writer:
        for start in range(0, len(data), MIB):
            writer.write_at(start, data[start : start + MIB])
        writer.finish()
    assert [*storage.list()] == []
    assert _files(small / "runs") <= {".holdfast.lock"}


def test_the_same_save_works_once_there_is_room(small):
    catalog = Catalog(LocalStorage(small / "runs"))
    catalog.write("step_1", _large(4, seed=1))
    with pytest.raises(NoSpaceError):
        catalog.write("step_2", _large(5, seed=2))
    catalog.delete("step_1")
    catalog.write("step_2", _large(5, seed=2))
    assert np.array_equal(catalog.read("step_2")["weight"], _large(5, seed=2)["weight"])


def test_an_overwrite_that_finds_no_room_leaves_the_old_one(small):
    catalog = Catalog(LocalStorage(small / "runs"))
    catalog.write("step_1", state_of(1))
    catalog.write("step_2", _large(5))
    with pytest.raises(NoSpaceError):
        catalog.write("step_1", _large(6), overwrite=True)
    assert observe(catalog.storage)["checkpoint step_1"] == "value 1"


def test_what_is_there_is_read_from_a_disk_without_a_free_byte(small):
    catalog = Catalog(LocalStorage(small / "runs"))
    catalog.write("step_1", state_of(1))
    _fill(small)
    with pytest.raises(NoSpaceError):
        catalog.write("step_2", state_of(2))
    assert observe(LocalStorage(small / "runs")) == {"checkpoint step_1": "value 1"}


def test_a_checkpoint_can_be_deleted_from_a_disk_without_a_free_byte(small):
    catalog = Catalog(LocalStorage(small / "runs"))
    catalog.write("step_1", state_of(1))
    catalog.write("step_2", _large(2))
    _fill(small)
    catalog.delete("step_2")
    assert LocalStorage(small / "runs").free_bytes() >= MIB
    assert observe(catalog.storage) == {"checkpoint step_1": "value 1"}


def test_a_disk_without_free_inodes_is_full(tmp_path):
    with small_memory(tmp_path / "small", "8m", "nr_inodes=12") as path:
        catalog = Catalog(LocalStorage(path / "runs"))
        catalog.write("step_1", state_of(1))
        for number in range(12):
            try:
                (path / f"filler-{number}").touch()
            except OSError:
                break
        with pytest.raises(NoSpaceError):
            catalog.write("step_2", state_of(2))
        assert observe(catalog.storage) == {"checkpoint step_1": "value 1"}


CUTS_OF_A_DISK = 200


def test_power_cuts_leave_the_old_or_the_new_and_all_that_was_promised(tmp_path):
    cuts = cut_again_and_again(tmp_path, cuts=60, seed=1)
    assert cuts.violations == []
    assert cuts.promised > 5
    assert cuts.broken > 5


class Refusing(Catalog):
    """Saves nothing, so that no cut can take anything from it."""

    def write(self, *_, **__):
        raise CheckpointError("not today")


def test_a_catalog_that_fails_with_the_power_on_would_be_caught(tmp_path):
    cuts = cut_again_and_again(tmp_path, cuts=3, seed=1, make=Refusing)
    assert len(cuts.violations) == 3
    assert "with the power on" in cuts.violations[0]
    assert (cuts.promised, cuts.broken) == (0, 0)


@pytest.mark.proof
@pytest.mark.timeout(3600)
def test_so_do_thousands(tmp_path):
    cuts = int(os.environ.get("HOLDFAST_POWER_CUTS", "10000"))
    seed = int(os.environ.get("HOLDFAST_CRASH_SEED", "2"))
    promised = broken = 0
    for first in range(0, cuts, CUTS_OF_A_DISK):
        some = cut_again_and_again(tmp_path, min(CUTS_OF_A_DISK, cuts - first), seed + first)
        assert some.violations == []
        promised, broken = promised + some.promised, broken + some.broken
    print(f"seed {seed}: {cuts} power cuts, {broken} of them in the act, {promised} promises kept")  # noqa: T201


def test_a_power_cut_loses_what_was_not_synced(tmp_path):
    """Else the cuts above would prove nothing."""
    disk = Ext4(tmp_path, 64 * MIB)
    with disk.mounted() as path:
        (path / "unsynced").write_bytes(bytes(5000))
        cut_power(path)
    with disk.mounted() as path:
        assert not (path / "unsynced").exists() or (path / "unsynced").stat().st_size == 0
