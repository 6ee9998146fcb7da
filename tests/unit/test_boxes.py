"""Boxes against the NumPy slices they mean."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.reshard import Box, split_box

SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@st.composite
def boxes_in(draw, shape):
    bounds = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(tuple(low for low, _ in bounds), tuple(high for _, high in bounds))


def slices(box):
    return tuple(slice(low, high) for low, high in zip(box.start, box.stop, strict=True))


def marked(shape, box):
    array = np.zeros(shape, dtype=bool)
    array[slices(box)] = True
    return array


@given(st.data(), SHAPES)
@settings(deadline=None)
def test_size_shape_and_emptiness_are_those_of_the_slice(data, shape):
    box = data.draw(boxes_in(shape))
    taken = np.zeros(shape)[slices(box)]
    assert (box.size, box.shape, box.is_empty) == (taken.size, taken.shape, taken.size == 0)


@given(st.data(), SHAPES)
@settings(deadline=None)
def test_an_intersection_is_the_elements_in_both(data, shape):
    one, other = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    both = marked(shape, one) & marked(shape, other)
    shared = one.intersect(other)
    assert shared == other.intersect(one)
    assert np.array_equal(both, np.zeros_like(both) if shared is None else marked(shape, shared))
    assert (shared is None) == (not both.any())
    if shared is not None:
        assert one.contains(shared)
        assert other.contains(shared)


@given(st.data(), SHAPES)
@settings(deadline=None)
def test_a_box_relative_to_another_takes_the_same_elements_of_it(data, shape):
    outer = data.draw(boxes_in(shape))
    inner = data.draw(boxes_in(outer.shape))
    moved = Box(
        tuple(a + b for a, b in zip(inner.start, outer.start, strict=True)),
        tuple(a + b for a, b in zip(inner.stop, outer.start, strict=True)),
    )
    assert outer.contains(moved)
    assert moved.relative_to(outer) == inner


def test_a_box_outside_is_not_relative_to_another():
    with pytest.raises(ValueError, match="not within"):
        Box((0,), (3,)).relative_to(Box((1,), (4,)))


def test_a_box_of_no_dimensions_is_one_element():
    point = Box.whole(())
    assert (point.size, point.is_empty, point.intersect(point)) == (1, False, point)
    assert split_box(point, 1) == [point]


@pytest.mark.parametrize(
    ("start", "stop"),
    [
        ((0,), (1, 2)),
        ((2,), (1,)),
        ((-1,), (1,)),
        ([0], (1,)),
        ((0.0,), (1,)),
        ((False,), (1,)),
        ((0,), (np.int64(1),)),
        ((0, 3), (1, 2)),
        ((0, 0), (1, True)),
        ((0, 0), (1, "2")),
        ((), [1]),
    ],
)
def test_impossible_bounds_are_refused(start, stop):
    with pytest.raises(ValueError, match="st"):
        Box(start, stop)


def test_bounds_of_different_dimensions_are_told_as_such():
    with pytest.raises(ValueError, match=r"start=\(0,\) and stop=\(1, 2\) differ in dimensions"):
        Box((0,), (1, 2))


def test_boxes_of_different_dimensions_do_not_mix():
    with pytest.raises(ValueError, match="dimensions"):
        Box.whole((2,)).intersect(Box.whole((2, 2)))
    with pytest.raises(ValueError, match="dimensions"):
        Box.whole((2,)).contains(Box.whole(()))


@given(st.data(), SHAPES, st.integers(1, 40))
@settings(deadline=None)
def test_split_pieces_are_the_storage_of_the_box_in_order(data, shape, most):
    box = data.draw(boxes_in(shape))
    numbered = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    pieces = split_box(box, most)
    assert all(piece.size <= most for piece in pieces)
    together = np.concatenate([numbered[slices(piece)].ravel() for piece in pieces])
    assert np.array_equal(together, numbered[slices(box)].ravel())
    assert box.is_empty or not any(piece.is_empty for piece in pieces)


def test_split_cuts_rows_while_a_row_fits_and_columns_when_not():
    box = Box.whole((5, 4))
    assert [piece.shape for piece in split_box(box, 9)] == [(2, 4), (2, 4), (1, 4)]
    assert [piece.shape for piece in split_box(Box.whole((2, 4)), 3)] == [
        (1, 3), (1, 1), (1, 3), (1, 1),
    ]  # fmt: skip


def test_split_needs_room_for_an_element():
    with pytest.raises(ValueError, match="max_elements"):
        split_box(Box.whole((2,)), 0)
