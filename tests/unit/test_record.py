"""Commit records come back as they were, or not at all."""

import json
import math

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import CheckpointError
from holdfast.format import (
    CommitRecord,
    StoredCut,
    StoredFile,
    StoredPlacement,
    StoredTensor,
    decode_record,
    encode_record,
)
from holdfast.format._value_model import MAX_VALUE_JSON_DEPTH

ATTEMPT = "0123456789abcdef"


def file(rank: int, **given) -> StoredFile:
    about = {"name": f"shard-{rank}-{ATTEMPT}.safetensors", "size_bytes": 8192, "digest": "ab" * 16}
    return StoredFile(**(about | given))


def tensor(shape=(4, 6), *, dtype="F32", files=((0, 0, 1),), **placement) -> StoredTensor:
    placed = StoredPlacement(files=files, **placement)
    return StoredTensor(dtype=dtype, shape=shape, placement=placed)


def grid(*cuts: int | tuple[tuple[int, int, int], ...]) -> tuple[StoredCut, ...]:
    return tuple(StoredCut(step=cut) if isinstance(cut, int) else StoredCut(at=cut) for cut in cuts)


def record(**given) -> CommitRecord:
    about = {
        "state": "committed",
        "ordinal": 3,
        "attempt": ATTEMPT,
        "created": "2026-01-31T12:00:00.25Z",
        "world_size": 2,
        "writer": "holdfast 0.1.0",
        "files": (file(0), file(1), file(2)),
    }
    return CommitRecord(**(about | given))


def again(made: CommitRecord) -> CommitRecord:
    return decode_record(encode_record(made), path="p")


FULL = record(
    fence=7,
    step=1000,
    metrics={"loss": 0.25, "tokens": 2**63 - 1, "lowest": -math.inf, "zero": -0.0},
    custom={"run": "a", "t": {"$": ["tuple", [1, 2.5, None]]}},
    tree={"model": {"w": {"$": ["tensor", "w"]}}, "n": [1, True, "ü"]},
    shard_format="single",
    files=(file(0), file(1, prefix="step_1/a"), file(2, name=f"shard-2-{ATTEMPT}-4.safetensors")),
    tensors={
        "w": tensor(cuts=grid(2, 6), files=((0, 1, 2),)),
        "down": tensor(cuts=grid(2, 3), files=((2, -1, 3), (1, 0, 1))),
        "uneven": tensor(cuts=grid(((1, 0, 1),), ((2, 3, 2),)), files=((0, 0, 6),)),
        "scalar": tensor((), cuts=(), dtype="C128"),
        "none": tensor((3, 0), cuts=grid(3, 0)),
        "boxes": tensor(boxes=(((0, 4), (0, 2)), ((0, 4), (2, 6))), files=((0, 2, 2),)),
        "scalar box": tensor((), boxes=((),)),
        "[weird]\n": tensor((5,), cuts=grid(3), files=((0, 1, 2),), dtype="F4_E2M1_X2"),
    },
)


@pytest.mark.parametrize(
    "made",
    [FULL, record(), record(state="tombstone", files=())],
    ids=["everything", "nothing", "tombstone"],
)
def test_a_record_comes_back_as_it_was(made):
    assert again(made) == made


def test_metrics_that_are_not_finite_come_back():
    metrics = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": np.float64(2.5), "e": -3}
    found = again(record(metrics=metrics)).metrics
    assert math.isnan(found.pop("a"))
    assert found == {"b": math.inf, "c": -math.inf, "d": 2.5, "e": -3}
    assert type(found["e"]) is int


def test_negative_zero_keeps_its_sign():
    assert math.copysign(1, again(record(metrics={"m": -0.0})).metrics["m"]) == -1


