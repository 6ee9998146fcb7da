"""What reading and writing take at most: memory, open files, sizes of files; and what they refuse
that would take more."""

import subprocess
import sys
import textwrap
import threading
import time
import tracemalloc

import msgspec
import numpy as np
import pytest
from catalog_tools import Observed, files_of, grid_parts, memory_of, write_parts

from holdfast.catalog import Catalog
from holdfast.catalog._committed import find_committed
from holdfast.catalog._placing import StoredBoxes
from holdfast.catalog._reading import TensorReader
from holdfast.catalog._shards import FILES_AT_ONCE, KEPT_BYTES, Shards
from holdfast.catalog._writing import PLAIN_FILE_BYTES, _sources, grouped
from holdfast.errors import CorruptedError, LoadError, TensorNotFoundError
from holdfast.format import (
    CommitRecord,
    CompressionLevel,
    ShardEntry,
    StoredCut,
    StoredFile,
    StoredPlacement,
    StoredTensor,
    decode_record,
    encode_record,
    plan_shard,
)
from holdfast.reshard import Grid
from holdfast.storage import LocalStorage, MemoryStorage, StorageOptions

MIB = 1024 * 1024


def peak_of(run):
    """The result, and how many bytes were taken on the way beyond those at the start."""
    tracemalloc.start()
    try:
        result = run()
        return result, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# --- memory of reads


@pytest.mark.parametrize(
    ("shape", "start", "stop"),
    [
        ((64, 2 * MIB), (0, 0), (64, 100)),
        ((4, 16, 2 * MIB), (0, 3, 5), (4, 9, 7)),
        ((128, MIB), (0, 1000), (128, 300_000)),
        ((128 * MIB,), (5,), (128 * MIB - 5,)),
        ((128 * 1024, 1024), (0, 7), (128 * 1024, 8)),
    ],
    ids=["few columns", "three dimensions", "wide columns", "nearly all", "one column"],
)
def test_a_box_takes_little_memory_beyond_its_own_whatever_its_strides(
    tmp_path, shape, start, stop
):
    array = np.zeros(shape, np.uint8)
    array.reshape(-1)[::4099] = 7
    catalog = Catalog(LocalStorage(tmp_path))
    catalog.write("a", {"w": array})
    opened = catalog.open("a")
    box = tuple(map(slice, start, stop))
    found, peak = peak_of(lambda: opened.read("w", start, stop))
    assert peak - found.nbytes < 64 * MIB
    np.testing.assert_array_equal(found, array[box])


# --- open files


def many_files(count, entries=50):
    """A checkpoint of many files, each with a part of every tensor."""
    rows = Grid((count, 2), (1, 2))
    state = {
        f"t{i}": (np.full((count, 2), i, np.float32), rows, grid_parts(rows, range(count)))
        for i in range(entries)
    }
    storage = MemoryStorage()
    write_parts(storage, "a", state)
    return storage


