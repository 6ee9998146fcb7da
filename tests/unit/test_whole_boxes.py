"""Reading stored boxes as a whole, very many small tensors, and records that others have read."""

import numpy as np
import pytest
from catalog_tools import Observed, Part, files_of, grid_parts, memory_of, put, write_parts

from holdfast import reshard
from holdfast.catalog import Catalog
from holdfast.catalog._committed import found_of, read_committed
from holdfast.catalog._reading import TensorReader, Want
from holdfast.catalog._shard_write import as_bytes
from holdfast.contracts import ObjectInfo
from holdfast.errors import CheckpointNotFoundError, CorruptedError
from holdfast.format import CHUNK_BYTES, CompressionLevel
from holdfast.reshard import Box, Grid
from holdfast.storage import MemoryStorage

LARGE = np.arange(1000 * 700, dtype=np.float32).reshape(1000, 700)


def rows(count):
    return Grid(LARGE.shape, (LARGE.shape[0] // count, LARGE.shape[1]))


def filled(storage, record, box, *, whole_boxes, ticks=None):
    reader = TensorReader(storage, "a", record)
    array = np.full(box.shape, np.nan, np.float32)
    want = Want(name="x", part=reshard.Part.alone(box), into=as_bytes(array))
    reader.check_stored([("x", box)])
    tick = (lambda _: None) if ticks is None else ticks.append
    reader.fill([want], whole_boxes=whole_boxes, tick=tick)
    return array


@pytest.mark.parametrize("level", [CompressionLevel.NONE, CompressionLevel.FAST])
@pytest.mark.parametrize(
    "box",
    [
        Box((0, 0), (1000, 700)),
        Box((250, 0), (500, 700)),
        Box((10, 3), (11, 5)),
        Box((240, 699), (760, 700)),
        Box((0, 0), (0, 700)),
    ],
    ids=str,
)
def test_whole_boxes_give_the_same_as_ranges(box, level):
    grid = rows(4)
    storage = MemoryStorage()
    parts = grid_parts(grid, [0, 1, 1, 2])
    record = write_parts(storage, "a", {"x": (LARGE, grid, parts)}, level=level)
    expected = LARGE[tuple(map(slice, box.start, box.stop))]
    for whole_boxes in (True, False):
        found = filled(storage, record, box, whole_boxes=whole_boxes)
        np.testing.assert_array_equal(found, expected)


def test_a_box_of_which_anything_is_wanted_is_read_whole_and_no_other():
    grid = rows(4)
    storage = MemoryStorage()
    record = write_parts(storage, "a", {"x": (LARGE, grid, grid_parts(grid, [0, 0, 1, 1]))})
    ticks = {True: [], False: []}
    for whole_boxes, told in ticks.items():
        filled(storage, record, Box((0, 0), (1, 1)), whole_boxes=whole_boxes, ticks=told)
    assert sum(ticks[True]) == LARGE.nbytes // 4
    assert sum(ticks[False]) == CHUNK_BYTES


def test_damage_anywhere_in_a_whole_box_is_found():
    storage = MemoryStorage()
    parts = [Part(Box.whole(LARGE.shape), 0)]
    record = write_parts(storage, "a", {"x": (LARGE, Grid.whole(LARGE.shape), parts)})
    key = f"a/{record.files[0].name}"
    data = bytearray(storage.read(key))
    data[4096 + LARGE.nbytes - 1] ^= 1
    put(storage, key, bytes(data))
    box = Box((0, 0), (2, 2))
    filled(storage, record, box, whole_boxes=False)
    with pytest.raises(CorruptedError, match="tensor 'x' is damaged"):
        filled(storage, record, box, whole_boxes=True)


@pytest.mark.parametrize("compression", ["none", "fast"])
def test_many_small_tensors_are_few_requests(compression):
    """Each of them as one piece of work for the storage would be most of the time."""
    state = {f"w{i}": np.full(50 + i % 7, i, np.float32) for i in range(3000)}
    written: list[str | None] = []
    ranges: list[int] = []

    class Counted(Observed):
        def read_into(self, key, wanted):
            ranges.append(len(wanted))
            super().read_into(key, wanted)

    storage = Counted(
        MemoryStorage(),
        before=lambda method, key: written.append(key) if method == "write_at" else None,
    )
    catalog = Catalog(storage)
    catalog.write("a", state, compression=compression)
    found = catalog.read("a")
    assert sum(ranges) < 30
    assert len(written) < 30
    for name, array in state.items():
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize("compression", ["none", "fast"])
def test_one_damaged_tensor_among_many_small_ones_is_named(compression):
    state = {f"w{i}": np.full(50, i, np.float32) for i in range(100)}
    catalog = Catalog(MemoryStorage())
    catalog.write("a", state, compression=compression)
    (key,) = (key for key in files_of(catalog.storage) if key.endswith(".safetensors"))
    data = bytearray(catalog.storage.read(key))
    layout = TensorReader(catalog.storage, "a", catalog.find("a").record).shard(0).layout
    data[layout.by_key["w42"].offset + 5] ^= 255
    put(catalog.storage, key, bytes(data))
    with pytest.raises(CorruptedError, match="tensor 'w42' is damaged"):
        catalog.read("a")
    assert [damage.tensor for damage in catalog.verify("a").damage] == ["w42"]


def test_a_record_that_one_has_read_is_decoded_by_all():
    catalog = Catalog(MemoryStorage())
    catalog.write("a", {"x": np.arange(3), "y": 5})
    data, info = read_committed(catalog.storage, "a")
    assert data == catalog.storage.read("a/metadata.json")
    sent = ObjectInfo(
        key=info.key,
        size_bytes=info.size_bytes,
        version=info.version,
        modified_s=info.modified_s,
    )
    assert found_of("a", memoryview(data), sent) == catalog.find("a")


def test_what_is_not_committed_is_not_found():
    catalog = Catalog(MemoryStorage())
    gone = "deleted"
    catalog.write(gone, {"x": np.arange(3)})
    storage = memory_of(files_of(catalog.storage))
    Catalog(Observed(storage, before=_refuse_lifting)).delete(gone)
    assert [info.key for info in storage.list()] == [f"{gone}/metadata.json"]
    for prefix in (gone, "never"):
        with pytest.raises(CheckpointNotFoundError, match="no committed checkpoint"):
            read_committed(storage, prefix)
        with pytest.raises(CheckpointNotFoundError, match="no committed checkpoint"):
            Catalog(storage).find(prefix)
    put(storage, "theirs/metadata.json", b'{"name": "theirs"}')
    with pytest.raises(CorruptedError, match="not holdfast's"):
        read_committed(storage, "theirs")
    put(storage, "torn/metadata.json", catalog.storage.read(f"{gone}/metadata.json")[:-3])
    with pytest.raises(CorruptedError, match="damaged"):
        read_committed(storage, "torn")
    with pytest.raises(ValueError, match="relative name"):
        Catalog(storage).find("../a")


def _refuse_lifting(method, key):
    from holdfast.errors import StorageError

    if method == "delete" and key.endswith("metadata.json"):
        raise StorageError("this storage cannot compare")
