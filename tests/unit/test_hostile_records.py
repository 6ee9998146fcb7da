"""Commit records made to break a reader: each is refused with words."""

import pytest
from hostile_records import CORRUPTED, NEWER, PATH, TENSOR, body, good, placed
from hostile_tools import assert_refused

from holdfast.errors import CorruptedError, IncompatibleVersionError
from holdfast.format import decode_record


@pytest.mark.parametrize(("data", "words"), CORRUPTED.values(), ids=CORRUPTED)
def test_a_hostile_record_is_refused_with_words(data, words):
    most = 500_000 + 2 * len(data)
    assert_refused(lambda: decode_record(data, path=PATH), words, path=PATH, most_bytes=most)


@pytest.mark.parametrize(("data", "words"), NEWER.values(), ids=NEWER)
def test_a_record_of_a_newer_version_says_so(data, words):
    with pytest.raises(IncompatibleVersionError, match=words) as raised:
        decode_record(data, path=PATH)
    assert raised.value.path == PATH


def test_the_record_that_the_cases_start_from_is_good():
    assert decode_record(good(), path=PATH).tensors["w"].shape == (4, 6)


@pytest.mark.parametrize(
    "tensors",
    [
        lambda: {"w": TENSOR | {"shape": [1] * 50_000}},
        lambda: {
            "w": TENSOR
            | {"placement": {"boxes": [[[0, 4], [0, 6]]] * 30_000, "files": [[0, 0, 30_000]]}}
        },
        lambda: {"w": TENSOR | {"placement": {"cuts": [{"step": 1}] * 9_000, "files": []}}},
        lambda: {
            "w": TENSOR
            | {"placement": {"cuts": [{"at": [[300, 300, 300]] * 30_000}] * 2, "files": []}}
        },
        lambda: {str(i): TENSOR | {"dtype": "I8", "shape": [4, 7]} for i in range(3_000)},
    ],
    ids=["dimensions", "boxes", "cuts", "runs", "tensors"],
)
def test_memory_is_in_proportion_to_the_bytes_of_the_record(tensors):
    data = body(tensors=tensors())
    most = 500_000 + 16 * len(data)
    assert_refused(lambda: decode_record(data, path=PATH), "", path=PATH, most_bytes=most)


def test_more_boxes_than_can_be_compared_are_refused():
    boxes = {"boxes": [[[0, 1]]] * 500_001, "files": [[0, 0, 500_001]]}
    half = {"dtype": "U8", "shape": [500_001], "placement": boxes}
    data = body(tensors={"a": half, "b": half})
    with pytest.raises(CorruptedError, match="tensor 'b': the record has more than 1000000 boxes"):
        decode_record(data, path=PATH)
    assert len(decode_record(body(tensors={"a": half}), path=PATH).tensors) == 1


def test_a_box_of_no_elements_is_no_part_of_a_tensor_that_has_some():
    boxes = [[[0, 4], [0, 6]], [[2, 2], [0, 6]]]
    with pytest.raises(CorruptedError, match="tensor 'w': box 1 is not inside the shape"):
        decode_record(placed([4, 6], [[0, 1, 2]], boxes=boxes), path=PATH)
    empty = decode_record(placed([0, 6], [[0, 0, 1]], boxes=[[[0, 0], [0, 6]]]), path=PATH)
    assert empty.tensors["w"].shape == (0, 6)
