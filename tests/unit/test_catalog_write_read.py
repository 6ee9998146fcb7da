import math

import numpy as np
import pytest
from catalog_tools import Observed, Part, files_of, grid_parts, put, reread, write_parts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from value_strategies import same, values

import holdfast.catalog._writing as writing
from holdfast import reshard
from holdfast.catalog import Catalog
from holdfast.catalog._read_plan import plan_box
from holdfast.errors import (
    CheckpointNotFoundError,
    CorruptedError,
    LoadError,
    SaveError,
    TensorNotFoundError,
)
from holdfast.format import CHUNK_BYTES, CompressionLevel, LeafRef, numpy_dtype
from holdfast.format._dtypes import DTYPES
from holdfast.reshard import Box, Grid
from holdfast.storage import LocalStorage, MemoryStorage

NUMPY_DTYPES = [numpy_dtype(code) for code, dtype in DTYPES.items() if dtype.numpy_name]
few = settings(max_examples=40, suppress_health_check=list(HealthCheck), deadline=None)
some = settings(max_examples=100, suppress_health_check=list(HealthCheck), deadline=None)


@pytest.fixture(params=["local", "memory"])
def storage(request, tmp_path):
    return LocalStorage(tmp_path / "root") if request.param == "local" else MemoryStorage()


def random_array(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (math.prod(shape) * dtype.itemsize,), np.uint8)
    if dtype == np.bool_:
        raw &= 1
    return raw.view(dtype).reshape(shape)


def bits_equal(one, other):
    return (
        one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    )


@st.composite
def leaf_arrays(draw):
    """Any stored dtype, any shape, and memory laid out in any way NumPy knows."""
    dtype = draw(st.sampled_from(NUMPY_DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    array = random_array(shape, dtype, draw(st.integers(0, 9)))
    way = draw(st.sampled_from(["plain", "fortran", "steps", "back", "broadcast", "frozen"]))
    if way == "fortran":
        array = np.asfortranarray(array)
    elif way == "steps" and array.ndim:
        array = array[..., ::2]
    elif way == "back" and array.ndim:
        array = array[tuple(slice(None, None, -1) for _ in shape)]
    elif way == "broadcast":
        array = np.broadcast_to(array, (3, *shape))
    elif way == "frozen":
        array = array.copy()
        array.flags.writeable = False
    return array


@few
@given(
    tree=st.recursive(
        leaf_arrays() | values(max_leaves=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.text(max_size=6) | st.integers(), inner, max_size=3)
            | st.tuples(inner, inner)
        ),
        max_leaves=8,
    ),
    level=st.sampled_from(list(CompressionLevel)),
)
def test_any_tree_of_values_and_arrays_comes_back(tree, level):
    catalog = Catalog(MemoryStorage())
    catalog.write("a", tree, compression=level, custom=tree)
    assert same(catalog.read("a"), tree)
    assert catalog.verify("a").is_intact


@pytest.mark.parametrize("level", list(CompressionLevel))
@pytest.mark.parametrize("dtype", NUMPY_DTYPES, ids=str)
def test_every_dtype_comes_back_bit_by_bit(storage, dtype, level):
    state = {
        "scalar": random_array((), dtype),
        "none": random_array((3, 0, 2), dtype),
        "some": random_array((7, 11), dtype),
        "chunks": random_array((3, CHUNK_BYTES // dtype.itemsize // 2 + 5), dtype),
        "turned": random_array((50, 60), dtype).T,
    }
    catalog = Catalog(storage)
    catalog.write("a", state, compression=level)
    found = catalog.read("a")
    assert found.keys() == state.keys()
    for name, array in state.items():
        assert bits_equal(found[name], array), name
    opened = catalog.open("a")
    assert {info.nbytes for info in opened.tensors.values()} == {a.nbytes for a in state.values()}


def test_arrays_come_back_writable_and_on_their_own():
    catalog = Catalog(MemoryStorage())
    shared = np.zeros(4)
    catalog.write("a", [shared, shared])
    one, other = catalog.read("a")
    one += 1
    assert other.tolist() == [0, 0, 0, 0]


def test_big_endian_arrays_come_back_in_this_machines_order():
    catalog = Catalog(MemoryStorage())
    array = np.arange(10, dtype=">f4")
    catalog.write("a", {"x": array, "big": np.arange(300_000, dtype=">i8")})
    found = catalog.read("a")
    assert found["x"].dtype == np.dtype("=f4")
    np.testing.assert_array_equal(found["x"], array)
    np.testing.assert_array_equal(found["big"], np.arange(300_000))


def test_a_mapped_file_is_stored_as_the_array_it_is(tmp_path):
    mapped = np.memmap(tmp_path / "file", np.int32, "w+", shape=(5,))
    mapped[:] = 7
    catalog = Catalog(MemoryStorage())
    catalog.write("a", {"x": mapped})
    assert catalog.read("a")["x"].tolist() == [7] * 5


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.array([{}], object), "dtype object"),
        (np.zeros(3, [("a", "i4"), ("b", "f8")]), "dtype [('a'"),
        (np.ma.masked_array([1], [True]), "MaskedArray"),
        (np.zeros(2, np.longdouble), "float128"),
        (object(), "object"),
        (lambda: 0, "function"),
    ],
    ids=["object", "structured", "masked", "longdouble", "anything", "function"],
)
def test_what_cannot_be_stored_is_refused_with_its_place_before_anything_is_written(value, words):
    storage = MemoryStorage()
    with pytest.raises(SaveError) as caught:
        Catalog(storage).write("a", {"model": [1, {"deep": value}]})
    assert "state['model'][1]['deep']" in str(caught.value)
    assert words in str(caught.value)
    assert files_of(storage) == {}