def test_open_files_are_given_up_when_they_take_much_memory():
    storage = many_files(3)
    found = find_committed(storage, "a")
    large = TensorReader(storage, "a", found.record).shard(0)
    count = 3 * (KEPT_BYTES // (len(large.layout.header) + 800 * len(large.layout.entries)))
    opened = []

    def open_file(index):
        opened.append(index)
        return large

    shards = Shards(open_file)
    for index in range(count):
        shards.get(index)
    assert len(opened) == count
    assert len(shards._kept) < count / 2
    shards.get(count - 1)
    assert len(opened) == count
    shards.get(0)
    assert len(opened) == count + 1


def test_verifying_many_files_holds_few_of_them_open():
    storage = many_files(8 * FILES_AT_ONCE)
    catalog = Catalog(storage)
    catalog.verify("a")
    one, least = peak_of(lambda: Catalog(many_files(FILES_AT_ONCE)).verify("a"))
    report, peak = peak_of(lambda: catalog.verify("a"))
    assert report.is_intact
    assert (one.files, report.files) == (FILES_AT_ONCE, 8 * FILES_AT_ONCE)
    assert report.checked_bytes == 8 * one.checked_bytes
    assert peak < KEPT_BYTES + 4 * least


def test_files_are_opened_side_by_side_and_each_of_them_once():
    inner = many_files(FILES_AT_ONCE, entries=5)
    together = threading.Barrier(8)
    opened = []

    def wait(method, key):
        if method == "stat" and "shard" in key:
            opened.append(key)
            together.wait(20)

    storage = Observed(inner, before=wait)
    found = Catalog(storage).open("a").read_all()
    assert sorted(found) == ["t0", "t1", "t2", "t3", "t4"]
    assert sorted(opened) == sorted(info.key for info in inner.list("a/shard"))


def test_several_threads_that_want_one_file_open_it_once():
    storage = many_files(1)
    shard = TensorReader(storage, "a", find_committed(storage, "a").record).shard(0)
    opened, got = [], []

    def open_file(index):
        opened.append(index)
        time.sleep(0.05)
        return shard

    shards = Shards(open_file)
    threads = [threading.Thread(target=lambda: got.append(shards.get(7))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert opened == [7]
    assert got == [shard] * 8


def test_a_file_that_could_not_be_opened_is_tried_again_when_it_is_asked_for_again():
    storage = many_files(1)
    shard = TensorReader(storage, "a", find_committed(storage, "a").record).shard(0)
    answers = iter([LoadError("not now"), shard])

    def open_file(index):
        answer = next(answers)
        if isinstance(answer, LoadError):
            raise answer
        return answer

    shards = Shards(open_file)
    with pytest.raises(LoadError):
        shards.get(0)
    assert shards.get(0) is shard


@pytest.mark.parametrize(
    "runs", [((0, 1, 10),), ((9, -1, 10),), ((3, 0, 4), (1, 3, 3), (7, -2, 3))]
)
def test_boxes_are_found_by_their_files(runs):
    files = [first + step * nth for first, step, count in runs for nth in range(count)]
    count = len(files)
    placement = StoredPlacement(cuts=(StoredCut(step=1),), files=runs)
    stored = StoredBoxes.of(StoredTensor(dtype="U8", shape=(count,), placement=placement))
    for low in range(11):
        for high in range(low, 11):
            wanted = {index for index in range(low, high) if index != 4}
            found = {(box.start[0], at) for box, at in stored.in_files(range(low, high), wanted)}
            assert found == {(cell, at) for cell, at in enumerate(files) if at in wanted}


# --- sizes of files


def test_files_are_closed_before_they_are_too_large_and_large_arrays_are_cut_by_rows():
    gib = 1024 * MIB
    rows = np.broadcast_to(np.zeros(1, np.uint8), (40, 5 * gib))
    small = np.zeros(10, np.int64)
    files = [
        [(source.name, source.box.start, source.box.stop) for source in file]
        for file in grouped(
            _sources({"s": small, "w": rows, "z": small}, CompressionLevel.NONE),
            CompressionLevel.NONE,
        )
    ]
    assert 64 * gib == PLAIN_FILE_BYTES
    assert files == [
        [("s", (0,), (10,)), ("w", (0, 0), (12, 5 * gib))],
        [("w", (12, 0), (24, 5 * gib))],
        [("w", (24, 0), (36, 5 * gib))],
        [("w", (36, 0), (40, 5 * gib)), ("z", (0,), (10,))],
    ]


# --- records that name what cannot be


@pytest.mark.parametrize("prefix", [".holdfast-x", "p/.holdfast-y/q"])
def test_a_record_that_names_a_file_no_storage_can_hold_is_damaged(tmp_path, prefix):
    storage = LocalStorage(tmp_path)
    catalog = Catalog(storage)
    catalog.write("a", {"w": np.arange(3)})
    record = decode_record(storage.read("a/metadata.json"), path="a")
    file = msgspec.structs.replace(record.files[0], prefix=prefix)
    data = encode_record(msgspec.structs.replace(record, files=(file,)))
    storage.replace("a/metadata.json", data, storage.stat("a/metadata.json").version)
    for call in (catalog.read, lambda name: catalog.open(name).read("w")):
        with pytest.raises(CorruptedError, match="names a file that cannot be") as caught:
            call("a")
        assert caught.value.path == "a/metadata.json"
    (damage,) = catalog.verify("a").damage
    assert damage.file == "a/metadata.json"
    catalog.gc()
    catalog.delete("a")
    assert catalog.list() == []


def sparse_shard(root, nbytes):
    """A checkpoint whose only file claims so many bytes and takes none of them."""
    layout = plan_shard([ShardEntry(name="w", dtype="U8", shape=(nbytes,))])
    name = "shard-0-0123456789abcdef.safetensors"
    (root / "a").mkdir(parents=True)
    with (root / "a" / name).open("wb") as file:
        file.write(layout.header)
        file.truncate(layout.file_bytes)
    stored = StoredFile(name=name, size_bytes=layout.file_bytes, digest="0" * 32)
    placement = StoredPlacement(cuts=(StoredCut(step=nbytes),), files=((0, 0, 1),))
    record = CommitRecord(
        state="committed",
        ordinal=1,
        attempt="0123456789abcdef",
        created="2026-01-31T12:00:00Z",
        world_size=1,
        writer="x",
        files=(stored,),
        tensors={"w": StoredTensor(dtype="U8", shape=(nbytes,), placement=placement)},
    )
    LocalStorage(root).create("a/metadata.json", encode_record(record))
    return layout.table_bytes


def test_a_table_that_is_said_to_be_huge_is_refused_before_it_is_read(tmp_path):
    size = sparse_shard(tmp_path, 14 * 1024 * 1024 * MIB)
    opened = Catalog(LocalStorage(tmp_path)).open("a")

    def read():
        with pytest.raises(LoadError, match=f"is said to have {size} bytes; at most 268435456"):
            opened.read("w", (0,), (1,))

    _, peak = peak_of(read)
    assert peak < 8 * MIB


def test_a_table_that_memory_does_not_hold_is_said_to_be_so(tmp_path):
    size = sparse_shard(tmp_path, 4 * 1024 * 1024 * MIB)
    program = textwrap.dedent(
        """
        import resource, sys
        from holdfast.catalog import Catalog
        from holdfast.errors import LoadError

        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 150 * 2**20,) * 2)
        try:
            Catalog(sys.argv[1]).open("a").read("w", (0,), (1,))
        except LoadError as error:
            print(error)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"there is no memory for the {size} bytes that describe a file" in done.stdout


# --- arguments


def test_a_name_is_itself_before_it_is_a_pattern_and_one_that_fits_nothing_is_refused():
    catalog = Catalog(MemoryStorage())
    catalog.write("a", {"x[0]": np.arange(3), "x0": np.arange(4), "y": np.arange(5)})
    opened = catalog.open("a")
    assert list(opened.read_all(["x[0]"])) == ["x[0]"]
    assert list(opened.read_all(["x[0]", "x?"])) == ["x[0]", "x0"]
    assert opened.read_all([]) == {}
    for patterns in (["typo.*"], ["y", "typo.*"]):
        for read in (opened.read_all, opened.read_tree, lambda p: catalog.read("a", p)):
            with pytest.raises(TensorNotFoundError, match=r"no tensor fits 'typo\.\*'"):
                read(patterns)


def test_a_catalog_takes_options_and_says_the_version_of_the_format(tmp_path):
    catalog = Catalog(StorageOptions(url=str(tmp_path / "root")))
    assert catalog.write("a", {}, metrics={"m" * 1024: 0.5}).version == "1"
    assert (tmp_path / "root" / "a" / "metadata.json").exists()
    with pytest.raises(ValueError, match="1 to 1024 characters"):
        catalog.write("b", {}, metrics={"m" * 1025: 0.5})


def test_rollback_leaves_objects_that_are_not_its_own():
    storage = memory_of({"a/notes.txt": b"mine"})
    catalog = Catalog(storage)
    catalog.write("a", {"x": np.arange(3)})
    catalog.rollback("a")
    assert files_of(storage) == {"a/notes.txt": b"mine"}
