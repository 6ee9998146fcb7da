"""What planning finds out by running a model: what of each stage can be dropped, and what takes
which time."""

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional

from holdfast.activation._planning.profiling import profile
from holdfast.activation._planning.remakable import look_for_recipes
from holdfast.activation._planning.sampling import Sample
from holdfast.activation._planning.seen import StageProfile
from holdfast.activation._planning.stages import keeping, roots_of, standing_in
from holdfast.activation._planning.timing import clocked, timed_step
from holdfast.activation._recipes.dropping import Dropping

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self, width=32, *, inplace=False):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.inplace = inplace

    def forward(self, x):
        y = functional.relu(self.up(self.norm(x)), inplace=self.inplace)
        return x + self.down(functional.gelu(y))


def looked_at(*blocks):
    """The model, its sample, its stages and what was seen of each."""
    model = nn.Sequential(nn.Linear(32, 32), *blocks)
    stages = {f"{number}": block for number, block in enumerate(blocks, start=1)}
    seen = {name: StageProfile(name=name, kind="Block") for name in stages}
    sample = Sample.of(torch.randn(64, 32), torch.sum)
    look_for_recipes(model, sample, stages, seen)
    return model, sample, stages, seen


def fits(model, sample, stages, seen):
    """Whether what was found of each stage is right for its next call."""
    found = {}

    def call(name, module, forward, given):
        output = keeping(name, module, forward, given)
        dropping = Dropping(name, seen[name].recipes.drops)
        found[name] = dropping.drop(roots_of(output, given))
        return output

    with standing_in(stages, call):
        sample.step(model)
    return found


def test_what_was_found_of_one_stage_goes_for_those_that_are_alike():
    found = looked_at(*(Block() for _ in range(4)))
    seen = found[-1]
    # The first has another operation before it, so it is looked at for itself.
    assert seen["3"].recipes is seen["2"].recipes
    assert seen["4"].recipes is seen["2"].recipes
    assert {each.saved_bytes for each in seen.values()} == {seen["1"].saved_bytes}
    assert len({len(each.recipes.made) for each in seen.values()}) == 1
    assert fits(*found) == dict.fromkeys("1234", True)


def test_stages_of_one_class_that_do_other_things_are_looked_at_for_themselves():
    """The graphs have the same nodes: only what was written to in place tells them apart."""
    found = looked_at(Block(), Block(), Block(inplace=True), Block(), Block(inplace=True))
    seen = found[-1]
    assert seen["3"].recipes is not seen["2"].recipes
    assert seen["4"].recipes is seen["2"].recipes
    assert seen["5"].recipes is seen["3"].recipes
    assert fits(*found) == dict.fromkeys("12345", True)


def test_stages_of_another_width_are_looked_at_for_themselves():
    seen = looked_at(Block(), Block(), nn.Sequential(nn.Linear(32, 64), Block(64)))[-1]
    assert seen["3"].recipes.made[0].freed_bytes > seen["2"].recipes.made[0].freed_bytes


def test_a_profile_has_times_of_whole_steps_and_of_every_stage():
    model = nn.Sequential(nn.Linear(32, 32), *(Block() for _ in range(3)))
    stages = {f"{number}": model[number] for number in range(1, 4)}
    sample = Sample.of(torch.randn(64, 32), torch.sum)
    told = []
    found, there = profile(model, sample, stages, CPU, tell=told.append)
    assert set(found.seconds) == set(found.courses) == {"kept", "replayed", "remade"}
    for stage in found.stages:
        assert len(stage.forward_s) == len(stage.replayed_s) == len(stage.dropping_s) == 1
        assert min(*stage.forward_s, *stage.replayed_s, *stage.dropping_s) > 0
    weights = {each.untyped_storage()._cdata for each in model.parameters()}
    assert weights <= {each()._cdata for each in there if each() is not None}
    assert len(told) == len(set(told))


def test_a_block_that_raises_is_timed_too():
    seconds = []
    with pytest.raises(ZeroDivisionError), clocked(seconds, CPU):
        raise ZeroDivisionError
    assert len(seconds) == 1


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_is_not_collected_in_a_step_that_is_timed(collects):
    during = []

    def loss(output):
        during.append(gc.isenabled())
        return output.sum()

    (gc.enable if collects else gc.disable)()
    try:
        timed_step(nn.Linear(2, 2), Sample.of(torch.ones(1, 2), loss), CPU)
        assert gc.isenabled() is collects
    finally:
        gc.enable()
    assert during == [False]
