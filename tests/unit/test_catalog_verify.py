import errno
import mmap
import os
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from catalog_tools import Observed, files_of, grid_parts, memory_of, put, reread, write_parts
from rotting import RECORD, Rotten, flip

from holdfast.catalog import Catalog
from holdfast.errors import (
    CheckpointNotFoundError,
    CorruptedError,
    IncompatibleVersionError,
    LoadError,
    StorageError,
    TransientStorageError,
)
from holdfast.format import CHUNK_BYTES, CompressionLevel
from holdfast.reshard import Grid
from holdfast.storage import LocalStorage, MemoryStorage
from holdfast.storage._uncached import UncachedStorage
from holdfast.testing import Fault, FaultyStorage

PLAIN, COMPRESSED = Rotten(5), Rotten(5, CompressionLevel.BALANCED)


def assert_noticed(catalog, key, tensor, words=""):
    """Reading all raises, naming file and tensor, and verifying reports just that."""
    with pytest.raises((CorruptedError, IncompatibleVersionError)) as caught:
        catalog.read("a")
    assert caught.value.path == key
    assert tensor is None or f"tensor {tensor!r} is damaged" in str(caught.value)
    report = catalog.verify("a")
    assert not report.is_intact
    assert [(damage.file, damage.tensor) for damage in report.damage] == [(key, tensor)]
    assert words in str(report.damage[0])


def flip_bits(rotten, count, seed):
    """Flip single bits all over, one after the other, and see that every one is noticed. Returns
    how many there were, and how many of them changed no bit of what is read."""
    files = rotten.files
    rng = random.Random(seed)
    everywhere = [(key, offset) for key, data in files.items() for offset in range(len(data))]
    # Most of a small shard is the padding of its header: that is tried less often.
    weights = [
        0.05 if files[key][offset] == 32 and 300 < offset < 4096 else 1.0
        for key, offset in everywhere
    ]
    kinds = Counter()
    meaningless = 0
    for key, offset in rng.choices(everywhere, weights, k=count):
        wound = flip(files, key, offset, rng.randrange(8))
        ((_, tensor),) = rotten.expected(wound)
        kinds[key == RECORD, tensor is None] += 1
        said = rotten.harm(wound)
        assert said in (None, "nothing"), (wound.words, said)
        meaningless += said == "nothing"
    assert len(kinds) == 3
    assert rotten.misread() is None
    return sum(kinds.values()), meaningless


def test_every_flipped_bit_is_noticed_and_named():
    assert flip_bits(PLAIN, 2000, 1) == (2000, 0)


def test_every_flipped_bit_of_a_compressed_checkpoint_is_noticed_or_means_nothing():
    tried, meaningless = flip_bits(COMPRESSED, 1200, 2)
    assert tried == 1200
    assert meaningless < 12


@pytest.mark.proof
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_flipped_bits_are_noticed_and_named():
    assert flip_bits(PLAIN, 80_000, 3) == (80_000, 0)
    tried, meaningless = flip_bits(COMPRESSED, 20_000, 4)
    assert tried == 20_000
    assert meaningless < 200


# --- damage that is not one bit


@pytest.fixture(scope="module")
def larger():
    """Two tensors of several chunks, and another checkpoint of the same shapes."""
    rng = np.random.default_rng(6)
    storage = MemoryStorage()
    catalog = Catalog(storage)
    for prefix in ("a", "b"):
        state = {name: rng.integers(0, 256, 900_000, np.uint8) for name in ("p", "q")}
        catalog.write(prefix, state)
    return files_of(storage)


def shard_of(files, prefix="a"):
    return next(key for key in files if key.startswith(f"{prefix}/shard"))


def with_damage(files, key, data):
    storage = memory_of(files)
    put(storage, key, bytes(data))
    return Catalog(storage)


@pytest.mark.parametrize("block", range(0, 440, 17))
def test_a_zeroed_block_is_noticed(larger, block):
    key = shard_of(larger)
    data = bytearray(larger[key])
    start = block * 4096
    assert any(data[start : start + 4096])
    data[start : start + 4096] = bytes(len(data[start : start + 4096]))
    chunk = (start - 4096) % 900_000
    tensor = None if start == 0 else "p" if start - 4096 + 4095 < 900_000 else "q"
    if tensor and chunk > 900_000 - 4096:
        return  # it lies in both tensors, which is another test
    catalog = with_damage(larger, key, data)
    report = catalog.verify("a")
    assert {(damage.file, damage.tensor) for damage in report.damage} == {(key, tensor)}
    with pytest.raises(CorruptedError) as caught:
        catalog.read("a")
    assert caught.value.path == key