def test_the_bytes_are_the_documented_ones():
    made = record(
        metrics={"loss": math.nan},
        files=(file(0), file(1, prefix="old")),
        tensors={"w": tensor(cuts=grid(2, ((1, 4, 2),)), files=((0, 1, 2), (0, 0, 4)))},
    )
    body = (
        b'{"state":"committed","ordinal":3,"attempt":"0123456789abcdef",'
        b'"created":"2026-01-31T12:00:00.25Z","world_size":2,"writer":"holdfast 0.1.0",'
        b'"metrics":{"loss":{"$":["float","nan"]}},'
        b'"files":[{"name":"shard-0-0123456789abcdef.safetensors","size":8192,'
        b'"digest":"abababababababababababababababab"},'
        b'{"name":"shard-1-0123456789abcdef.safetensors","size":8192,'
        b'"digest":"abababababababababababababababab","prefix":"old"}],'
        b'"tensors":{"w":{"dtype":"F32","shape":[4,6],"placement":{'
        b'"cuts":[{"step":2},{"at":[[1,4,2]]}],"files":[[0,1,2],[0,0,4]]}}}}'
    )
    digest = xxhash.xxh3_128_hexdigest(b"holdfast\x001\x00" + body).encode()
    assert encode_record(made) == (
        b'{"format":"holdfast","version":1,"digest":"' + digest + b'","record":' + body + b"}"
    )
    assert json.loads(encode_record(made))["record"] == json.loads(body)


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def rising_runs(draw, size: int):
    runs = []
    before = 0
    while before + 1 < size and draw(st.booleans()):
        first = draw(st.integers(before + 1, size - 1))
        step = draw(st.integers(1, size))
        count = draw(st.integers(1, (size - 1 - first) // step + 1))
        runs.append((first, step, count))
        before = first + step * (count - 1)
    return tuple(runs)


@st.composite
def tensors(draw, files: int):
    shape = tuple(draw(st.lists(st.integers(0, 12), max_size=3)))
    cuts = []
    cells = 1
    for size in shape:
        if 0 in shape:
            cuts.append(StoredCut(step=size))
        elif draw(st.booleans()):
            step = draw(st.integers(1, size))
            cuts.append(StoredCut(step=step))
            cells *= -(-size // step)
        else:
            at = draw(rising_runs(size))
            cuts.append(StoredCut(at=at))
            cells *= sum(count for _, _, count in at) + 1
    runs = []
    while cells:
        count = draw(st.integers(1, cells))
        first, last = draw(st.integers(0, files - 1)), draw(st.integers(0, files - 1))
        step = (last - first) // (count - 1) if count > 1 else 5
        step = 0 if not 0 <= first + step * (count - 1) < files else step
        runs.append((first, step, count))
        cells -= count
    return tensor(shape, cuts=tuple(cuts), files=tuple(runs))


@settings(max_examples=60)
@given(
    st.dictionaries(names, tensors(5), max_size=4),
    values,
    st.dictionaries(names, st.floats(allow_nan=False) | st.integers(-(2**63), 2**63 - 1)),
)
def test_any_record_comes_back(held, tree, metrics):
    made = record(
        files=tuple(file(rank) for rank in range(5)), tensors=held, tree=tree, metrics=metrics
    )
    assert again(made) == made


def test_every_flipped_bit_is_noticed():
    data = encode_record(FULL)
    assert 1000 < len(data) < 5000
    for place in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[place] ^= 1 << bit
            with pytest.raises(CheckpointError):
                decode_record(damaged, path="p")


def test_a_record_cut_anywhere_or_longer_is_refused():
    data = encode_record(FULL)
    for wrong in (
        *(data[:end] for end in range(len(data))),
        data + b" ",
        data + b"\n",
        b" " + data,
    ):
        with pytest.raises(CheckpointError):
            decode_record(wrong, path="p")


def test_a_big_job_is_a_small_record():
    ranks = 8192
    made = record(
        world_size=ranks,
        files=tuple(file(rank) for rank in range(ranks)),
        tensors={
            f"layer.{i}": tensor((ranks * 3, 64), cuts=grid(3, 64), files=((0, 1, ranks),))
            for i in range(1000)
        },
    )
    data = encode_record(made)
    assert len(data) < 2_000_000
    assert decode_record(memoryview(data), path="p") == made


def test_uneven_cuts_of_a_big_job_are_a_small_record():
    ranks = 8192
    at = tuple((first, 3, 1023) for first in range(3, 24_576, 3072))
    made = record(
        world_size=ranks,
        files=tuple(file(rank) for rank in range(ranks)),
        tensors={
            f"layer.{i}": tensor((24_600, 64), cuts=grid(at, 64), files=((0, 1, 8185),))
            for i in range(1000)
        },
    )
    data = encode_record(made)
    assert len(data) < 2_000_000
    assert decode_record(data, path="p") == made


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"metrics": {"ok": True}}, "metric 'ok' must be an int or a float"),
        ({"metrics": {"t": "1"}}, "metric 't' must be an int or a float"),
        ({"metrics": {"huge": 2**63}}, "metric 'huge' is no number"),
        ({"metrics": {"": 1.0}}, "name of a metric"),
        ({"state": "open"}, "Invalid enum value 'open'"),
        ({"ordinal": -1}, "Expected `int` >= 0"),
        ({"ordinal": "1"}, "Expected `int`, got `str`"),
        ({"world_size": 0}, "Expected `int` >= 1"),
        ({"attempt": "A" * 16}, "attempt must be 16 hex digits"),
        ({"created": "2026-01-31T12:00:00+00:00"}, "created must be a time"),
        ({"created": "2026-02-31T12:00:00Z"}, "created must be a time"),
        ({"writer": ""}, "length >= 1"),
        ({"tree": object()}, "object"),
        ({"tree": {"a": 10**700}}, "640 digits|more than"),
        ({"tensors": {"w": tensor(dtype="F7", cuts=grid(4, 6))}}, "'w': there is no dtype 'F7'"),
        ({"tensors": {"\ud800": tensor(cuts=grid(4, 6))}}, "surrogates|record cannot be written"),
        ({"files": (file(0, name="../shard"),), "tensors": {}}, "no name of a shard"),
        ({"state": "tombstone"}, "a tombstone has no files"),
    ],
)
def test_a_record_that_could_not_be_read_is_not_written(given, words):
    with pytest.raises(ValueError, match=words):
        encode_record(record(**given))


