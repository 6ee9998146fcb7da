"""Grids against brute force, and layouts over a mesh against torch's own arithmetic."""

import itertools
import math

import numpy as np
import pytest
from hostile_tools import peak_of
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.reshard import Box, Grid, IndexRuns, Replicate, Shard, StridedShard, mesh_grid


@st.composite
def grids(draw):
    shape = draw(st.lists(st.integers(0, 7), max_size=3).map(tuple))
    if 0 in shape:
        return Grid.whole(shape)
    cuts = []
    for size in shape:
        step = st.integers(1, size)
        inner = st.sets(st.integers(1, size - 1)) if size > 1 else st.just(set())
        cuts.append(draw(step | inner.map(lambda at: IndexRuns.of(sorted(at)))))
    return Grid(shape, tuple(cuts))


def slices(box):
    return tuple(slice(low, high) for low, high in zip(box.start, box.stop, strict=True))


@given(grids())
@settings(deadline=None)
def test_every_element_is_in_one_cell_and_cells_go_row_by_row(grid):
    counts = np.zeros(grid.shape, dtype=int)
    boxes = [grid.box(cell) for cell in range(grid.cells)]
    for box in boxes:
        counts[slices(box)] += 1
    assert (counts == 1).all()
    assert boxes == sorted(boxes, key=lambda box: box.start)
    assert math.prod(grid.counts) == grid.cells == len(boxes)


@given(st.data(), grids())
@settings(deadline=None)
def test_cells_in_a_box_are_those_that_meet_it(data, grid):
    bounds = [
        sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in grid.shape
    ]
    box = Box(tuple(low for low, _ in bounds), tuple(high for _, high in bounds))
    met = [cell for cell in range(grid.cells) if grid.box(cell).intersect(box)]
    assert list(grid.cells_in(box)) == met


def test_cells_are_found_without_looking_at_the_others():
    grid = Grid((10**12, 10**12), (1, 10))
    assert grid.cells == 10**23
    found = list(grid.cells_in(Box((5, 15), (7, 31))))
    assert [grid.box(cell) for cell in found] == [
        Box((row, column), (row + 1, column + 10)) for row in (5, 6) for column in (10, 20, 30)
    ]


def test_cells_of_a_huge_grid_are_not_listed_before_the_first_is_known():
    for grid in (Grid((10**9,), (1,)), Grid((10**9, 2, 10**9), (1, 1, 10**9))):
        cells = grid.cells_in(Box.whole(grid.shape))
        assert peak_of(lambda cells=cells: list(itertools.islice(cells, 5))) < 10_000
        assert next(cells) == 5


def test_equal_cuts_become_a_step():
    grid = Grid.of_cuts((10, 10, 10, 10), [[4, 8], [3, 5], [], [5]])
    assert grid.cuts == (4, IndexRuns(runs=((3, 2, 2),)), 10, 5)
    assert Grid.of_cuts((10, 10), [[4], [2, 4, 6]]).cuts == (
        IndexRuns(runs=((4, 0, 1),)),
        IndexRuns(runs=((2, 2, 3),)),
    )
    assert Grid.of_cuts((), []) == Grid.whole(())
    assert Grid.whole(()).cells == 1


@given(st.integers(2, 30), st.data())
@settings(deadline=None)
def test_cuts_are_a_step_where_one_fits_and_greedy_runs_where_none_does(size, data):
    regular = {tuple(range(step, size, step)): step for step in range(size, 0, -1)}
    at = data.draw(
        st.sampled_from(sorted(regular))
        | st.sets(st.integers(1, size - 1)).map(lambda places: tuple(sorted(places)))
    )
    (cut,) = Grid.of_cuts((size,), [list(at)]).cuts
    (of_array,) = Grid.of_cuts((size,), [np.array(at, dtype=np.int64)]).cuts
    assert cut == of_array
    if not at:
        assert cut == size
    elif at in regular:
        assert cut == at[0]
    else:
        assert cut == IndexRuns.of(at)