def test_chunks_swapped_within_a_tensor_are_noticed(larger):
    key = shard_of(larger)
    data = bytearray(larger[key])
    one, other = (slice(4096 + i * CHUNK_BYTES, 4096 + (i + 1) * CHUNK_BYTES) for i in (0, 2))
    data[one], data[other] = data[other], data[one]
    report = with_damage(larger, key, data).verify("a")
    assert [(d.file, d.tensor) for d in report.damage] == [(key, "p")] * 2
    assert "bytes 0 to 262144 of 'p' are not what was written" in str(report.damage[0])
    assert "bytes 524288 to 786432 of 'p' are not what was written" in str(report.damage[1])


def test_blocks_swapped_between_tensors_are_noticed(larger):
    key = shard_of(larger)
    data = bytearray(larger[key])
    one, other = (slice(4096 + i * 900_000, 4096 + i * 900_000 + 4096) for i in (0, 1))
    data[one], data[other] = data[other], data[one]
    report = with_damage(larger, key, data).verify("a")
    assert [(d.file, d.tensor) for d in report.damage] == [(key, "p"), (key, "q")]


def test_whole_tensors_swapped_are_noticed(larger):
    key = shard_of(larger)
    data = bytearray(larger[key])
    one, other = slice(4096, 904_096), slice(904_096, 1_804_096)
    data[one], data[other] = data[other], data[one]
    report = with_damage(larger, key, data).verify("a")
    assert len(report.damage) == 8


@pytest.mark.parametrize("files", [PLAIN.files, COMPRESSED.files], ids=["plain", "compressed"])
def test_a_file_cut_anywhere_or_longer_or_empty_is_noticed(files):
    key = shard_of(files)
    data = files[key]
    for damaged in [data[:size] for size in range(0, len(data), 61)] + [
        data[:-1],
        data + b"\0",
        data + data,
        data[1:],
    ]:
        assert_noticed(with_damage(files, key, damaged), key, None)
    for damaged in [files[RECORD][:size] for size in range(0, len(files[RECORD]), 29)] + [
        files[RECORD] + b" ",
        files[RECORD] + b"}",
    ]:
        assert_noticed(with_damage(files, RECORD, damaged), RECORD, None)


def test_the_files_of_two_checkpoints_swapped_are_noticed(larger):
    one, other = shard_of(larger, "a"), shard_of(larger, "b")
    storage = memory_of(larger)
    put(storage, one, larger[other])
    put(storage, other, larger[one])
    for prefix, key in [("a", one), ("b", other)]:
        report = Catalog(storage).verify(prefix)
        assert [(d.file, d.tensor) for d in report.damage] == [(key, None)]
        assert "is not the one that was written" in report.damage[0].problem


def test_the_data_of_another_checkpoint_under_the_right_header_is_noticed(larger):
    one, other = shard_of(larger, "a"), shard_of(larger, "b")
    header, table = larger[one][:4096], larger[one][4096 + 1_800_000 :]
    mixed = header + larger[other][4096 : 4096 + 1_800_000] + table
    report = with_damage(larger, one, mixed).verify("a")
    assert len(report.damage) == 8


def test_two_files_of_one_checkpoint_swapped_are_noticed():
    files = PLAIN.files
    first, second, _ = sorted(key for key in files if "shard" in key)
    storage = memory_of(files)
    put(storage, first, files[second])
    put(storage, second, files[first])
    report = Catalog(storage).verify("a")
    assert [(d.file, d.tensor) for d in report.damage] == [(first, None), (second, None)]


def test_a_record_of_an_older_save_put_back_is_noticed():
    storage = MemoryStorage()
    catalog = Catalog(storage)
    catalog.write("a", {"x": np.arange(10)})
    old = storage.read(RECORD)
    catalog.write("a", {"x": np.arange(10)}, overwrite=True)
    put(storage, RECORD, old)
    with pytest.raises(CorruptedError, match="a file of the checkpoint is missing"):
        catalog.read("a")
    (damage,) = catalog.verify("a").damage
    assert "a file of the checkpoint is missing" in damage.problem