def test_what_cannot_be_stored_as_custom_metadata_is_refused_with_its_place():
    storage = MemoryStorage()
    with pytest.raises(SaveError, match=r"custom\['x'\]"):
        Catalog(storage).write("a", {}, custom={"x": object()})
    assert files_of(storage) == {}


@pytest.mark.parametrize("level", [CompressionLevel.NONE, CompressionLevel.FAST])
def test_names_that_look_alike_or_like_the_formats_own_are_kept_apart(storage, level):
    state = {
        "a.b": np.array([1]),
        "a": {"b": np.array([2]), "b~2": np.array([3])},
        "a.b~2": np.array([4]),
        "x[0:2]": np.arange(4),
        "x": np.arange(2),
        "[]": np.array(5),
        "": np.array([6]),
        "__metadata__": np.array([7]),
        "__holdfast_chunks__": np.array([8]),
        "__holdfast": np.array([9]),
        "größe/日本\n\0": np.array([10]),
        "\ud800": np.array([11]),
        "y" * 70_000: np.array([12]),
        1: np.array([13]),
        "1": np.array([14]),
        (1, "t"): np.array([15]),
    }
    catalog = Catalog(storage)
    catalog.write("a", state, compression=level)
    assert same(catalog.read("a"), state)
    assert catalog.verify("a").is_intact


@pytest.mark.parametrize(
    "state", [{}, [], None, 5, "text", np.array(3), np.zeros((0, 4))], ids=repr
)
def test_a_state_of_nothing_or_of_one_thing_comes_back(storage, state):
    catalog = Catalog(storage)
    catalog.write("a", state)
    assert same(catalog.read("a"), state)
    assert catalog.verify("a").is_intact
    assert [info.prefix for info in catalog.list()] == ["a"]


@pytest.mark.parametrize(
    ("level", "count"), [(CompressionLevel.NONE, 20_000), (CompressionLevel.FAST, 3000)]
)
def test_many_thousand_small_leaves_are_one_checkpoint(tmp_path, level, count):
    state = {f"layer.{i}.w": np.full(3, i, np.float32) for i in range(count)}
    catalog = Catalog(LocalStorage(tmp_path / "root"))
    assert catalog.write("a", state, compression=level).tensors == count
    found = catalog.read("a")
    assert list(found) == list(state)
    assert all(found[f"layer.{i}.w"].tolist() == [i] * 3 for i in range(0, count, 97))