def test_cells_between_uneven_cuts_are_found_without_expanding_the_runs():
    half = 5 * 10**17
    cuts = IndexRuns(runs=((10, 10, half // 10), (half + 3, 7, half // 7)))
    grid = Grid((10**18,), (cuts,))
    assert grid.cells == half // 10 + half // 7 + 1
    found = list(grid.cells_in(Box((half - 1,), (half + 11,))))
    assert found == [half // 10 - 1 + cell for cell in range(4)]
    assert [grid.box(cell) for cell in found] == [
        Box((half - 10,), (half,)),
        Box((half,), (half + 3,)),
        Box((half + 3,), (half + 10,)),
        Box((half + 10,), (half + 17,)),
    ]
    assert grid.box(grid.cells - 1) == Box((half + 3 + 7 * (half // 7 - 1),), (10**18,))


@pytest.mark.parametrize(
    ("shape", "cuts"),
    [
        ((4,), (0,)),
        ((4,), (5,)),
        ((4,), (-1,)),
        ((4,), (IndexRuns.of([0]),)),
        ((4,), (IndexRuns.of([4]),)),
        ((4,), (IndexRuns.of([2, 2]),)),
        ((4,), (IndexRuns.of([3, 2]),)),
        ((9,), (IndexRuns(runs=((1, 2, 3), (5, 1, 2))),)),
        ((9,), (IndexRuns(runs=((1, 2, 3), (4, 1, 1))),)),
        ((9,), (IndexRuns(runs=((5, 1, 10**15),)),)),
        ((4,), ([2],)),
        ((4,), ((2,),)),
        ((4,), (2, 2)),
        ((0, 4), (0, 2)),
        ((0,), (1,)),
        ((-1,), (1,)),
    ],
)
def test_impossible_grids_are_refused(shape, cuts):
    with pytest.raises(ValueError):
        Grid(shape, cuts)


def test_cells_and_boxes_that_are_not_there_are_refused():
    with pytest.raises(IndexError):
        Grid((4,), (2,)).box(2)
    with pytest.raises(ValueError, match="not within"):
        list(Grid((4,), (2,)).cells_in(Box((0,), (5,))))


@given(st.lists(st.integers(0, 9)))
@settings(deadline=None)
def test_runs_give_back_the_numbers_they_were_made_of(values):
    runs = IndexRuns.of(values)
    assert list(runs) == runs.array().tolist() == [runs[i] for i in range(len(runs))] == values
    assert runs.bounds == ((min(values), max(values)) if values else (0, -1))


@given(st.sets(st.integers(0, 40)).map(sorted), st.integers(-2, 45))
@settings(deadline=None)
def test_numbers_below_a_value_are_counted(values, value):
    assert IndexRuns.of(values).below(value) == sum(number < value for number in values)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(-2, 3), st.integers(1, 3)), max_size=4))
@settings(deadline=None)
def test_runs_rise_if_their_numbers_do(runs):
    legal = tuple(run for run in runs if run[0] + run[1] * (run[2] - 1) >= 0)
    numbers = IndexRuns(runs=legal)
    assert numbers.rises == (list(numbers) == sorted(set(numbers)))


@pytest.mark.parametrize("run", [(1, -1, 3), (0, 1, 0), (-1, 1, 2), (0, -1, 2)])
def test_a_run_that_has_no_numbers_or_some_below_0_is_refused(run):
    assert list(IndexRuns(runs=((2, -1, 3), (0, 0, 1)))) == [2, 1, 0, 0]
    with pytest.raises(ValueError, match="is no run"):
        IndexRuns(runs=(run,))


def test_a_number_that_comes_twice_does_not_rise():
    assert not IndexRuns(runs=((3, 0, 2),)).rises
    assert not IndexRuns(runs=((3, 1, 2), (4, 1, 1))).rises
    assert IndexRuns(runs=((3, 0, 1), (4, 1, 2))).rises


@pytest.mark.parametrize("cell", [-1, 2])
def test_a_cell_that_is_none_of_the_grid_is_refused(cell):
    with pytest.raises(IndexError, match=f"cell {cell} is not one of 2"):
        Grid((4,), (2,)).box(cell)


def test_a_tensor_without_elements_is_one_cell():
    assert Grid((0, 4), (0, 4)).cells == 1
    with pytest.raises(ValueError, match="has no elements and so one cell, not several"):
        Grid((0, 4), (0, 2))


def test_arithmetic_numbers_are_one_run():
    assert IndexRuns.of(range(0, 80, 8)).runs == ((0, 8, 10),)
    assert IndexRuns.of([5, 5, 5, 0, 1, 2]).runs == ((5, 0, 3), (0, 1, 3))
    assert IndexRuns.of([7]).runs == ((7, 0, 1),)


@pytest.mark.parametrize("run", [(0, 1, 0), (-1, 1, 2), (3, -2, 3)])
def test_impossible_runs_are_refused(run):
    with pytest.raises(ValueError, match="no run"):
        IndexRuns(runs=(run,))


@st.composite
def laid_out(draw, *, strided=True):
    shape = draw(st.lists(st.integers(0, 13), min_size=1, max_size=3).map(tuple))
    mesh_shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple))
    dims = st.integers(0, len(shape) - 1)
    kinds = [st.just(Replicate()), st.builds(Shard, dims)]
    if strided:
        kinds.append(st.builds(StridedShard, dims, st.integers(1, 4)))
    placements = draw(st.tuples(*(st.one_of(kinds) for _ in mesh_shape)))
    return shape, mesh_shape, placements


def coordinates(mesh_shape):
    return itertools.product(*map(range, mesh_shape))


@given(laid_out())
@settings(max_examples=300, deadline=None)
def test_every_coordinate_holds_what_torch_says(case):
    """torch's own arithmetic gives shape and first offset; its index lists give every element."""
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    shape, mesh_shape, placements = case
    laid = mesh_grid(shape, mesh_shape, placements)
    for coordinate in coordinates(mesh_shape):
        theirs = [in_torch(placement) for placement in placements]
        expected, offset = _compute_local_shape_and_global_offset(
            shape, mesh_shape, list(coordinate), theirs
        )
        parts = laid.parts(coordinate)
        assert laid.local_shape(coordinate) == expected
        assert math.prod(expected) == sum(part.box.size for part in parts)
        if parts:
            assert parts[0].box.start == offset
        numbered = np.arange(math.prod(shape)).reshape(shape)
        local = np.full(expected, -1)
        for part in parts:
            assert part.array_shape == expected
            local[slices(part.local)] = numbered[slices(part.box)]
        assert np.array_equal(local, torch_local(shape, mesh_shape, theirs, coordinate))


def in_torch(placement):
    from torch.distributed.tensor import placement_types as theirs

    match placement:
        case Shard(dim):
            return theirs.Shard(dim)
        case StridedShard(dim, factor):
            return theirs._StridedShard(dim, split_factor=factor)
    return theirs.Replicate()


def torch_local(shape, mesh_shape, placements, coordinate):
    """The local tensor, cut by torch's own placements from left to right."""
    import torch

    local = torch.arange(math.prod(shape)).reshape(shape)
    for count, at, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if not placement.is_replicate():
            pieces, _ = placement._split_tensor(local, count, with_padding=False)
            local = pieces[at]
    return local.numpy()


@given(laid_out())
@settings(deadline=None)
def test_cells_and_their_owners_are_what_the_coordinates_hold(case):
    shape, mesh_shape, placements = case
    laid = mesh_grid(shape, mesh_shape, placements)
    grid = laid.grid()
    owners, pieces = laid.owners()
    assert len(owners) == len(pieces) == grid.cells
    if 0 in shape:
        assert (grid, owners.tolist()) == (Grid.whole(shape), [0])
        return
    held = {}
    for cell, owner in enumerate(owners.tolist()):
        held.setdefault(owner, []).append(grid.box(cell))
    first = [
        coordinate
        for coordinate in coordinates(mesh_shape)
        if not any(at and p == Replicate() for at, p in zip(coordinate, placements, strict=True))
    ]
    for coordinate in first:
        number = int(np.ravel_multi_index(coordinate, mesh_shape))
        assert held.pop(number, []) == [part.box for part in laid.parts(coordinate)]
    assert held == {}
    counts = [sum(part.box.size for part in laid.parts(c)) for c in first]
    assert laid.elements()[:, 0].tolist() == counts


def test_fsdp_over_tp_is_contiguous_when_even_and_several_boxes_when_not():
    placements = (StridedShard(0, 2), Shard(0))
    even = mesh_grid((8,), (2, 2), placements)
    assert [even.parts(c)[0].box for c in coordinates((2, 2))] == [
        Box((0,), (2,)), Box((4,), (6,)), Box((2,), (4,)), Box((6,), (8,)),
    ]  # fmt: skip
    assert even.grid() == Grid((8,), (2,))
    uneven = mesh_grid((9,), (4, 1), placements)
    assert [part.box for part in uneven.parts((0, 0))] == [Box((0,), (2,)), Box((5,), (6,))]
    assert [part.local for part in uneven.parts((0, 0))] == [Box((0,), (2,)), Box((2,), (3,))]


@pytest.mark.parametrize(
    ("mesh_shape", "placements"),
    [
        ((2,), ()),
        ((0,), (Shard(0),)),
        ((2,), (Shard(1),)),
        ((2,), (Shard(-1),)),
        ((2,), (StridedShard(0, 0),)),
    ],
)
def test_placements_that_cannot_be_are_refused(mesh_shape, placements):
    with pytest.raises(ValueError):
        mesh_grid((4,), mesh_shape, placements)


def test_runs_are_of_numbers_that_are_not_negative():
    for run in ((-1, 1, 2), (1, -2, 2), (0, 1, 0)):
        with pytest.raises(ValueError, match="is no run"):
            IndexRuns(runs=(run,))


def test_a_dimension_is_cut_after_one_element_at_least():
    with pytest.raises(ValueError, match="cannot be cut every 0 elements"):
        Grid((4,), (0,))
    assert Grid((0,), (0,)).shape == (0,)