def test_a_record_moved_to_another_name_is_noticed():
    files = PLAIN.files
    storage = memory_of({**files, "b/metadata.json": files[RECORD]})
    report = Catalog(storage).verify("b")
    assert len(report.damage) == 3
    assert all("is missing" in damage.problem for damage in report.damage)


def test_a_deleted_file_is_noticed_and_the_rest_still_read():
    files, arrays = PLAIN.files, PLAIN.arrays
    key = sorted(key for key in files if "shard" in key)[2]
    storage = memory_of(files)
    storage.delete(key)
    catalog = Catalog(storage)
    assert_noticed(catalog, key, None, "is missing")
    opened = catalog.open("a")
    np.testing.assert_array_equal(opened.read("ids"), arrays["ids"])
    np.testing.assert_array_equal(opened.read("w", (0, 0), (20, 8)), arrays["w"][:20])
    with pytest.raises(CorruptedError):
        opened.read("w", (0, 0), (21, 8))


def test_all_damage_of_several_files_is_reported_at_once():
    files = PLAIN.files
    shards = sorted(key for key in files if "shard" in key)
    storage = memory_of(files)
    storage.delete(shards[0])
    put(storage, shards[1], b"")
    broken = bytearray(files[shards[2]])
    broken[4096] ^= 1
    put(storage, shards[2], bytes(broken))
    report = Catalog(storage).verify("a")
    assert [(d.file, d.tensor) for d in report.damage] == [
        (shards[0], None),
        (shards[1], None),
        (shards[2], "w"),
    ]
    assert report.files == 3


# --- the work of verifying


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_all_parts_of_a_verification_are_the_whole(parts):
    rng = np.random.default_rng(7)
    storage = MemoryStorage()
    catalog = Catalog(storage)
    catalog.write("a", {f"t{i}": rng.integers(0, 9, 5_000_000, np.uint8) for i in range(6)})
    key = next(info.key for info in storage.list("a/shard"))
    data = bytearray(storage.read(key))
    for at in range(5000, len(data) - 5000, 1_700_003):
        data[at] ^= 1
    put(storage, key, bytes(data))
    whole = catalog.verify("a")
    pieces = [catalog.verify("a", part=(nth, parts)) for nth in range(1, parts + 1)]
    assert len(whole.damage) == 18
    assert sum(piece.checked_bytes for piece in pieces) == whole.checked_bytes == 30_000_000
    order = [(d.file, d.tensor, d.problem) for piece in pieces for d in piece.damage]
    assert sorted(order) == sorted((d.file, d.tensor, d.problem) for d in whole.damage)


def test_verifying_changes_nothing_and_leaves_nothing():
    files = PLAIN.files
    storage = memory_of(files)
    calls = []
    Catalog(Observed(storage, before=lambda method, key: calls.append(method))).verify("a")
    assert set(calls) <= {"stat", "read", "read_into"}
    assert files_of(storage) == files


def test_what_is_not_there_cannot_be_verified():
    with pytest.raises(CheckpointNotFoundError):
        Catalog(MemoryStorage()).verify("a")


def test_an_error_that_may_pass_is_raised_and_one_that_does_not_is_damage():
    files = PLAIN.files
    for nth in range(1, 12):
        fault = Fault("any", nth, TransientStorageError("again"))
        faulty = FaultyStorage(memory_of(files), [fault])
        with pytest.raises(TransientStorageError):
            Catalog(faulty).verify("a")
    faulty = FaultyStorage(memory_of(files), [Fault("read_into", 8, StorageError("I/O error"))])
    report = Catalog(faulty).verify("a")
    assert faulty.unfired == ()
    assert report.damage
    assert all("cannot be read (I/O error)" in damage.problem for damage in report.damage)


def test_boxes_that_overlap_or_leave_holes_are_damage():
    files = PLAIN.files
    record = Catalog(memory_of(files)).open("a")._found.record
    tensor = record.tensors["w"]
    boxes = (((0, 10), (0, 8)), ((0, 10), (0, 8)), ((20, 30), (0, 8)))
    placement = type(tensor.placement)(boxes=boxes, files=((0, 0, 2), (2, 0, 1)))
    changed = type(tensor)(dtype=tensor.dtype, shape=tensor.shape, placement=placement)
    catalog = with_damage(files, RECORD, reread(record, tensors={**record.tensors, "w": changed}))
    with pytest.raises(CorruptedError, match="tensor 'w' is not stored exactly once"):
        catalog.open("a").read("w")
    assert [(d.file, d.tensor) for d in catalog.verify("a").damage] == [(RECORD, "w")]


