"""Shard files as laid out here: the safetensors library opens them, and we read them back."""

import json

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_shards import contents_of, digest_of, make_shard, open_shard

from holdfast.errors import CheckpointError, CorruptedError
from holdfast.format import (
    CHUNK_BYTES,
    ShardEntry,
    chunk_digests,
    digest,
    dtype_of,
    encode_table,
    file_digest,
    leaf_digest,
    numpy_dtype,
    parse_shard_header,
    parse_table,
    plan_shard,
)
from holdfast.format._digest import chunk_count
from holdfast.format._dtypes import DTYPES

SHAPES = [(), (0,), (1,), (5,), (3, 0, 2), (2, 3, 4), (1, 1, 1, 1, 1, 1)]


def some_bytes(count: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 2, count, dtype=np.uint8).tobytes()


def size_of(entry: ShardEntry) -> int:
    return int(np.prod(entry.shape, dtype=object)) * dtype_of(entry.dtype).itemsize


def shard_of(entries, **options) -> tuple[bytes, list[bytes]]:
    contents = [some_bytes(size_of(entry), seed) for seed, entry in enumerate(entries)]
    return make_shard(entries, contents, **options), contents


def listed_by_library(data: bytes) -> dict[str, dict]:
    return dict(safetensors.deserialize(data))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("code", DTYPES)
def test_the_library_opens_every_dtype_and_shape_and_finds_our_bytes(code, shape, tmp_path):
    entry = ShardEntry(name="w", dtype=code, shape=shape)
    data, [content] = shard_of([entry])
    found = listed_by_library(data)["w"]
    assert bytes(found["data"]) == content
    stored = dtype_of(code).stored
    assert found["dtype"] == stored
    assert found["shape"] == (list(shape) if stored == code else [len(content)])

    file = tmp_path / "x.safetensors"
    file.write_bytes(data)
    with safetensors.safe_open(file, "pt") as opened:
        tensor = opened.get_tensor("w")
    assert tensor.dtype == getattr(torch, dtype_of(stored).torch_name)
    flat = tensor.contiguous().reshape(-1)
    assert (flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"") == content

    [placed] = open_shard(data).entries
    assert placed.entry == entry
    assert (placed.stored_bytes, placed.raw_bytes, placed.codec) == (len(content),) * 2 + (None,)


@pytest.mark.parametrize("code", ["BOOL", "U16", "I64", "F16", "F32", "F64", "C64", "BF16"])
def test_the_librarys_numpy_reader_finds_the_same_array(code, tmp_path):
    data, [content] = shard_of([ShardEntry(name="w", dtype=code, shape=(4, 3))])
    file = tmp_path / "x.safetensors"
    file.write_bytes(data)
    with safetensors.safe_open(file, "np") as opened:
        array = opened.get_tensor("w")
    expected = np.frombuffer(content, numpy_dtype(code)).reshape(4, 3)
    assert array.tobytes() == expected.tobytes()
    assert array.dtype.name == expected.dtype.name


