"""Byte ranges against NumPy: what the runs say is copied, and compared with what slices take."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.reshard import Box, Part, chunk_spans, coalesce, copy_to_part, row_runs

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
ITEMSIZES = st.sampled_from([1, 2, 8])
RANGES = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 30)), max_size=12)


@st.composite
def boxes_in(draw, outer):
    bounds = [
        sorted((draw(st.integers(low, high)), draw(st.integers(low, high))))
        for low, high in zip(outer.start, outer.stop, strict=True)
    ]
    return Box(tuple(low for low, _ in bounds), tuple(high for _, high in bounds))


@st.composite
def boxes_around(draw, inner, shape):
    start = tuple(draw(st.integers(0, low)) for low in inner.start)
    stop = tuple(draw(st.integers(high, n)) for high, n in zip(inner.stop, shape, strict=True))
    return Box(start, stop)


def copy_runs(piece, src, dst, itemsize):
    return copy_to_part(piece, src, Part.alone(dst), itemsize)


def stored(array, box):
    """The bytes of that box of a tensor, as its storage would have them."""
    at = tuple(slice(low, high) for low, high in zip(box.start, box.stop, strict=True))
    return np.ascontiguousarray(array[at]).reshape(-1).view(np.uint8)


def as_array(shape, itemsize):
    """A tensor with different bytes wherever one looks."""
    data = np.random.default_rng(3).bytes(int(np.prod(shape, dtype=int)) * itemsize)
    return np.frombuffer(data, dtype=f"V{itemsize}").reshape(shape)


@given(st.data(), SHAPES, ITEMSIZES)
@settings(deadline=None)
def test_row_runs_are_the_bytes_of_the_box(data, shape, itemsize):
    array = as_array(shape, itemsize)
    within = data.draw(boxes_in(Box.whole(shape)))
    box = data.draw(boxes_in(within))
    runs = row_runs(box, within, itemsize)
    source = stored(array, within).tobytes()
    assert b"".join(source[at : at + n] for at, n in runs) == stored(array, box).tobytes()
    assert len(list(runs)) == len(runs)
    ends = [at + n for at, n in runs]
    assert all(end < at for end, (at, _) in zip(ends, list(runs)[1:], strict=False))


@given(st.data(), SHAPES, ITEMSIZES, st.integers(0, 40))
@settings(deadline=None)
def test_merged_runs_take_in_the_short_gaps_and_no_long_one(data, shape, itemsize, gap):
    within = data.draw(boxes_in(Box.whole(shape)))
    runs = row_runs(data.draw(boxes_in(within)), within, itemsize)
    merged = runs.merged(gap)
    expected = [(span.start, span.stop) for span in coalesce(runs, max_gap=gap, max_bytes=10**9)]
    covered = [(at, at + n) for at, n in merged if n]
    bytes_wanted = {byte for at, n in runs for byte in range(at, at + n)}
    bytes_covered = {byte for low, high in covered for byte in range(low, high)}
    assert bytes_wanted <= bytes_covered
    assert bytes_covered <= {byte for low, high in expected for byte in range(low, high)}


@given(st.data(), SHAPES, ITEMSIZES)
@settings(deadline=None)
def test_copy_runs_put_a_piece_where_it_belongs(data, shape, itemsize):
    array = as_array(shape, itemsize)
    piece = data.draw(boxes_in(Box.whole(shape)))
    src = data.draw(boxes_around(piece, shape))
    dst = data.draw(boxes_around(piece, shape))
    runs = copy_runs(piece, src, dst, itemsize)
    source = stored(array, src)
    target = np.zeros(dst.size * itemsize, dtype=np.uint8)
    for at, to, n in runs:
        target[to : to + n] = source[at : at + n]
    expected = np.zeros(dst.shape, dtype=f"V{itemsize}")
    inner = piece.relative_to(dst)
    at = tuple(slice(low, high) for low, high in zip(inner.start, inner.stop, strict=True))
    expected[at] = stored(array, piece).view(f"V{itemsize}").reshape(piece.shape)
    assert target.tobytes() == expected.tobytes()
    assert len(list(runs)) == len(runs)


def test_what_is_contiguous_is_one_run():
    whole = Box.whole((4, 5, 6))
    assert list(row_runs(whole, whole, 2)) == [(0, 240)]
    assert list(row_runs(Box((1, 0, 0), (3, 5, 6)), whole, 2)) == [(60, 120)]
    assert list(row_runs(Box((1, 2, 0), (2, 4, 6)), whole, 2)) == [(84, 24)]
    assert list(row_runs(Box.whole(()), Box.whole(()), 8)) == [(0, 8)]
    columns = row_runs(Box((0, 1, 0), (4, 2, 6)), whole, 2)
    assert (columns.offset, columns.nbytes, columns.counts, columns.strides) == (
        12,
        12,
        (4,),
        (60,),
    )


def test_what_lies_alike_in_both_is_one_copy():
    src, dst = Box.whole((4, 6)), Box((2, 0), (8, 6))
    assert list(copy_runs(Box((2, 0), (4, 6)), src, dst, 1)) == [(12, 0, 12)]


def test_a_box_of_a_million_rows_is_described_in_one_line():
    within = Box.whole((10**6, 10**6))
    runs = row_runs(Box((0, 5), (10**6, 7)), within, 4)
    assert (len(runs), runs.nbytes, runs.strides) == (10**6, 8, (4 * 10**6,))


def test_boxes_that_do_not_contain_the_piece_are_refused():
    with pytest.raises(ValueError, match="not within"):
        row_runs(Box((0,), (3,)), Box((1,), (4,)), 1)
    with pytest.raises(ValueError, match="not within"):
        copy_runs(Box((0,), (3,)), Box((0,), (3,)), Box((1,), (4,)), 1)
    with pytest.raises(ValueError, match="itemsize"):
        row_runs(Box((0,), (3,)), Box((0,), (3,)), 0)


@given(RANGES, st.integers(0, 20), st.integers(1, 50), st.booleans())
@settings(deadline=None)
def test_spans_serve_every_range_within_the_limits(ranges, max_gap, max_bytes, split):
    spans = coalesce(ranges, max_gap=max_gap, max_bytes=max_bytes, split=split)
    served = {index: set() for index in range(len(ranges))}
    for span in spans:
        length = span.stop - span.start
        alone = max(ranges[index][1] for index in span.members)
        assert 0 < length <= max_bytes or (not split and length == alone)
        touched = [
            (max(at, span.start), min(at + n, span.stop))
            for at, n in (ranges[index] for index in span.members)
        ]
        assert all(low < high for low, high in touched)
        end = span.start
        for low, high in sorted(touched):
            assert low - end <= max_gap
            end = max(end, high)
        assert (min(low for low, _ in touched), end) == (span.start, span.stop)
        for index, (low, high) in zip(span.members, touched, strict=True):
            served[index].update(range(low, high))
    assert all(served[i] == set(range(at, at + n)) for i, (at, n) in enumerate(ranges))
    assert [span.start for span in spans] == sorted(span.start for span in spans)
    if not split:
        members = [index for span in spans for index in span.members]
        assert sorted(members) == [index for index, (_, n) in enumerate(ranges) if n]


def test_neighbours_become_one_read_and_far_ranges_do_not():
    ranges = [(100, 10), (0, 10), (12, 8), (110, 5)]
    spans = coalesce(ranges, max_gap=2, max_bytes=1000)
    assert [(span.start, span.stop, span.members) for span in spans] == [
        (0, 20, (1, 2)),
        (100, 115, (0, 3)),
    ]


def test_without_a_gap_only_what_touches_becomes_one_read():
    spans = coalesce([(90, 2), (92, 2), (95, 1)], max_gap=0, max_bytes=4)
    assert [(span.start, span.stop) for span in spans] == [(90, 94), (95, 96)]
    assert len(coalesce([(0, 1), (1, 1)], max_gap=0, max_bytes=1)) == 2


def test_chunks_that_touch_are_one_run_also_behind_others():
    assert chunk_spans(100, 10, [(0, 5), (30, 5), (35, 10)]) == [(0, 1), (3, 5)]


def test_a_part_of_a_part_is_where_it_was_in_the_array():
    part = Part(box=Box((2, 0), (6, 4)), local=Box((10, 20), (14, 24)), array_shape=(30, 40))
    inner = part.within(Box((3, 1), (5, 2)))
    assert (inner.box, inner.local) == (Box((3, 1), (5, 2)), Box((11, 21), (13, 22)))
    assert inner.array_shape == (30, 40)
    assert part.within(part.box) is part


def test_a_leaf_of_no_bytes_has_no_chunks():
    assert chunk_spans(0, 4, [(0, 0)]) == []


@pytest.mark.parametrize(("max_gap", "max_bytes"), [(-1, 1), (0, 0)])
def test_impossible_limits_are_refused(max_gap, max_bytes):
    with pytest.raises(ValueError, match="max_gap"):
        coalesce([], max_gap=max_gap, max_bytes=max_bytes)


@given(st.integers(0, 100), st.integers(1, 20), st.data())
@settings(deadline=None)
def test_touched_chunks_are_those_that_share_a_byte(nbytes, chunk_bytes, data):
    bound = st.integers(0, nbytes)
    pairs = data.draw(st.lists(st.tuples(bound, bound).map(sorted), max_size=6))
    ranges = [(low, high - low) for low, high in pairs]
    runs = chunk_spans(nbytes, chunk_bytes, ranges)
    touched = {byte // chunk_bytes for low, high in pairs for byte in range(low, high)}
    assert {chunk for first, last in runs for chunk in range(first, last)} == touched
    assert all(first < last < after for (first, last), (after, _) in itertools.pairwise(runs))


def test_ranges_past_the_leaf_touch_no_chunk():
    with pytest.raises(ValueError, match="not within"):
        chunk_spans(10, 4, [(8, 3)])
    with pytest.raises(ValueError, match="chunk_bytes"):
        chunk_spans(10, 0, [])


@pytest.mark.parametrize("span", [(-1, 1), (-1, 0), (0, -1), (10, 1), (0, 11)])
def test_a_range_that_is_not_within_a_leaf_touches_no_chunks(span):
    with pytest.raises(ValueError, match="is not within 10 bytes"):
        chunk_spans(10, 4, [span])