def test_a_damaged_read_is_told_from_a_damaged_file_by_reading_again(tmp_path):
    storage = LocalStorage(tmp_path)
    Catalog(storage).write("a", {"x": np.arange(1000)})
    faulty = FaultyStorage(storage, [Fault("read_into", 3, flip_bit=77)])
    with pytest.raises(CorruptedError, match="tensor 'x' is damaged: bytes 0 to 8000 of 'x'"):
        Catalog(faulty).read("a")
    assert Catalog(faulty).verify("a").is_intact


def test_where_many_files_are_missing_the_record_is_not_read_again_for_each():
    storage = MemoryStorage()
    array = np.arange(400.0)
    grid = Grid((400,), (1,))
    write_parts(storage, "a", {"w": (array, grid, grid_parts(grid, range(400)))})
    for info in list(storage.list("a/shard-")):
        storage.delete(info.key)
    reads = []
    observed = Observed(storage, lambda method, key: reads.append((method, key)))
    report = Catalog(observed).verify("a")
    assert len(report.damage) == 400
    assert {damage.problem for damage in report.damage} == {
        "a file of the checkpoint is missing; load another checkpoint"
    }
    assert reads.count(("read_into", "a/metadata.json")) == 2


def test_verify_looks_at_what_is_stored_and_a_load_takes_what_is_remembered(tmp_path):
    asked = []

    class Asked(LocalStorage):
        def read(self, key):
            asked.append(False)
            return super().read(key)

        def read_into(self, key, ranges):
            asked.extend(wanted.uncached for wanted in ranges)
            super().read_into(key, ranges)

    catalog = Catalog(Asked(tmp_path))
    catalog.write("a", {"x": np.zeros(3 * CHUNK_BYTES, np.uint8)})
    asked.clear()
    assert catalog.verify("a").is_intact
    assert set(asked) == {True}
    asked.clear()
    catalog.read("a")
    assert set(asked) == {False}


@pytest.mark.parametrize("size", [3, 300])
def test_an_object_that_is_replaced_while_it_is_read_past_the_cache_is_read_again(size):
    class Replaced(MemoryStorage):
        is_due = False

        def stat(self, key):
            found = super().stat(key)
            if self.is_due:
                self.is_due = False
                put(self, key, bytes(size))
            return found

    storage = Replaced()
    put(storage, "a", bytes(30))
    storage.is_due = True
    assert UncachedStorage(storage).read("a") == bytes(size)


def test_an_object_that_cannot_be_read_past_the_cache_is_an_error():
    storage = MemoryStorage()
    put(storage, "a", bytes(30))
    fault = Fault("read_into", error=StorageError("broken"))
    with pytest.raises(StorageError, match="broken"):
        UncachedStorage(FaultyStorage(storage, faults=[fault])).read("a")


@pytest.mark.parametrize(
    ("most_bytes", "expected"), [(0, TransientStorageError), (8 << 20, LoadError)]
)
def test_too_little_memory_is_no_damage(tmp_path, monkeypatch, most_bytes, expected):
    """That of the storage, and that of who looks at what it has read."""
    Catalog(tmp_path).write("a", {"w": np.zeros(4 << 20, np.uint8)})
    mapped = mmap.mmap

    def sparing(fd, nbytes, **how):
        if nbytes > most_bytes:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return mapped(fd, nbytes, **how)

    monkeypatch.setattr(mmap, "mmap", sparing)
    with pytest.raises(expected, match="there is no memory for a buffer of") as caught:
        Catalog(tmp_path).verify("a")
    assert type(caught.value) is expected
    monkeypatch.undo()
    assert Catalog(tmp_path).verify("a").is_intact


def test_an_object_that_is_replaced_again_and_again_is_told_as_that():
    class Restless(MemoryStorage):
        stats = 0

        def stat(self, key):
            self.stats += 1
            return replace(super().stat(key), version=str(self.stats))

    storage = Restless()
    put(storage, "a", b"1")
    with pytest.raises(TransientStorageError, match="was replaced each of the 10 times"):
        UncachedStorage(storage).read("a")
