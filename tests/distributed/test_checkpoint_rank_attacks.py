"""What attackers of the distributed checkpoint found, with two ranks."""

import collections

import pytest
import torch
from checkpoint_jobs import checkpointer
from torch import nn

from holdfast import LoadOptions, ReplicaMismatchError, SaveOptions, per_rank
from holdfast.testing import RankGang


@pytest.fixture(scope="module")
def two():
    with RankGang(2) as gang:
        yield gang


def round_trip(rank, folder, make):
    """What comes back of an extra that each rank makes."""
    torch.manual_seed(1)
    model = nn.Linear(2, 2)
    with checkpointer(folder) as ckpt:
        ckpt.save(model, None, SaveOptions(checkpoint_prefix="a"), extra=make(rank))
        extra = dict.fromkeys(make(rank))
        ckpt.load(None, None, LoadOptions(checkpoint_prefix="a"), extra=extra)
    return extra


def clashing(rank):
    return {"x": torch.tensor([100.0 + rank]), "x.@1": torch.tensor([7.0])}


def test_names_of_a_ranks_own_leaves_clash_with_nobodys(two, tmp_path):
    for rank, extra in enumerate(two.run(round_trip, tmp_path, clashing)):
        assert extra["x"].item() == 100 + rank
        assert extra["x.@1"].item() == 7


def in_another_order(rank):
    names = ["a", "b"] if rank else ["b", "a"]
    return {name: f"{name}{rank}" for name in names}


def test_the_order_of_extra_does_not_matter(two, tmp_path):
    for rank, extra in enumerate(two.run(round_trip, tmp_path, in_another_order)):
        assert extra == {"a": f"a{rank}", "b": f"b{rank}"}


def of_other_kinds(rank):
    return {"v": ("int", []) if rank else collections.defaultdict(int, {"k": 1})}


def test_values_of_other_kinds_are_each_ranks_own(two, tmp_path):
    first, second = two.run(round_trip, tmp_path, of_other_kinds)
    assert first["v"] == {"k": 1}
    assert second["v"] == ("int", [])


def own_inside_own(rank):
    inner = {"y": per_rank(rank), "z": [per_rank(rank)] * (rank + 1)}
    return {"v": per_rank(inner), "w": collections.defaultdict(list, {rank: per_rank("w")})}


def test_values_of_a_ranks_own_inside_of_others(two, tmp_path):
    for rank, extra in enumerate(two.run(round_trip, tmp_path, own_inside_own)):
        assert extra["v"] == {"y": rank, "z": [rank] * (rank + 1)}
        assert extra["w"] == {rank: "w"}


def save_stages(rank, folder):
    """Modules that are not replicas, though their names and shapes are the same."""
    torch.manual_seed(rank)
    with checkpointer(folder) as ckpt, pytest.raises(ReplicaMismatchError) as raised:
        ckpt.save(nn.Linear(64, 64), None, SaveOptions(checkpoint_prefix="a"))
    return raised.value.message


def test_parameters_that_are_no_replicas_are_named(two, tmp_path):
    for message in two.run(save_stages, tmp_path):
        assert "model.weight (one value on rank 0, another on rank 1)" in message