def test_records_are_read_once_however_often_they_are_listed():
    watched = Observed(MemoryStorage())
    catalog = Catalog(watched)
    for n in range(5):
        catalog.write(f"c{n}", {"n": n})
    reads = []
    watched.before = lambda method, key: reads.append(key) if method == "read" else None
    first = catalog.list()
    assert reads == ["c4/metadata.json"]
    assert catalog.list() == first
    assert len(reads) == 1
    Catalog(watched).write("c0", {"n": 9}, step=3, overwrite=True)
    reads.clear()
    assert [info.step for info in catalog.list()] == [3, None, None, None, None]
    assert reads == ["c0/metadata.json"]


def test_headers_of_many_long_names_are_spread_over_several_files(monkeypatch):
    monkeypatch.setattr(writing, "_HEADER_BYTES", 10_000)
    catalog = Catalog(MemoryStorage())
    state = {f"{i:03}" * 100: np.array(i) for i in range(50)}
    catalog.write("a", state)
    assert catalog.verify("a").files > 5
    assert same(catalog.read("a"), state)


@pytest.mark.parametrize("level", [CompressionLevel.FAST, CompressionLevel.MAXIMUM])
def test_large_compressed_arrays_are_split_over_files(monkeypatch, level):
    monkeypatch.setattr(writing, "COMPRESSED_FILE_BYTES", 1_000_000)
    rng = np.random.default_rng(1)
    state = {
        "rows": rng.integers(0, 3, (700, 1000), np.int32),
        "one row": rng.integers(0, 3, (1, 900_000), np.int32),
        "long rows": rng.integers(0, 3, (2, 2, 400_000), np.int16),
        "after": np.arange(5),
    }
    storage = MemoryStorage()
    catalog = Catalog(storage)
    catalog.write("a", state, compression=level)
    assert same(catalog.read("a"), state)
    assert catalog.verify("a").files >= 8
    opened = catalog.open("a")
    np.testing.assert_array_equal(
        opened.read("rows", (240, 3), (560, 900)), state["rows"][240:560, 3:900]
    )
    np.testing.assert_array_equal(
        opened.read("long rows", (0, 1, 249_999), (2, 2, 250_001)),
        state["long rows"][:, 1:, 249_999:250_001],
    )


def test_a_compressed_array_of_more_than_one_file_really_is_split(tmp_path):
    array = np.zeros((1, 70 * 1024 * 1024), np.uint8)
    array[0, ::1000] = 7
    catalog = Catalog(LocalStorage(tmp_path / "root"))
    info = catalog.write("a", {"x": array}, compression="fast")
    assert info.size_bytes < 10_000_000
    assert catalog.verify("a").files == 2
    assert bits_equal(catalog.read("a")["x"], array)


# --- boxes


@st.composite
def boxes_in(draw, shape):
    ends = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return Box(tuple(low for low, _ in ends), tuple(high for _, high in ends))


@st.composite
def random_grids(draw, shape):
    if 0 in shape:
        return Grid.whole(shape)
    cuts = [
        sorted(draw(st.sets(st.integers(1, n - 1), max_size=3))) if n > 1 else [] for n in shape
    ]
    return Grid.of_cuts(shape, cuts)


@st.composite
def guillotine(draw, box, left=4):
    """``box`` cut into boxes that need not be a grid."""
    wide = [dim for dim, size in enumerate(box.shape) if size > 1]
    if not wide or not left or draw(st.booleans()):
        return [box]
    dim = draw(st.sampled_from(wide))
    at = draw(st.integers(box.start[dim] + 1, box.stop[dim] - 1))
    low = Box(box.start, (*box.stop[:dim], at, *box.stop[dim + 1 :]))
    high = Box((*box.start[:dim], at, *box.start[dim + 1 :]), box.stop)
    return [*draw(guillotine(low, left - 1)), *draw(guillotine(high, left - 1))]


@st.composite
def placed_tensors(draw):
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=3)))
    dtype = draw(st.sampled_from(NUMPY_DTYPES))
    array = random_array(shape, dtype, 3)
    if draw(st.booleans()):
        grid = draw(random_grids(shape))
        boxes = [grid.box(cell) for cell in range(grid.cells)]
    else:
        grid = None
        boxes = draw(st.permutations(draw(guillotine(Box.whole(shape)))))
    return array, grid, [Part(box, draw(st.integers(0, 3))) for box in boxes]