def test_a_record_larger_than_one_request_is_not_written():
    with pytest.raises(ValueError, match="more than 67108864"):
        encode_record(record(custom="x" * 67_108_864))


def test_records_are_values():
    with pytest.raises(AttributeError):
        FULL.ordinal = 4
    assert msgspec.structs.replace(FULL, ordinal=4) != FULL


def test_the_deepest_tree_that_can_be_written_is_read():
    tree: object = None
    for _ in range(MAX_VALUE_JSON_DEPTH):
        tree = [tree]
    assert again(record(tree=tree)).tree == tree
    with pytest.raises(ValueError, match="nested more than"):
        encode_record(record(tree=[tree]))


@pytest.mark.parametrize("field", ["tree", "custom"])
@pytest.mark.parametrize("value", [{1: "a", "1": "b"}, [[{"x": {2: 0, "2": 0}}]]])
def test_keys_that_would_be_written_alike_are_not_written(field, value):
    with pytest.raises(ValueError, match="occurs twice in one object"):
        encode_record(record(**{field: value}))


def test_names_that_would_be_written_alike_are_not_written():
    whole = tensor(cuts=grid(4, 6))
    with pytest.raises(ValueError, match="occurs twice in one object"):
        encode_record(record(tensors={1: whole, "1": whole}))
    with pytest.raises(ValueError, match="occurs twice in one object"):
        encode_record(record(metrics={1: 2.0, "1": 2.0}))
