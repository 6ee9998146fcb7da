"""Entry names say which box of which tensor they hold, and nothing else says the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.format._entry_names import entry_name, entry_of_box, parse_entry_name

names = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40),
    st.text("ab[]0123:,_\n", min_size=1, max_size=30),
    st.sampled_from(["__metadata__", "__holdfast_chunks__", "__holdfast", "[]", "w[0:1]", "w[]"]),
)
boxes = st.lists(
    st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)).map(lambda p: tuple(sorted(p))),
    max_size=5,
).map(tuple)


def shape_of(box):
    return tuple(stop - start for start, stop in box)


@given(names, boxes)
def test_a_slice_comes_back_as_it_was(name, box):
    assert parse_entry_name(entry_name(name, shape_of(box), box)) == (name, box)


@given(names, boxes.map(shape_of))
def test_a_whole_tensor_comes_back_as_itself(name, shape):
    whole = tuple((0, size) for size in shape)
    entry = entry_name(name, shape, None)
    expected = (name, None) if entry == name else (name, whole)
    assert parse_entry_name(entry) == expected


@given(names)
def test_whatever_parses_is_written_the_same_way_again(entry):
    try:
        name, box = parse_entry_name(entry)
    except ValueError:
        return
    assert entry_name(name, shape_of(box or ()), box) == entry


@given(st.lists(st.tuples(names, boxes, st.booleans()), max_size=8))
def test_different_parts_have_different_entries(parts):
    meant = {(name, None if whole else box) for name, box, whole in parts}
    entries = {entry_name(name, (3,), box) for name, box in meant}
    # A name that needs its box has one entry for "whole" and for its whole box.
    told = {parse_entry_name(entry) for entry in entries}
    assert len(told) == len(entries)


def test_a_box_has_at_most_64_dimensions():
    box = ((0, 1),) * 64
    assert parse_entry_name(entry_name("w", shape_of(box), box)) == ("w", box)
    with pytest.raises(ValueError, match="more than 64 dimensions"):
        parse_entry_name(f"w[{','.join(['0:1'] * 65)}]")


def test_names_of_slices_read_like_slices():
    assert entry_name("w", (2, 3), ((4, 6), (0, 3))) == "w[4:6,0:3]"
    assert entry_name("w", (), ()) == "w[]"
    assert entry_name("w", (2, 3), None) == "w"


@pytest.mark.parametrize(
    ("name", "shape", "entry"),
    [
        ("w[0:1]", (2,), "w[0:1][0:2]"),
        ("w[]", (), "w[][]"),
        ("[,:9]", (), "[,:9][]"),
        ("__metadata__", (4, 0), "__metadata__[0:4,0:0]"),
        ("__holdfast_chunks__", (1,), "__holdfast_chunks__[0:1]"),
        ("w[a]", (2,), "w[a]"),
        ("w[0:1]\n", (2,), "w[0:1]\n"),
        ("\n[0:1]", (2,), "\n[0:1][0:2]"),
        ("_metadata_", (2,), "_metadata_"),
    ],
)
def test_whole_tensors_carry_a_box_only_where_they_must(name, shape, entry):
    assert entry_name(name, shape, None) == entry


@pytest.mark.parametrize(
    ("box", "entry"),
    [(((0, 4), (0, 6)), "w"), (((0, 2), (0, 6)), "w[0:2,0:6]"), (((2, 4), (3, 6)), "w[2:4,3:6]")],
)
def test_a_box_that_is_the_whole_tensor_has_the_tensors_name(box, entry):
    assert entry_of_box("w", (4, 6), box) == entry


@pytest.mark.parametrize(
    "entry",
    [
        "",
        "[0:1]",
        "w[0:01]",
        "w[00:1]",
        "w[2:1]",
        "w[1]",
        "w[:]",
        "w[0:1,]",
        "w[,0:1]",
        "w[0:1:2]",
        "w[0:9223372036854775808]",
        "w[0:" + "9" * 5000 + "]",
        "w[" + ",".join(["0:1"] * 65) + "]",
        "__metadata__",
        "__holdfast_chunks__",
        "__holdfastened",
        "n" * 65_537,
    ],
    ids=lambda entry: entry[:24],
)
def test_what_no_writer_writes_is_refused(entry):
    with pytest.raises(ValueError):
        parse_entry_name(entry)


@pytest.mark.parametrize("name", ["", "n" * 65_537, "\ud800"], ids=["empty", "long", "surrogate"])
def test_names_that_cannot_be_stored_are_refused(name):
    with pytest.raises(ValueError, match="name must be a text of 1 to 65536 characters"):
        entry_name(name, (), None)


def test_the_longest_name_of_brackets_takes_no_time_to_tell():
    name = "[" * 65_535 + "]"
    assert parse_entry_name(entry_name(name, (1,), None)) == (name, ((0, 1),))