@some
@given(data=st.data())
def test_any_box_of_any_placement_reads_as_numpy_slices_it(data):
    tensors = {"p": data.draw(placed_tensors()), "q": data.draw(placed_tensors())}
    level = data.draw(st.sampled_from([CompressionLevel.NONE, CompressionLevel.BALANCED]))
    storage = MemoryStorage()
    write_parts(storage, "a", tensors, level=level)
    catalog = Catalog(storage)
    assert catalog.verify("a").is_intact
    assert bits_equal(catalog.read("a")["p"], tensors["p"][0])
    opened = catalog.open("a")
    for name, (array, _, _) in tensors.items():
        box = data.draw(boxes_in(array.shape))
        part = array[tuple(map(slice, box.start, box.stop))]
        assert bits_equal(opened.read(name, box.start, box.stop), part.copy())


@pytest.mark.parametrize("level", [CompressionLevel.NONE, CompressionLevel.FAST])
def test_boxes_of_tensors_of_many_chunks_read_as_numpy_slices_them(level):
    array = np.random.default_rng(2).integers(0, 5, (37, 300, 100), np.int32)
    grid = Grid.of_cuts(array.shape, [[12, 25], [], [33]])
    storage = MemoryStorage()
    write_parts(
        storage, "a", {"x": (array, grid, grid_parts(grid, [0, 1, 2, 2, 1, 0]))}, level=level
    )
    opened = Catalog(storage).open("a")
    rng = np.random.default_rng(3)
    for _ in range(60):
        ends = [np.sort(rng.integers(0, size + 1, 2)) for size in array.shape]
        start, stop = (tuple(int(end[i]) for end in ends) for i in (0, 1))
        wanted = array[tuple(map(slice, start, stop))]
        np.testing.assert_array_equal(opened.read("x", start, stop), wanted)


@pytest.mark.parametrize("level", [CompressionLevel.NONE, CompressionLevel.FAST])
def test_only_the_chunks_that_hold_a_box_are_read(level):
    array = np.random.default_rng(4).integers(0, 3, (64, CHUNK_BYTES), np.uint8)
    watched = Observed(MemoryStorage())
    catalog = Catalog(watched)
    catalog.write("a", {"x": array, "y": array}, compression=level)
    opened = catalog.open("a")
    opened.read("x", (0, 0), (0, 0))
    opened.read("x", (5, 0), (6, 1))
    before = sum(watched.read_bytes.values())
    np.testing.assert_array_equal(opened.read("x", (10, 7), (13, 9)), array[10:13, 7:9])
    read = sum(watched.read_bytes.values()) - before
    if level is CompressionLevel.NONE:
        assert read == 3 * CHUNK_BYTES
    else:
        assert 0 < read < 3 * CHUNK_BYTES


def test_of_many_files_only_those_that_hold_a_box_are_opened():
    array = np.arange(64)
    grid = Grid.of_cuts((64,), [range(8, 64, 8)])
    watched = Observed(MemoryStorage())
    write_parts(watched, "a", {"x": (array, grid, grid_parts(grid, range(8)))})
    assert Catalog(watched).open("a").read("x", (9,), (15,)).tolist() == [*range(9, 15)]
    assert list(watched.read_bytes) == ["a/shard-1-00000000000000aa.safetensors"]


