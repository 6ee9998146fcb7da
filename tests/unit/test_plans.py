"""Plans against real arrays: ranks write what the plan says, and load what they want."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.reshard import (
    Box,
    Grid,
    IndexRuns,
    Layout,
    Leaf,
    LeafList,
    Part,
    RankGroup,
    Replicate,
    Shard,
    StridedShard,
    check_coverage,
    group_ranks,
    mesh_grid,
    plan_load,
    plan_save,
)

MIB = 1024 * 1024


def layout(mesh_shape, *placements, ranks=None):
    numbers = range(math.prod(mesh_shape)) if ranks is None else ranks
    return Layout(
        mesh_shape=tuple(mesh_shape), ranks=IndexRuns.of(list(numbers)), placements=placements
    )


def f32(name, *shape, layout=None):
    return Leaf(name=name, dtype="F32", itemsize=4, shape=shape, layout=layout)


def one_group(world, leaves, *layouts):
    listed = LeafList(leaves=tuple(leaves), layouts=layouts)
    return [RankGroup(ranks=tuple(range(world)), leaves=listed)]


def slices(box):
    return tuple(slice(low, high) for low, high in zip(box.start, box.stop, strict=True))


def assert_sound(plan, world):
    """Every leaf is written exactly once, by the ranks and in the boxes that the record says."""
    written = {tensor.leaf.name: {} for tensor in plan.tensors}
    for rank in range(world):
        load = 0
        for write in plan.writes_of(rank):
            assert write.part.box not in written[write.leaf.name]
            written[write.leaf.name][write.part.box] = rank
            load += write.part.box.size * write.leaf.itemsize
        assert load == plan.bytes_of[rank]
    for tensor in plan.tensors:
        boxes = [tensor.grid.box(cell) for cell in range(tensor.grid.cells)]
        assert dict(zip(boxes, tensor.writers, strict=True)) == written[tensor.leaf.name]
        assert check_coverage(tensor.leaf.shape, boxes) is None


@st.composite
def jobs(draw):
    world = draw(st.integers(1, 8))
    shapes = [(world,)] + [(a, world // a) for a in range(1, world + 1) if world % a == 0]
    layouts = []
    for _ in range(draw(st.integers(0, 3))):
        mesh_shape = draw(st.sampled_from(shapes))
        kinds = st.one_of(
            st.just(Replicate()),
            st.builds(Shard, st.integers(0, 1)),
            st.builds(StridedShard, st.integers(0, 1), st.integers(1, 3)),
        )
        placements = draw(st.tuples(*(kinds for _ in mesh_shape)))
        ranks = draw(st.permutations(range(world)))
        layouts.append(layout(mesh_shape, *placements, ranks=ranks))
    leaves = []
    for number in range(draw(st.integers(0, 6))):
        chosen = draw(st.none() | st.integers(0, len(layouts) - 1)) if layouts else None
        least = 0 if chosen is None else 2
        shape = draw(st.lists(st.integers(0, 9), min_size=least, max_size=3).map(tuple))
        leaves.append(f32(f"leaf{number}", *shape, layout=chosen))
    return world, leaves, layouts


@given(jobs(), st.sampled_from([1, 16, 10**6]))
@settings(max_examples=200, deadline=None)
def test_every_element_is_written_once_whatever_the_layouts(job, piece_bytes):
    world, leaves, layouts = job
    plan = plan_save(one_group(world, leaves, *layouts), piece_bytes=piece_bytes)
    assert [tensor.leaf for tensor in plan.tensors] == leaves
    assert_sound(plan, world)


@given(jobs(), st.data())
@settings(max_examples=100, deadline=None)
def test_what_ranks_wrote_is_what_other_layouts_load(job, data):
    """Files are arrays of bytes here; every rank of another mesh fills its own tensors."""
    world, leaves, layouts = job
    plan = plan_save(one_group(world, leaves, *layouts), piece_bytes=8)
    for number, tensor in enumerate(plan.tensors):
        shape = tensor.leaf.shape
        values = np.random.default_rng(number).standard_normal(shape).astype(np.float32)
        files = {}
        for rank in range(world):
            for write in plan.writes_of(rank):
                if write.leaf == tensor.leaf:
                    local = local_tensor(values, tensor, rank) if values.size else values
                    files[rank, write.part.box] = local[slices(write.part.local)].tobytes()
        mesh_shape = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=2).map(tuple))
        kinds = [st.just(Replicate())]
        if shape:
            dims = st.integers(0, len(shape) - 1)
            kinds += [st.builds(Shard, dims), st.builds(StridedShard, dims, st.integers(1, 3))]
        wanted = mesh_grid(
            shape, mesh_shape, data.draw(st.tuples(*(st.one_of(kinds) for _ in mesh_shape)))
        )
        for coordinate in itertools.product(*map(range, mesh_shape)):
            filled = np.full(wanted.local_shape(coordinate), np.nan, dtype=np.float32)
            expected = filled.copy()
            memory = filled.reshape(-1).view(np.uint8)
            for part in wanted.parts(coordinate):
                expected[slices(part.local)] = values[slices(part.box)]
                for load in plan_load(part, tensor.grid, tensor.writers, itemsize=4):
                    stored = np.frombuffer(files[load.file, load.stored], dtype=np.uint8)
                    for src, dst, n in load.copy:
                        memory[dst : dst + n] = stored[src : src + n]
            assert not np.isnan(filled).any()
            assert np.array_equal(filled, expected)


def local_tensor(values, tensor, rank):
    index = list(tensor.layout.ranks).index(rank)
    coordinate = np.unravel_index(index, tensor.layout.mesh_shape)
    held = mesh_grid(tensor.leaf.shape, tensor.layout.mesh_shape, tensor.layout.placements)
    local = np.zeros(held.local_shape(coordinate), dtype=values.dtype)
    for part in held.parts(coordinate):
        local[slices(part.local)] = values[slices(part.box)]
    return local


def test_a_job_of_8192_ranks_is_one_run_per_tensor():
    fsdp = layout((8192,), Shard(0))
    plan = plan_save(one_group(8192, [f32("w", 16384, 8, layout=0)], fsdp))
    (tensor,) = plan.tensors
    assert tensor.grid == Grid((16384, 8), (2, 8))
    assert tensor.writers.runs == ((0, 1, 8192),)
    assert [write.part.box for write in plan.writes_of(5)] == [Box((10, 0), (12, 8))]


def test_fsdp_over_tp_takes_a_run_for_each_tp_rank():
    both = layout((1024, 8), StridedShard(0, 8), Shard(0))
    (tensor,) = plan_save(one_group(8192, [f32("w", 8192, layout=0)], both)).tensors
    assert tensor.grid == Grid((8192,), (1,))
    assert tensor.writers.runs == tuple((first, 8, 1024) for first in range(8))


@pytest.mark.parametrize(
    ("rows", "cells", "cuts", "writers"),
    [(53_248, 7608, 8, 8), (20_333, 6783, 8, 8), (16_411, 6151, 3, 348), (73_755, 7889, 104, 110)],
)
def test_uneven_fsdp_over_tp_is_far_fewer_runs_than_cells(rows, cells, cuts, writers):
    both = layout((1024, 8), StridedShard(0, 8), Shard(0))
    plan = plan_save(one_group(8192, [f32("w", rows, layout=0)], both))
    (tensor,) = plan.tensors
    (cut,) = tensor.grid.cuts
    assert (tensor.grid.cells, len(cut.runs), len(tensor.writers.runs)) == (cells, cuts, writers)
    for rank in (0, 5, 4001):
        written = [write.part.box for write in plan.writes_of(rank)]
        own = [cell for cell, writer in enumerate(tensor.writers) if writer == rank]
        assert written == [tensor.grid.box(cell) for cell in own]


def test_replicas_share_the_leaves_of_hybrid_sharding():
    hsdp = layout((4, 8), Replicate(), Shard(0))
    leaves = [f32(f"w{i}", 64, 16, layout=0) for i in range(8)]
    plan = plan_save(one_group(32, leaves, hsdp))
    assert set(plan.bytes_of) == {8 * 64 * 16 * 4 // 32}
    assert sorted(tensor.writers.runs for tensor in plan.tensors) == sorted(
        ((first, 1, 8),) for first in (0, 8, 16, 24) for _ in range(2)
    )
    assert_sound(plan, 32)


@given(
    st.integers(1, 16), st.lists(st.integers(0, 3000), max_size=30), st.sampled_from([64, 10**6])
)
@settings(deadline=None)
def test_no_rank_writes_more_than_the_mean_and_one_piece(world, sizes, piece_bytes):
    leaves = [f32(f"w{i}", size) for i, size in enumerate(sizes)]
    plan = plan_save(one_group(world, leaves), piece_bytes=piece_bytes)
    largest = max((t.grid.box(0).size * 4 for t in plan.tensors), default=0)
    assert sum(plan.bytes_of) == 4 * sum(sizes)
    assert max(plan.bytes_of) <= sum(plan.bytes_of) / world + largest
    assert_sound(plan, world)


def test_a_leaf_larger_than_a_fair_share_is_cut_by_rows():
    leaves = [f32("embedding", 32_000, 1024), f32("norm", 1024)]
    plan = plan_save(one_group(4, leaves))
    embedding, norm = plan.tensors
    assert embedding.grid == Grid((32_000, 1024), (8000, 1024))
    assert embedding.writers.runs == ((0, 1, 4),)
    assert norm.grid.cells == 1
    assert max(plan.bytes_of) - min(plan.bytes_of) == 4096
    small = plan_save(one_group(4, [f32("embedding", 32, 1024)]))
    assert small.tensors[0].grid.cells == 1


def test_a_cut_leaf_of_few_rows_is_cut_across_them():
    (tensor,) = plan_save(one_group(8, [f32("w", 2, 64 * MIB // 8)])).tensors
    assert tensor.grid == Grid((2, 8 * MIB), (2, MIB))


def test_leaves_of_exactly_a_fair_share_stay_whole():
    plan = plan_save(one_group(2, [f32("a", 8), f32("b", 8)]), piece_bytes=4)
    assert [tensor.grid.cells for tensor in plan.tensors] == [1, 1]
    assert plan.bytes_of == (32, 32)


def test_a_leaf_that_no_dimension_cuts_often_enough_is_cut_along_its_longest():
    (tensor,) = plan_save(one_group(8, [f32("w", 2, 5, 3)]), piece_bytes=4).tensors
    assert tensor.grid == Grid((2, 5, 3), (2, 1, 3))


def test_stages_of_a_pipeline_write_their_own_leaves_and_share_the_common_ones():
    first, second = layout((2,), Shard(0)), layout((2,), Shard(0), ranks=[2, 3])
    groups = [
        RankGroup(
            ranks=(0, 1),
            leaves=LeafList(
                leaves=(f32("a", 8, layout=0), f32("tied", 6, layout=0), f32("step")),
                layouts=(first,),
            ),
        ),
        RankGroup(
            ranks=(2, 3),
            leaves=LeafList(leaves=(f32("tied", 6, layout=0), f32("step")), layouts=(second,)),
        ),
    ]
    plan = plan_save(groups)
    assert_sound(plan, 4)
    writers = {tensor.leaf.name: list(tensor.writers) for tensor in plan.tensors}
    assert writers["a"] == [0, 1]
    assert writers["tied"] == [2, 3]
    assert writers["step"] == [2]


def test_one_rank_with_a_leaf_more_still_shares_a_mesh_with_the_others():
    mesh = layout((3,), Shard(0))
    common = f32("w", 6, layout=0)
    groups = [
        RankGroup(ranks=(0,), leaves=LeafList(leaves=(common, f32("log", 2)), layouts=(mesh,))),
        RankGroup(ranks=(1, 2), leaves=LeafList(leaves=(common,), layouts=(mesh,))),
    ]
    plan = plan_save(groups)
    assert_sound(plan, 3)
    assert [list(tensor.writers) for tensor in plan.tensors] == [[0, 1, 2], [0]]


def test_a_leaf_without_bytes_for_its_elements_is_refused():
    assert Leaf(name="w", dtype="U8", itemsize=1, shape=(2,)).itemsize == 1
    with pytest.raises(ValueError, match="itemsize must be at least 1, not 0"):
        Leaf(name="w", dtype="F32", itemsize=0, shape=(2,))


def test_ranks_that_disagree_about_a_leaf_are_refused():
    def group(rank, leaf, *layouts):
        return RankGroup(ranks=(rank,), leaves=LeafList(leaves=(leaf,), layouts=layouts))

    with pytest.raises(
        ValueError, match=r"'w' is F32 \(2,\) on some ranks and F32 \(3,\) on rank 1"
    ):
        plan_save([group(0, f32("w", 2)), group(1, f32("w", 3))])
    mesh = layout((2,), Shard(0))
    with pytest.raises(ValueError, match="'w' is laid over rank 1, which does not list it"):
        plan_save([group(0, f32("w", 2, layout=0), mesh)])


@given(jobs())
@settings(deadline=None)
def test_a_list_of_leaves_survives_the_way_to_another_rank(job):
    _, leaves, layouts = job
    listed = LeafList(leaves=tuple(leaves), layouts=tuple(layouts))
    again = LeafList.decode(listed.encode())
    assert again == listed
    assert again.digest() == listed.digest()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b"[[],[[1]]]",
        b'[[],[["w","F32",4,[-1],null]]]',
        b'[[],[["w","F32",4,[1],0]]]',
        b'[[],[["w","F32",4,[1],null],["w","F32",4,[1],null]]]',
        b"[[[[2],[[0,1,1]],[[0]]]],[]]",
        b"[[[[2],[[0,0,2]],[[0]]]],[]]",
        b'[[[[1],[[0,0,1]],["x"]]],[]]',
        b"[" * 100_000,
    ],
)
def test_bytes_that_are_no_list_of_leaves_are_refused(data):
    with pytest.raises(ValueError, match="not a list of leaves"):
        LeafList.decode(data)


def test_lists_that_differ_in_anything_differ_in_digest():
    mesh = layout((2,), Shard(0))
    base = f32("w", 2, 3, layout=0)
    lists = [
        LeafList(leaves=(base,), layouts=(mesh,)),
        LeafList(leaves=(f32("v", 2, 3, layout=0),), layouts=(mesh,)),
        LeafList(leaves=(f32("w", 3, 2, layout=0),), layouts=(mesh,)),
        LeafList(leaves=(f32("w", 2, 3),), layouts=(mesh,)),
        LeafList(leaves=(base,), layouts=(layout((2,), Shard(1)),)),
        LeafList(leaves=(base,), layouts=(layout((2,), Shard(0), ranks=[1, 0]),)),
        LeafList(leaves=(base,), layouts=(layout((2,), StridedShard(0, 2)),)),
    ]
    assert len({each.digest() for each in lists}) == len(lists)


def test_ranks_with_the_same_digest_are_one_group():
    assert group_ranks([b"x", b"y", b"x", b"z", b"y"]) == [(0, 2), (1, 4), (3,)]
    assert group_ranks([]) == []


def test_a_load_looks_only_at_the_cells_it_meets():
    grid = Grid((10**9, 4), (10, 4))
    files = IndexRuns(runs=((0, 1, 10**8),))
    loads = plan_load(Part.alone(Box((25, 0), (41, 2))), grid, files, itemsize=2)
    assert [(load.file, load.stored, load.piece) for load in loads] == [
        (2, Box((20, 0), (30, 4)), Box((25, 0), (30, 2))),
        (3, Box((30, 0), (40, 4)), Box((30, 0), (40, 2))),
        (4, Box((40, 0), (50, 4)), Box((40, 0), (41, 2))),
    ]
    assert list(loads[0].copy) == [(40 + 8 * row, 4 * row, 4) for row in range(5)]
    assert [(src, nbytes) for src, _, nbytes in loads[0].copy] == [
        (40 + 8 * row, 4) for row in range(5)
    ]


def test_a_load_takes_boxes_that_are_no_grid():
    boxes = [Box((0, 0), (2, 1)), Box((0, 1), (1, 3)), Box((1, 1), (2, 3))]
    loads = plan_load(Part.alone(Box((0, 2), (2, 3))), boxes, IndexRuns.of([7, 8, 9]), itemsize=1)
    assert [(load.file, load.piece) for load in loads] == [
        (8, Box((0, 2), (1, 3))),
        (9, Box((1, 2), (2, 3))),
    ]
    with pytest.raises(ValueError, match="3 boxes and files for 1"):
        plan_load(Part.alone(boxes[0]), boxes, IndexRuns.of([0]), itemsize=1)
