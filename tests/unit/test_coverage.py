"""Coverage against counting every element."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.reshard import Box, Grid, Hole, Outside, Overlap, check_coverage


def slices(box):
    return tuple(slice(low, high) for low, high in zip(box.start, box.stop, strict=True))


def counted(shape, boxes):
    counts = np.zeros(shape, dtype=int)
    for box in boxes:
        counts[slices(box)] += 1
    return counts


@st.composite
def tilings(draw, box):
    """A box cut again and again at random: not only grids."""
    dims = [dim for dim, extent in enumerate(box.shape) if extent > 1]
    if not dims or draw(st.integers(0, 3)) == 0:
        return [box]
    dim = draw(st.sampled_from(dims))
    at = draw(st.integers(box.start[dim] + 1, box.stop[dim] - 1))
    low = Box(box.start, (*box.stop[:dim], at, *box.stop[dim + 1 :]))
    high = Box((*box.start[:dim], at, *box.start[dim + 1 :]), box.stop)
    return draw(tilings(low)) + draw(tilings(high))


@st.composite
def damaged(draw):
    """A tiling with some boxes dropped, doubled, moved or shrunk."""
    shape = draw(st.lists(st.integers(1, 5), max_size=4).map(tuple))
    boxes = draw(tilings(Box.whole(shape)))
    for _ in range(draw(st.integers(0, 3))):
        bounds = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
        stray = Box(tuple(low for low, _ in bounds), tuple(high for _, high in bounds))
        match draw(st.integers(0, 2)):
            case 0:
                boxes.append(stray)
            case 1 if boxes:
                boxes.pop(draw(st.integers(0, len(boxes) - 1)))
            case _ if boxes:
                boxes[draw(st.integers(0, len(boxes) - 1))] = stray
    return shape, draw(st.permutations(boxes))


@given(case=damaged())
@settings(max_examples=400, deadline=None)
def test_the_verdict_is_that_of_counting(case):
    shape, boxes = case
    counts = counted(shape, boxes)
    problem = check_coverage(shape, boxes)
    assert (problem is None) == bool((counts == 1).all())
    match problem:
        case Hole(box=box):
            assert not box.is_empty
            assert (counts[slices(box)] == 0).all()
            assert tuple(np.argwhere(counts == 0)[0].tolist()) == box.start
        case Overlap(box=box, first=first, second=second):
            assert first < second
            assert boxes[first].intersect(boxes[second]) == box
    if problem is not None:
        wrong = np.argwhere(counts != 1)[0].tolist()
        assert marks(problem.box, wrong)


def marks(box, place):
    return all(a <= at < b for a, at, b in zip(box.start, place, box.stop, strict=True))


def test_a_pinwheel_that_no_straight_cut_divides_is_covered():
    boxes = [
        Box((0, 0), (2, 1)), Box((0, 1), (1, 3)), Box((1, 2), (3, 3)),
        Box((2, 0), (3, 2)), Box((1, 1), (2, 2)),
    ]  # fmt: skip
    assert check_coverage((3, 3), boxes) is None
    assert check_coverage((3, 3), boxes[:-1]) == Hole(box=boxes[-1])


def test_boxes_of_equal_volume_in_the_wrong_place_are_found():
    boxes = [Box((0,), (2,)), Box((1,), (3,))]
    assert check_coverage((4,), boxes) == Overlap(box=Box((1,), (2,)), first=0, second=1)
    assert check_coverage((4,), [Box((0,), (2,)), Box((3,), (4,))]) == Hole(box=Box((2,), (3,)))


def test_a_box_outside_the_tensor_is_told():
    for stray in (Box((0,), (5,)), Box((0, 0), (2, 2)), Box((), ())):
        assert check_coverage((4,), [stray]) == Outside(box=stray)


def test_nothing_holds_nothing():
    assert check_coverage((4, 2), []) == Hole(box=Box.whole((4, 2)))
    assert check_coverage((4, 0), []) is None
    assert check_coverage((4, 0), [Box.whole((4, 0))]) is None
    assert check_coverage((2,), [Box((1,), (1,)), Box((0,), (2,))]) is None


def test_a_0_d_tensor_is_held_once():
    point = Box.whole(())
    assert check_coverage((), [point]) is None
    assert check_coverage((), []) == Hole(box=point)
    assert check_coverage((), [point, point]) == Overlap(box=point, first=0, second=1)


def test_sizes_past_64_bits_are_no_problem():
    huge = 2**80
    half = Box((0, 0), (huge, 2**70))
    assert check_coverage((huge, 2**71), [half, Box((0, 2**70), (huge, 2**71))]) is None
    rest = Box((0, 2**70), (huge, 2**71))
    assert check_coverage((huge, 2**71), [half]) == Hole(box=rest)


def test_many_dimensions_cut_at_once_are_proved():
    boxes = []
    rest = Box.whole((2,) * 30)
    for dim in range(30):
        boxes.append(Box(rest.start, (*rest.stop[:dim], 1, *rest.stop[dim + 1 :])))
        rest = Box((*rest.start[:dim], 1, *rest.start[dim + 1 :]), rest.stop)
    assert check_coverage((2,) * 30, [*boxes, rest]) is None
    assert check_coverage((2,) * 30, boxes) == Hole(box=rest)
    assert check_coverage((2,) * 30, [*boxes, rest, boxes[7]]) == Overlap(
        box=boxes[7], first=7, second=31
    )


@pytest.mark.parametrize("grid", [Grid((100_000, 8), (1, 8)), Grid((50, 60, 99), (1, 2, 3))])
def test_a_hundred_thousand_boxes_are_proved_in_any_order(grid):
    boxes = [grid.box(cell) for cell in range(grid.cells)]
    np.random.default_rng(1).shuffle(boxes)
    assert check_coverage(grid.shape, boxes) is None
    gone = boxes.pop(len(boxes) // 2)
    assert check_coverage(grid.shape, boxes) == Hole(box=gone)


def test_boxes_that_are_all_abreast_in_many_dimensions_are_proved():
    side = 25_000
    far = (2,) * 7
    shape = (side, 2 * side, *far)
    near = (1,) * 7
    boxes = [Box((i, 0, *(0,) * 7), (i + 1, side, *near)) for i in range(side)]
    boxes += [Box((0, side + i, *(0,) * 7), (side, side + i + 1, *near)) for i in range(side)]
    for dim in range(7):
        start = (0, 0, *(0,) * dim, 1, *(0,) * (6 - dim))
        boxes.append(Box(start, (side, 2 * side, *near[:dim], *far[dim:])))
    assert check_coverage(shape, boxes) is None
    assert check_coverage(shape, [*boxes, boxes[9]]) == Overlap(
        box=boxes[9], first=9, second=len(boxes)
    )
    first = Box(boxes[-1].start, (1, side, *boxes[-1].stop[2:]))
    assert check_coverage(shape, boxes[:-1]) == Hole(box=first)