@st.composite
def plans(draw):
    itemsize = draw(st.sampled_from([1, 2, 4, 8, 16]))
    dims = draw(st.integers(0, 3))
    unit = CHUNK_BYTES // itemsize
    sizes = st.sampled_from([1, 2, 3, 5, 64, unit // 7, unit - 1, unit, unit + 1, 3 * unit + 17])
    shape = []
    for _ in range(dims):
        room = 6 * unit // max(1, math.prod(shape))
        shape.append(max(1, min(draw(sizes), room)))
    offset = tuple(draw(st.integers(0, 3)) for _ in shape)
    stored = Box(offset, tuple(a + b for a, b in zip(offset, shape, strict=True)))
    cut = draw(boxes_in(shape))
    wanted = Box(
        tuple(
            max(0, a + b - draw(st.integers(0, 2))) for a, b in zip(cut.start, offset, strict=True)
        ),
        tuple(a + b + draw(st.integers(0, 2)) for a, b in zip(cut.stop, offset, strict=True)),
    )
    return itemsize, stored, wanted


@some
@given(plans())
def test_the_pieces_of_a_plan_cover_exactly_the_wanted_bytes(plan):
    itemsize, stored, wanted = plan
    raw = stored.size * itemsize
    source = np.arange(raw, dtype=np.uint32)
    filled = np.full(wanted.size * itemsize, 2**32 - 1, np.uint32)
    touched: set[int] = set()
    for piece in plan_box(raw, stored, reshard.Part.alone(wanted), itemsize):
        low, high = piece.first * CHUNK_BYTES, min(piece.last * CHUNK_BYTES, raw)
        touched.update(range(piece.first, piece.last))
        if piece.copy is None:
            target = filled[piece.dst_offset : piece.dst_offset + high - low]
            assert len(target) == high - low
            assert (target == 2**32 - 1).all()
            target[:] = source[low:high]
            continue
        for src, dst, nbytes in piece.copy:
            assert low <= src
            assert src + nbytes <= high
            target = filled[dst : dst + nbytes]
            assert (target == 2**32 - 1).all()
            target[:] = source[src : src + nbytes]
    shared = stored.intersect(wanted)
    expected = np.full((*wanted.shape, itemsize), 2**32 - 1, np.uint32)
    needed = np.zeros(0, np.uint32)
    if shared is not None:
        inner, outer = shared.relative_to(stored), shared.relative_to(wanted)
        cut = source.reshape(*stored.shape, itemsize)[tuple(map(slice, inner.start, inner.stop))]
        expected[tuple(map(slice, outer.start, outer.stop))] = cut
        needed = np.unique(cut // CHUNK_BYTES)
    assert (filled.reshape(expected.shape) == expected).all()
    assert touched == set(needed.tolist())


# --- what the caller may get wrong


def test_facts_of_a_checkpoint_come_back():
    catalog = Catalog(MemoryStorage())
    metrics = {"loss": 0.5, "steps": 3, "inf": math.inf}
    info = catalog.write(
        "run/a", {"x": np.zeros(4)}, step=7, metrics=metrics, custom={"git": "abc"}
    )
    assert info == catalog.info("run/a") == catalog.list()[0]
    assert (info.prefix, info.step, info.metrics, info.world_size) == ("run/a", 7, metrics, 1)
    assert (info.version, info.format, info.tensors, info.ordinal) == ("1", "multi_shard", 1, 1)
    assert info.size_bytes == sum(
        len(data) for key, data in files_of(catalog.storage).items() if "shard" in key
    )
    opened = catalog.open("run/a")
    assert opened.custom == {"git": "abc"}
    assert opened.info == info


def test_progress_tells_of_every_byte():
    catalog = Catalog(MemoryStorage())
    array = np.zeros(1_000_000)
    told: list[int] = []
    catalog.write("a", {"x": array}, progress=told.append)
    assert sum(told) == array.nbytes
    told.clear()
    catalog.read("a", progress=told.append)
    assert sum(told) == array.nbytes
    told.clear()
    report = catalog.verify("a", progress=told.append)
    assert sum(told) == report.checked_bytes == array.nbytes


def test_chosen_names_are_read_and_the_rest_is_left_as_references():
    catalog = Catalog(MemoryStorage())
    catalog.write("a", {"model": {"w": np.ones(2)}, "opt": {"m": np.zeros(2)}, "n": 1})
    found = catalog.read("a", ["model.*"])
    assert found["model"]["w"].tolist() == [1, 1]
    assert found["opt"]["m"] == LeafRef(kind="array", name="opt.m")
    assert found["n"] == 1
    assert list(catalog.open("a").read_all(["*.m"])) == ["opt.m"]
    with pytest.raises(ValueError, match=r"several patterns, as \['model.\*'\]"):
        catalog.read("a", "model.*")


def test_a_tensor_or_a_box_that_is_not_there_is_refused():
    catalog = Catalog(MemoryStorage())
    catalog.write("a", {"x": np.zeros((3, 4))})
    opened = catalog.open("a")
    with pytest.raises(TensorNotFoundError, match="no tensor 'y'"):
        opened.read("y")
    catalog.write("near", {"weight": np.zeros(1)})
    with pytest.raises(TensorNotFoundError, match="did you mean 'weight'"):
        catalog.open("near").read("wieght")
    for start, stop in [((0, 0), (3, 5)), ((0,), (3,)), ((2, 0), (1, 4)), ((-1, 0), (3, 4))]:
        with pytest.raises(ValueError):
            opened.read("x", start, stop)
    with pytest.raises(CheckpointNotFoundError, match="no committed checkpoint"):
        catalog.read("b")


@pytest.mark.parametrize(
    "prefix",
    ["", "/a", "a/", "../a", "a/../b", "a//b", ".", "metadata.json", "a/metadata.json/b", 3],
)
def test_prefixes_that_cannot_be_names_are_refused(prefix):
    catalog = Catalog(MemoryStorage())
    for call in (
        lambda: catalog.write(prefix, {}),
        lambda: catalog.read(prefix),
        lambda: catalog.open(prefix),
        lambda: catalog.info(prefix),
        lambda: catalog.verify(prefix),
        lambda: catalog.delete(prefix),
        lambda: catalog.rollback(prefix),
    ):
        with pytest.raises(ValueError, match="prefix must"):
            call()
    assert files_of(catalog.storage) == {}


@pytest.mark.parametrize(
    "options",
    [
        {"step": -1},
        {"step": 1.5},
        {"step": True},
        {"step": 2**63},
        {"metrics": {"loss": "low"}},
        {"metrics": {"": 1.0}},
        {"metrics": {"ok": True}},
        {"metrics": {"big": 2**70}},
        {"compression": "best"},
    ],
    ids=str,
)
def test_impossible_arguments_of_write_are_refused_before_anything_is_written(options):
    storage = MemoryStorage()
    with pytest.raises(ValueError):
        Catalog(storage).write("a", {"x": np.zeros(2)}, **options)
    assert files_of(storage) == {}


@pytest.mark.parametrize("part", [(0, 1), (2, 1), (1, 0), (1, -1), (1.0, 2), ("1", 2)])
def test_impossible_parts_of_a_verification_are_refused(part):
    catalog = Catalog(MemoryStorage())
    catalog.write("a", {})
    with pytest.raises(ValueError, match="part"):
        catalog.verify("a", part=part)


def test_a_catalog_opens_a_path_or_a_url(tmp_path):
    Catalog(tmp_path / "runs").write("a", {"x": np.arange(3)})
    assert Catalog(str(tmp_path / "runs")).read("a")["x"].tolist() == [0, 1, 2]
    assert Catalog((tmp_path / "runs").as_uri()).list()[0].prefix == "a"
    with pytest.raises(ValueError, match="storage"):
        Catalog(42)
    with pytest.raises(ValueError, match="lease_s"):
        Catalog(tmp_path, lease_s=0)


def test_a_tree_that_refers_to_a_tensor_that_is_not_there_is_damage():
    storage = MemoryStorage()
    array = np.arange(3)
    record = write_parts(storage, "a", {"x": (array, Grid.whole((3,)), [Part(Box((0,), (3,)), 0)])})
    put(storage, "a/metadata.json", reread(record, tensors={}))
    with pytest.raises(
        CorruptedError,
        match=r"state refers to a tensor 'x' that is not there \[path a/metadata.json\]",
    ):
        Catalog(storage).read("a")


def test_a_checkpoint_replaced_while_it_is_open_says_so_and_read_takes_the_new_one():
    storage = MemoryStorage()
    catalog = Catalog(storage)
    catalog.write("a", {"x": np.array([1])})
    opened = catalog.open("a")
    catalog.write("a", {"x": np.array([2])}, overwrite=True)
    with pytest.raises(LoadError, match="deleted or replaced since it was opened; open it again"):
        opened.read("x")
    once = iter([1])

    def replace(method, key):
        if method == "read" and next(once, None):
            catalog.write("a", {"x": np.array([3])}, overwrite=True)

    reading = Catalog(Observed(storage, after=replace))
    assert reading.read("a")["x"].tolist() == [3]