@pytest.mark.parametrize(
    ("code", "parts"),
    [
        ("C128", torch.tensor([[1.0, 2.0], [0.0, -0.5]], dtype=torch.float64)),
        ("C32", torch.tensor([[1.0, 2.0], [0.0, -0.5]], dtype=torch.float16)),
        ("F4_E2M1_X2", torch.tensor([17, 250], dtype=torch.uint8)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_values_of_rare_types_come_back_in_torch(code, parts):
    values = parts.view(getattr(torch, dtype_of(code).torch_name)).reshape(2)
    content = parts.view(torch.uint8).numpy().tobytes()
    data = make_shard([ShardEntry(name="w", dtype=code, shape=(2,))], [content])
    [placed] = open_shard(data).entries
    again = safetensors.torch.load(data)["w"].view(values.dtype).reshape(placed.entry.shape)
    assert placed.entry.dtype == code
    assert torch.equal(again.view(parts.dtype), values.view(parts.dtype))


def test_a_shard_without_entries_is_a_valid_file():
    data = make_shard([], [])
    assert len(data) == 4096
    assert list(listed_by_library(data)) == ["__holdfast_chunks__"]
    layout = open_shard(data)
    assert layout.entries == ()
    assert layout.table_bytes == 0


@pytest.mark.parametrize(
    "name",
    ["ä/日本/🦀", 'quo"te\\back\nline\t\0', "n" * 65_536, " ", "w[0:1]", "__metadata__", "a b[]"],
    ids=["unicode", "escapes", "long", "space", "like-a-slice", "metadata", "like-a-scalar"],
)
def test_any_name_opens_in_the_library_and_comes_back(name):
    entry = ShardEntry(name=name, dtype="F32", shape=(2,))
    data, [content] = shard_of([entry])
    layout = open_shard(data)
    assert layout.entries[0].entry.name == name
    assert bytes(listed_by_library(data)[layout.entries[0].key]["data"]) == content


def test_five_thousand_entries_open_in_the_library():
    entries = [
        ShardEntry(name=f"layer.{i}", dtype=("F32", "I8", "BF16")[i % 3], shape=(i % 4, 3))
        for i in range(5000)
    ]
    data, contents = shard_of(entries)
    found = listed_by_library(data)
    assert len(found) == 5001
    for i, content in enumerate(contents):
        assert bytes(found[f"layer.{i}"]["data"]) == content


def test_entries_are_aligned_for_readers_that_map_the_file():
    codes = list(DTYPES) * 2
    data, _ = shard_of(
        [ShardEntry(name=f"t{i}", dtype=code, shape=(i % 5,)) for i, code in enumerate(codes)]
    )
    layout = open_shard(data)
    assert len(layout.header) % 4096 == 0
    alignments = [dtype_of(placed.entry.dtype).alignment for placed in layout.entries]
    assert alignments == sorted(alignments, reverse=True)
    assert all(
        placed.offset % alignment == 0
        for placed, alignment in zip(layout.entries, alignments, strict=True)
    )
    names = [placed.entry.name for placed in layout.entries if placed.entry.dtype == "F32"]
    assert names == sorted(names, key=lambda name: int(name[1:])), "equal ones keep their order"


def test_the_callers_metadata_stands_beside_ours():
    data = make_shard([], [], metadata={"format": "pt", "empty": "", "ü": "\n"})
    header = json.loads(data[8 : int.from_bytes(data[:8], "little") + 8])
    assert header["__metadata__"] == {
        "holdfast": '{"version":1,"chunk_bytes":262144}',
        "format": "pt",
        "empty": "",
        "ü": "\n",
    }
    assert open_shard(data).metadata == {"format": "pt", "empty": "", "ü": "\n"}


def test_compressed_entries_keep_their_dtype_shape_and_frames():
    raw = some_bytes(2 * CHUNK_BYTES + 6)
    entries = [
        ShardEntry(name="a", dtype="F16", shape=(3,)),
        ShardEntry(name="z", dtype="BF16", shape=(CHUNK_BYTES + 3,)),
        ShardEntry(name="empty", dtype="F64", shape=(0, 9)),
    ]
    frames = {1: [b"x" * 100, b"y" * 7, b"z"], 2: []}
    data = make_shard(entries, [b"abcdef", raw, b""], frames=frames)
    layout = open_shard(data)
    table = parse_table(layout, data[layout.table_offset :], path="p")
    assert [placed.key for placed in layout.entries] == ["a", "z", "empty"]
    plain, placed, empty = layout.entries
    assert placed.entry == entries[1]
    assert (placed.codec, placed.stored_bytes, placed.raw_bytes) == ("made-up", 108, len(raw))
    assert table.frames_of(placed) == [100, 7, 1]
    assert table.frame_offsets_of(placed) == [
        placed.offset + distance for distance in (0, 100, 107, 108)
    ]
    assert bytes(table.digests_of(placed)) == chunk_digests(raw)
    assert bytes(table.digests_of(plain)) == digest(b"abcdef")
    assert (table.frames_of(plain), table.frames_of(empty)) == ([], [])
    assert bytes(table.digests_of(empty)) == b""
    assert bytes(listed_by_library(data)["z"]["data"]) == b"x" * 100 + b"y" * 7 + b"z"


@st.composite
def layouts(draw):
    entries = []
    contents = []
    frames = {}
    for index in range(draw(st.integers(0, 6))):
        code = draw(st.sampled_from(sorted(DTYPES)))
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
        box = None
        if draw(st.booleans()):
            starts = draw(st.lists(st.integers(0, 99), min_size=len(shape), max_size=len(shape)))
            box = tuple((s, s + size) for s, size in zip(starts, shape, strict=True))
        name = f"{index}" + draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=9))
        entry = ShardEntry(name=name, dtype=code, shape=shape, box=box)
        entries.append(entry)
        contents.append(some_bytes(size_of(entry), index))
        if draw(st.booleans()):
            most = min(9, len(contents[-1]))
            frames[index] = [draw(st.binary(min_size=1, max_size=most)) for _ in contents[-1][:1]]
    return entries, contents, frames


@settings(max_examples=60)
@given(layouts())
def test_any_layout_reads_back_and_opens_in_the_library(made):
    entries, contents, frames = made
    data = make_shard(entries, contents, frames=frames)
    planned = plan_shard(
        entries, stored={i: ("made-up", [len(f) for f in parts]) for i, parts in frames.items()}
    )
    parsed = open_shard(data)
    assert parsed == planned
    stored = contents_of(data)
    library = listed_by_library(data)
    del library["__holdfast_chunks__"]
    assert {key: bytes(found["data"]) for key, found in library.items()} == stored
    for placed, index in zip(planned.entries, planned.order, strict=True):
        assert placed.entry is entries[index]
        expected = b"".join(frames.get(index, [contents[index]]))
        assert stored[placed.key] == expected


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_digests_are_counted_per_chunk_from_the_first_byte(size):
    raw = some_bytes(size)
    digests = chunk_digests(raw)
    assert len(digests) == 16 * chunk_count(size)
    chunks = [raw[start : start + CHUNK_BYTES] for start in range(0, size, CHUNK_BYTES)]
    assert digests == b"".join(map(digest, chunks))
    assert leaf_digest(digests) == digest(digests)


def test_digests_are_those_of_the_reference_implementation():
    assert digest(b"").hex() == "99aa06d3014798d86001c324468d497f"
    array = np.zeros((3, 0, 2), np.float32)
    assert chunk_digests(memoryview(array)) == b""
    assert chunk_digests(memoryview(np.ones((2, 2), np.uint16))) == digest(b"\1\0" * 4)


def test_a_file_digest_is_over_header_and_table():
    data, _ = shard_of([ShardEntry(name="w", dtype="F32", shape=(9,))])
    layout = open_shard(data)
    table = data[layout.table_offset :]
    assert file_digest(layout.header, table) == digest(layout.header + table)


def entry(**given) -> ShardEntry:
    return ShardEntry(**({"name": "w", "dtype": "F32", "shape": (2,)} | given))


@pytest.mark.parametrize(
    ("entries", "options", "words"),
    [
        ([entry(), entry()], {}, "two entries 'w'"),
        ([entry(name="__metadata__"), entry(name="__metadata__", box=((0, 2),))], {}, "two"),
        ([entry(dtype="F7")], {}, "no dtype 'F7'"),
        ([entry(shape=(-1,))], {}, "not -1"),
        ([entry(shape=(True,))], {}, "not True"),
        ([entry(shape=(1.0,))], {}, "not 1.0"),
        ([entry(shape=(1,) * 65)], {}, "65 dimensions"),
        ([entry(shape=(2**31, 2**31))], {}, "larger than"),
        ([entry(shape=(2**31, 0, 2**31))], {}, "larger than"),
        ([entry(box=((0, 3),))], {}, "not of shape"),
        ([entry(box=())], {}, "not of shape"),
        ([entry(name="")], {}, "name must be"),
        ([entry(name=f"{i}", shape=(2**57,)) for i in range(32)], {}, "larger than any file"),
        ([entry()], {"stored": {1: ("c", [1])}}, r"entries \[1\] of 1"),
        ([entry()], {"stored": {0: ("c", [1, 2])}}, "2 frames for 1 chunks"),
        ([entry()], {"stored": {0: ("c", [0])}}, "a frame has at least 1 byte, and no more than"),
        ([entry()], {"stored": {0: ("c", [9])}}, "no more than its chunk"),
        ([entry(shape=(65_537,))], {"stored": {0: ("c", [9, 5])}}, "no more than its chunk"),
        ([entry(shape=(65_537,))], {"stored": {0: ("c", [262_145, 4])}}, "no more than its chunk"),
        ([entry()], {"stored": {0: ("", [1])}}, "codec"),
        ([entry()], {"metadata": {"holdfast": "x"}}, "format's own"),
        ([entry()], {"metadata": {"a": 1}}, r"metadata\['a'\]"),
        (
            [entry()],
            {"metadata": {"a": "x" * 33_554_432}},
            "too long, a shard's has at most 33554432",
        ),
    ],
)
def test_shards_that_cannot_be_are_refused(entries, options, words):
    with pytest.raises(ValueError, match=words):
        plan_shard(entries, **options)


@pytest.mark.parametrize("index", [-1, 2])
def test_what_is_stored_of_an_entry_that_is_not_there_is_refused(index):
    with pytest.raises(ValueError, match=rf"stored names entries \[{index}\] of 2"):
        plan_shard([entry(), entry(name="z")], stored={index: ("c", [5])})


@pytest.mark.parametrize(
    ("digests", "frames", "words"),
    [
        ([], {}, "0 entries"),
        ([bytes(16)], {}, "0 entries for|1 entries for"),
        ([bytes(15), bytes(16)], {"z": [5]}, "'w' has 1 chunks"),
        ([bytes(16), bytes(16)], {}, "frames of entry 'z'"),
        ([bytes(16), bytes(16)], {"z": [6]}, "frames of entry 'z'"),
        ([bytes(16), bytes(16)], {"z": [5], "w": [8]}, "frames of entry 'w'"),
        ([bytes(16), bytes(16)], {"z": [5], "q": [1]}, "'q'"),
    ],
)
def test_tables_that_do_not_fit_the_layout_are_refused(digests, frames, words):
    layout = plan_shard([entry(), entry(name="z")], stored={1: ("c", [5])})
    with pytest.raises(ValueError, match=words):
        encode_table(layout, digests, frames)


def test_files_of_other_writers_open_without_a_table():
    tensors = {
        "b": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "a[0:2]": torch.ones(3, dtype=torch.float64),
        "": torch.zeros((), dtype=torch.bool),
        "none": torch.zeros(0, 4),
    }
    data = safetensors.torch.save(tensors, metadata={"format": "pt"})
    layout = open_shard(data)
    assert not layout.is_holdfast
    assert layout.metadata == {"format": "pt"}
    assert (layout.table_bytes, layout.table_offset) == (0, len(data))
    assert {placed.entry.name: placed.entry.shape for placed in layout.entries} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    stored = contents_of(data)
    for name, tensor in tensors.items():
        assert stored[name] == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    with pytest.raises(CorruptedError, match="not written by holdfast"):
        parse_table(layout, b"", path="p")


def test_float4_of_other_writers_is_read_in_pairs():
    packed = torch.tensor([[1, 2, 3]], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    data = safetensors.torch.save({"w": packed})
    [placed] = open_shard(data).entries
    assert (placed.entry.dtype, placed.entry.shape) == ("F4_E2M1_X2", (1, 3))
    assert contents_of(data)["w"] == b"\1\2\3"


def test_other_writers_may_list_entries_in_any_order():
    header = (
        b'{"late":{"dtype":"U8","shape":[2],"data_offsets":[1,3]},'
        b'"early":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    )
    data = len(header).to_bytes(8, "little") + header + b"abc"
    safetensors.deserialize(data)
    assert contents_of(data) == {"early": b"a", "late": b"bc"}


def test_every_flipped_bit_of_header_and_table_is_noticed():
    entries = [
        ShardEntry(name="w[0:1]", dtype="F32", shape=(2, 3), box=((4, 6), (0, 3))),
        ShardEntry(name="c", dtype="C128", shape=(2,)),
        ShardEntry(name="z", dtype="BF16", shape=(4,)),
    ]
    data = make_shard(entries, [bytes(24), bytes(32), bytes(8)], frames={2: [b"abc"]})
    expected = digest_of(data)
    layout = open_shard(data)
    silent = []
    for place in [*range(len(layout.header)), *range(layout.table_offset, len(data))]:
        for bit in range(8):
            damaged = bytearray(data)
            damaged[place] ^= 1 << bit
            try:
                found = open_shard(bytes(damaged))
            except CheckpointError:
                continue
            table = bytes(damaged)[found.table_offset :]
            if not found.is_holdfast or file_digest(found.header, table) == expected:
                silent.append((place, bit))
    assert silent == []


def test_headers_are_parsed_only_whole():
    data, _ = shard_of([ShardEntry(name="w", dtype="F32", shape=(2,))])
    with pytest.raises(CorruptedError, match="not as many as it says"):
        parse_shard_header(data[:4095], len(data), path="p")
    with pytest.raises(CorruptedError, match="not as many as it says"):
        parse_shard_header(data[:4097], len(data), path="p")


def test_metadata_are_texts():
    entry = ShardEntry(name="w", dtype="U8", shape=(1,))
    for metadata in ({1: "a"}, {"a": 1}, {"": "a"}):
        with pytest.raises((TypeError, ValueError), match="metadata"):
            plan_shard([entry], metadata=metadata)
