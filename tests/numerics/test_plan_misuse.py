"""Making and applying plans where something is not as it should be: what is refused, in which
words, and that the model is as it was, also after a failure."""

import contextlib
import copy
import json
import logging
import pickle
import random
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from activation_models import Codebook, GptBlock, OwnStreams, differing, seed_all
from plan_models import KINDS, Gpt, Pairs, Towers, Vit, calm, loss_of, peak_of, step_left, stood
from torch import nn

import holdfast
from holdfast import ActivationPlan
from holdfast.activation import checkpoint_layers, measure_peak
from holdfast.activation._solving.schedule import Schedule
from holdfast.errors import BudgetError, PlanError

calm = pytest.fixture(scope="module", autouse=True)(calm)
GPT = KINDS["gpt"]


def small():
    seed_all(3)
    return Gpt(depth=3)


def tokens(count=4):
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return GPT.batch(count)


@pytest.fixture(scope="module")
def plan():
    return holdfast.plan(small(), tokens(), "60%")


@pytest.fixture(scope="module")
def tight():
    """Every stage but the last replayed."""
    return holdfast.plan(small(), tokens(), "45%")


def forwards(model):
    return [name for name, each in model.named_modules() if "forward" in each.__dict__]


# ---- arguments ---------------------------------------------------------------------------------


class OneOfEach(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Tanh()

    def forward(self, x):
        return self.second(self.first(x)).sum()


class Weightless(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Tanh(), nn.Sigmoid()) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.sum()


class Reused(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([GptBlock(16, 2, 0.1)] * 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def frozen():
    return small().requires_grad_(requires_grad=False)


REFUSED = {
    "nonsense budget": (
        small,
        tokens,
        {"budget": "5 parsecs"},
        ValueError,
        "unknown unit 'parsecs'",
    ),
    "bool": (small, tokens, {"budget": True}, ValueError, "must not be True"),
    "no module": (lambda: 3, tokens, {}, ValueError, "model must be a Module, not 3"),
    "no repetition": (
        OneOfEach,
        lambda: torch.ones(2, 8),
        {},
        ValueError,
        "no repeated layers.*stages=",
    ),
    "no weights": (
        Weightless,
        lambda: torch.ones(2, 8, requires_grad=True),
        {},
        PlanError,
        "Weightless has no parameters",
    ),
    "eval mode": (
        lambda: small().eval(),
        tokens,
        {},
        PlanError,
        r"in eval mode.*call model.train\(\) first",
    ),
    "frozen": (frozen, tokens, {}, PlanError, "needs no gradient.*frozen"),
    "a stage for all": (Reused, lambda: torch.ones(2, 4, 16), {}, PlanError, "ran exactly once"),
    "no such stage": (
        small,
        tokens,
        {"stages": ["blk.*"]},
        ValueError,
        r"stages: 'blk\.\*' matches no.*'blocks\.0'",
    ),
    "nested stages": (
        small,
        tokens,
        {"stages": ["blocks.0", "blocks.0.up"]},
        ValueError,
        r"stages: 'blocks\.0\.up' is inside 'blocks\.0'",
    ),
    "no stages": (small, tokens, {"stages": []}, ValueError, "stages is empty"),
    "stages as a text": (
        small,
        tokens,
        {"stages": "blocks.*"},
        ValueError,
        "stages must be a list",
    ),
    "stages as a number": (small, tokens, {"stages": 3}, ValueError, "stages must be a list"),
    "numbers for stages": (small, tokens, {"stages": [3]}, ValueError, "stages must be a list"),
    "many losses": (
        small,
        tokens,
        {"loss": lambda y: y.expand(3)},
        PlanError,
        r"one value, not \(3,\).*loss=",
    ),
    "no loss": (small, tokens, {"loss": lambda _: None}, PlanError, "one value, not NoneType"),
    "loss without history": (
        small,
        tokens,
        {"loss": lambda y: y.detach()},
        PlanError,
        "needs no gradient",
    ),
    "loss that is none": (small, tokens, {"loss": 3}, ValueError, "loss must be a function"),
    "folder without a tier": (
        small,
        tokens,
        {"folder": "scratch"},
        ValueError,
        "folder is for tier='disk'.*'scratch'",
    ),
    "no such tier": (
        small,
        tokens,
        {"tier": "inplace"},
        ValueError,
        "tier must be 'disk' or 'host', not 'inplace'",
    ),
    "host of a host": (small, tokens, {"tier": "host"}, ValueError, "this model is on the host"),
    "no such solver": (
        small,
        tokens,
        {"solver": ["chain"]},
        ValueError,
        "solver must be one of 'chain', 'highs', not",
    ),
    "progress that is none": (
        small,
        tokens,
        {"progress": 3},
        ValueError,
        "progress must be a function",
    ),
}


@pytest.mark.parametrize("case", list(REFUSED.values()), ids=list(REFUSED))
def test_what_makes_no_sense_is_refused_and_the_model_is_as_it_was(case):
    make, sample, keywords, error, told = case
    model, batch = make(), sample()
    before = stood(model) if isinstance(model, nn.Module) else {}
    with pytest.raises(error, match=told):
        holdfast.plan(model, batch, **{"budget": "50%", **keywords})
    assert differing(before, stood(model) if before else {}) == []


def test_without_gradients_there_is_nothing_to_plan():
    model = small()
    for switched_off in (torch.no_grad, torch.inference_mode):
        with switched_off(), pytest.raises(PlanError, match=r"torch\.no_grad\(\)"):
            holdfast.plan(model, tokens(), "50%")
    assert forwards(model) == []


@pytest.mark.parametrize(
    ("sample", "error"),
    [
        (torch.zeros(2, 3), RuntimeError),
        (torch.full((2, 3), 1000), IndexError),
        ({"nope": 1}, TypeError),
        ((1, 2, 3), TypeError),
    ],
)
def test_what_the_model_raises_on_the_sample_comes_through_with_a_note(sample, error):
    model = small()
    before = stood(model)
    with pytest.raises(error) as raised:
        holdfast.plan(model, sample, "50%")
    assert any("on the sample given to holdfast.plan" in note for note in raised.value.__notes__)
    assert differing(before, stood(model)) == []


class LaterBroken(nn.Module):
    """Works for so many calls, and then does not."""

    def __init__(self, calls):
        super().__init__()
        self.inner, self.left = small(), [calls]

    def forward(self, batch):
        self.left[0] -= 1
        if self.left[0] < 0:
            raise MemoryError
        return self.inner(batch)


@pytest.mark.parametrize("calls", range(0, 13, 2))
def test_a_failure_at_any_time_leaves_the_model_as_it_was(calls):
    model = LaterBroken(calls)
    before = stood(model)
    with contextlib.suppress(MemoryError):
        holdfast.plan(model, tokens(), "50%")
        assert model.left[0] >= 0, "it failed, and that was kept quiet"
    assert differing(before, stood(model)) == []


def test_a_budget_too_small_tells_the_smallest_which_then_works(caplog):
    model = small()
    before = stood(model)
    with pytest.raises(BudgetError, match=r"no plan fits 1\.00 MiB: .*set by") as refused:
        holdfast.plan(model, tokens(), 2**20)
    smallest = refused.value.smallest_bytes
    assert f"{smallest / 2**20:.2f} MiB" in str(refused.value)
    assert "The model is as it was" in str(refused.value)
    assert differing(before, stood(model)) == []
    fitting = holdfast.plan(model, tokens(), smallest)
    assert fitting.peak_bytes <= smallest
    with pytest.raises(BudgetError):
        holdfast.plan(model, tokens(), round(smallest * 0.95))
    assert not caplog.records or max(each.levelno for each in caplog.records) < logging.WARNING


@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("width", [16, 48])
def test_a_smallest_budget_is_one_that_may_be_given(width, turn):
    """Each time that it is told, though times, which differ, decide between solutions."""
    seed_all(3 + turn)
    model = Gpt(depth=3, width=width)
    with pytest.raises(BudgetError) as refused:
        holdfast.plan(model, tokens(2), 0.01)
    smallest = refused.value.smallest_bytes
    assert holdfast.plan(model, tokens(2), smallest).peak_bytes <= smallest


def test_a_smallest_budget_is_never_more_than_everything_takes():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(2)))
    sample = torch.randn(512, 64)
    with pytest.raises(BudgetError) as refused:
        holdfast.plan(model, sample, 0.05, loss=torch.sum)
    everything = holdfast.plan(model, sample, "100%", loss=torch.sum).peak_bytes
    assert refused.value.smallest_bytes <= everything


def test_a_loop_that_holds_the_output_is_within_the_budget():
    """The output of so many classes is a large part of the step."""
    seed_all(3)
    blocks = (GptBlock(64, 4, 0.0) for _ in range(6))
    model = nn.Sequential(nn.Embedding(97, 64), *blocks, nn.Linear(64, 1000))
    batch = tokens()

    def step():
        output = model(batch)
        loss = output.mean()
        loss.backward()

    plan = holdfast.plan(model, batch, "80%", loss=torch.mean)
    step()
    with plan.applied(model):
        assert measure_peak(step).peak_bytes <= plan.budget_bytes * 1.02


def test_a_model_with_more_layers_is_refused(plan):
    seed_all(3)
    deeper = Gpt(depth=5)
    with pytest.raises(PlanError, match=r"has [\d,]+ parameters, and the plan's model had"):
        plan.apply(deeper)
    assert forwards(deeper) == []


def test_plans_are_told_in_a_line(plan):
    model = small()
    assert repr(plan).startswith("<ActivationPlan for Gpt: 3 stages, budget ")
    with plan.applied(model) as applied:
        assert repr(applied) == "<AppliedPlan on 3 stages, 0 fallbacks>"


def test_a_model_that_is_checkpointed_already_is_refused():
    model = small()
    layers = checkpoint_layers(model)
    with pytest.raises(ValueError, match=r"'blocks\.0' is checkpointed already"):
        holdfast.plan(model, tokens(), "50%")
    layers.undo()
    holdfast.plan(model, tokens(), "70%")
    assert forwards(model) == []


def test_a_stage_that_runs_twice_is_left_alone():
    class Returning(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(GptBlock(64, 4, 0.1) for _ in range(3))

        def forward(self, x):
            for number in (0, 1, 2, 0):
                x = self.blocks[number](x)
            return x.square().mean()

    seed_all(3)
    model, batch = Returning(), torch.randn(4, 64, 64)
    made = holdfast.plan(model, batch, "75%")
    assert [row.name for row in made.summary.rows] == ["blocks.1", "blocks.2"]
    other = copy.deepcopy(model)
    expected = step_left(model, batch)
    with made.applied(other):
        assert differing(expected, step_left(other, batch)) == []


# ---- planning leaves no trace ------------------------------------------------------------------


class Scaled(nn.Module):
    """A loss with a weight and a counter of its own."""

    calls: torch.Tensor

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output):
        self.calls += 1
        return output * self.scale


@pytest.mark.parametrize("name", ["gpt", "resnet"])
@pytest.mark.parametrize("has_gradients", [True, False])
def test_planning_leaves_the_model_as_it_was(name, has_gradients):
    kind = KINDS[name]
    seed_all(3)
    model, batch = kind.make(), kind.batch(kind.size)
    if has_gradients:
        loss_of(model, batch).backward()
        next(model.parameters()).grad = None
    gradients = [each.grad for each in model.parameters()]
    buffers = dict(model.named_buffers())
    flags = [each.training for each in model.modules()]
    before = stood(model)
    holdfast.plan(model, batch, "75%", stages=kind.stages)
    assert differing(before, stood(model)) == []
    assert all(one is each.grad for one, each in zip(gradients, model.parameters(), strict=True))
    assert all(buffers[name] is each for name, each in model.named_buffers())
    assert flags == [each.training for each in model.modules()]
    assert forwards(model) == []


def test_parts_that_are_not_trained_stay_so():
    model = small()
    model.tokens.requires_grad_(requires_grad=False)
    model.blocks[0].eval()
    before = stood(model)
    made = holdfast.plan(model, tokens(), "80%")
    assert differing(before, stood(model)) == []
    assert not model.blocks[0].training
    assert [row.name for row in made.summary.rows] == ["blocks.1", "blocks.2"]


def test_buffers_that_a_forward_replaces_or_makes_are_given_back():
    class Books(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Codebook(64) for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

    seed_all(3)
    model, batch = Books(), torch.randn(2000, 64)
    buffers = [(layer, dict(layer._buffers)) for layer in model.layers]
    before = stood(model)
    holdfast.plan(model, batch, "75%")
    assert differing(before, stood(model)) == []
    for layer, was in buffers:
        assert layer._buffers.keys() == was.keys()
        assert all(layer._buffers[key] is was[key] for key in was)


def test_the_sample_and_the_loss_are_as_they_were():
    seed_all(3)
    criterion, batch = Scaled(), torch.randn(4, 64, 64, requires_grad=True)
    values = batch.detach().clone()
    holdfast.plan(Rows(), batch, "75%", loss=lambda output: 2 * criterion(output))
    assert criterion.scale.grad is None
    assert criterion.calls == 0
    assert batch.grad is None
    assert torch.equal(batch, values)


def test_a_copy_of_a_checkpointed_model_stays_one():
    model = small()
    checkpoint_layers(model)
    copied = copy.deepcopy(model)
    had = [each.__dict__["forward"] for each in copied.blocks]
    holdfast.plan(copied, tokens(), "75%")
    assert [each.__dict__["forward"] for each in copied.blocks] == had


class Rows(nn.Module):
    """Blocks over rows of numbers; ``write`` is called with the model and the rows, first."""

    def __init__(self, write=lambda model, x: None):
        super().__init__()
        self.blocks = nn.ModuleList(GptBlock(64, 4, 0.1) for _ in range(3))
        self.write = write

    def forward(self, x):
        self.write(self, x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Shifted(nn.Module):
    """Tokens that the model itself moves on, in place: after some steps there are none left."""

    def __init__(self):
        super().__init__()
        self.inner = small()

    def forward(self, batch, weights):
        batch += 60
        weights.mul_(2.0)
        return self.inner(batch) * weights.mean()


def test_a_sample_that_the_model_writes_into_is_as_it_was():
    model = Shifted()
    batch = {"batch": tokens() % 30, "weights": torch.ones(1, 3).expand(4, 3).contiguous()}
    before = {name: each.clone() for name, each in batch.items()}
    made = holdfast.plan(model, batch, "60%")
    assert all(torch.equal(before[name], each) for name, each in batch.items())
    fresh = {name: each.clone() for name, each in batch.items()}
    expected = step_left(copy.deepcopy(model), {name: each.clone() for name, each in fresh.items()})
    with made.applied(model):
        assert differing(expected, step_left(model, fresh)) == []


def test_a_sample_with_repeated_rows_is_given_back_through_what_they_repeat():
    def write(model, x):
        x[0] = 7.0  # of which the others are views

    seed_all(3)
    rows = torch.randn(4, 64, 64)
    before = rows.clone()

    class Both(Rows):
        def forward(self, x, same):
            return super().forward(x) + same.sum()

    holdfast.plan(Both(write), (rows, rows[:1].expand(9, 64, 64)), "75%")
    assert torch.equal(rows, before)


def test_an_optimizer_that_steps_in_backward_is_refused_before_it_does():
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = stood(model)
    handle = model.blocks[1].up.weight.register_post_accumulate_grad_hook(
        lambda _: optimizer.step()
    )
    with pytest.raises(PlanError, match=r"'blocks\.1\.up\.weight' has a hook.*Plan first"):
        holdfast.plan(model, tokens(), "60%")
    assert differing(before, stood(model)) == []
    handle.remove()
    holdfast.plan(model, tokens(), "60%")


def test_an_optimizer_may_step_in_backward_under_a_plan(plan, tight):
    def trained(made):
        model = small()
        for parameter in model.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)

            def step(parameter, optimizer=optimizer):
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)
        with made.applied(model) if made else contextlib.nullcontext():
            for seed in range(3):
                step_left(model, tokens(), seed=seed)
        return stood(model)

    expected = trained(None)
    assert differing(expected, trained(plan)) == []
    assert differing(expected, trained(tight)) == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.distributed.optim itself
def test_torchs_own_optimizer_in_backward_is_refused_too():
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = small()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    before = stood(model)
    with pytest.raises(PlanError, match=r"'tokens\.weight' has a hook"):
        holdfast.plan(model, tokens(), "60%")
    assert differing(before, stood(model)) == []


def _decay(model, x):
    with torch.no_grad():
        model.blocks[1].up.weight.mul_(0.9)


def test_a_forward_that_changes_a_parameter_is_stopped_at_the_first():
    seed_all(3)
    model, batch = Rows(_decay), torch.randn(4, 64, 64)
    weight = model.blocks[1].up.weight
    before, was = stood(model), weight.detach().clone()
    with pytest.raises(PlanError, match=r"Rows\.blocks\.1\.up\.weight was changed.*by its forward"):
        holdfast.plan(model, batch, "75%")
    assert torch.equal(weight, was * 0.9)
    assert differing(before, stood(model)) == ["value of blocks.1.up.weight"]


def test_a_backward_that_changes_a_parameter_is_stopped_at_the_second_step():
    seed_all(3)
    model, batch = Rows(), torch.randn(4, 64, 64)
    weight = model.blocks[1].up.weight
    was = weight.detach().clone()

    def decay(gradient):
        with torch.no_grad():
            weight.mul_(0.9)

    model.blocks[0].up.weight.register_hook(decay)
    with pytest.raises(PlanError, match="hook in its backward"):
        holdfast.plan(model, batch, "75%")
    assert torch.allclose(weight, was * 0.9)


def test_an_embedding_that_scales_its_rows_is_given_back():
    model = small()
    model.tokens.max_norm = 0.5
    before = stood(model)
    holdfast.plan(model, tokens(), "75%")
    assert differing(before, stood(model)) == []


class Counting(nn.Module):
    """A block with a buffer much larger than what it saves."""

    counts: torch.Tensor

    def __init__(self):
        super().__init__()
        self.inner = GptBlock(64, 4, 0.1)
        self.register_buffer("counts", torch.zeros(300, 1000))

    def forward(self, x):
        self.counts += 1
        return self.inner(x)


def test_what_planning_keeps_for_itself_is_in_no_peak():
    """Copies of gradients, buffers and the sample lie there while steps are measured."""
    seed_all(3)
    model, batch = Blocks(lambda _: Counting()), torch.randn(4, 64, 64)
    taken = peak_of(model, batch)  # which leaves gradients
    made = holdfast.plan(model, batch, 0.8)
    assert made.summary.save_all_peak_bytes == pytest.approx(taken, rel=0.01)
    with made.applied(model):
        assert peak_of(model, batch) == pytest.approx(made.peak_bytes, rel=0.01)
    model.zero_grad()
    assert holdfast.plan(model, batch, 0.8).summary.save_all_peak_bytes == pytest.approx(
        taken, rel=0.01
    )


# ---- stages that must not be replayed ----------------------------------------------------------


class Blocks(nn.Module):
    def __init__(self, make, count=4):
        super().__init__()
        self.start = nn.Linear(64, 64)
        self.blocks = nn.ModuleList(make(number) for number in range(count))

    def forward(self, x):
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class OverItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return self.linear(x.mul_(0.5).sin().sigmoid())


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda number: OwnStreams(64, number), "returns other values"),
        (lambda _: OverItsInput(), "changed in place"),
    ],
    ids=["draws from its own stream", "writes over its input"],
)
def test_a_stage_that_cannot_be_replayed_is_not(make, told):
    seed_all(3)
    model, batch = Blocks(make), torch.randn(1000, 64)
    said = []
    made = holdfast.plan(model, batch, "90%", progress=said.append)
    assert {row.choice for row in made.summary.rows} <= {"keep", "recipes"}
    assert sum("is not replayed" in each and told in each for each in said) == 4
    with pytest.raises(BudgetError):
        holdfast.plan(model, batch, "30%")
    one, other, copied = (copy.deepcopy(model) for _ in range(3))
    expected = step_left(one, batch)
    with made.applied(other):
        assert differing(expected, step_left(other, batch)) == []
    with made.applied(copied):
        copied = copy.deepcopy(copied)
    assert differing(expected, step_left(copied, batch)) == []


# ---- applying ----------------------------------------------------------------------------------


def test_apply_and_undo_any_number_of_times(tight):
    model = small()
    for _ in range(3):
        following = tight.apply(model)
        assert forwards(model) == ["blocks.0", "blocks.1", "blocks.2"]
        following.undo()
        following.undo()
        assert forwards(model) == []
    with pytest.raises(ZeroDivisionError), tight.applied(model):
        raise ZeroDivisionError
    assert forwards(model) == []


def test_a_plan_is_applied_where_the_with_begins(tight):
    model = small()
    entered = tight.applied(model)
    assert forwards(model) == []
    with entered:
        assert forwards(model) == ["blocks.0", "blocks.1", "blocks.2"]
    assert forwards(model) == []
    wrong = tight.applied(Towers())
    with pytest.raises(PlanError), wrong:
        pass


def test_one_plan_at_a_time(plan, tight):
    model = small()
    told = r"'blocks\.0' is checkpointed already, by a plan; .* leave plan\.applied\(\)"
    with plan.applied(model) as following:
        for again in (
            lambda: plan.apply(model),
            lambda: tight.apply(model),
            lambda: holdfast.plan(model, tokens(), "50%"),
            lambda: checkpoint_layers(model),
        ):
            with pytest.raises(ValueError, match=told) as refused:
                again()
            assert type(refused.value) is ValueError
        assert forwards(model) == ["blocks.0", "blocks.1", "blocks.2"]
        assert following.fallbacks == ()
    assert forwards(model) == []


def test_a_plan_may_be_at_work_on_two_models(tight):
    one, other = small(), small()
    batch = tokens()
    expected = step_left(small(), batch)
    with tight.applied(one), tight.applied(other):
        assert differing(expected, step_left(one, batch)) == []
        assert differing(expected, step_left(other, batch)) == []


def half_and_half():
    model = small()
    model.blocks[0].up.bfloat16()
    return model


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Vit(depth=2), "made for Gpt, is not for this Vit: that has no module 'blocks.2'"),
        (Towers, "has no module 'blocks.0'"),
        (lambda: Gpt(depth=2), "has no module 'blocks.2'"),
        (Pairs, "'blocks.0' is a PairBlock there and a GptBlock in the plan"),
        (lambda: Gpt(width=48), "'blocks.0' has [0-9,]+ parameters there and [0-9,]+ in the plan"),
        (lambda: nn.Linear(2, 2), "has no module 'blocks.0'"),
        (
            lambda: small().double(),
            "parameters of 'blocks.0' are float64 on cpu there and float32 on cpu in the plan",
        ),
        (lambda: small().to("meta"), "are float32 on meta there and float32 on cpu in the plan"),
        (half_and_half, "are bfloat16 on cpu and float32 on cpu there"),
    ],
)
def test_a_plan_for_another_model_is_refused(tight, make, told):
    model = make()
    with pytest.raises(PlanError, match=told):
        tight.apply(model)
    assert forwards(model) == []


def test_a_plan_is_applied_to_modules_only(tight):
    with pytest.raises(ValueError, match="model must be a Module, not 3"):
        tight.apply(3)


def test_a_checkpointed_model_takes_no_plan(tight):
    model = small()
    layers = checkpoint_layers(model)
    with pytest.raises(ValueError, match="checkpointed already, by checkpoint_layers, as <"):
        tight.apply(model)
    layers.undo()
    tight.apply(model).undo()


def test_a_copy_of_a_model_under_a_plan_gives_the_same_gradients(tight, plan):
    batch = tokens()
    expected = step_left(small(), batch)
    for each in (tight, plan):
        model = small()
        with each.applied(model):
            copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        assert forwards(model) == []
        for copied in copies:
            assert differing(expected, step_left(copied, batch)) == []
            with each.applied(copied) as following:
                copied.zero_grad()
                assert differing(expected, step_left(copied, batch)) == []
            assert following.fallbacks == ()


def test_a_plan_leaves_the_state_dict_and_the_names_alone(tight):
    model = small()
    names = [name for name, _ in model.named_modules()]
    state = copy.deepcopy(model.state_dict())
    with tight.applied(model):
        assert [name for name, _ in model.named_modules()] == names
        assert list(model.state_dict()) == list(state)
        assert model.load_state_dict(state).missing_keys == []
        assert all(map(torch.equal, model.state_dict().values(), state.values()))


def test_in_eval_mode_or_without_gradients_stages_run_as_they_are(tight):
    model, batch = small(), tokens()
    ran = []
    for block in model.blocks:
        block.register_forward_hook(lambda block, *_: ran.append(block))
    with tight.applied(model) as following:
        with torch.no_grad():
            seed_all(5)
            without_gradients = model(batch)
        model.eval()
        evaluated = model(batch)
        evaluated.backward()
        found = [each.grad.clone() for each in model.parameters()]
    assert ran == [*model.blocks] * 2
    assert following.fallbacks == ()
    model.zero_grad()
    assert torch.equal(model(batch), evaluated)
    model(batch).backward()
    assert all(map(torch.equal, found, (each.grad for each in model.parameters())))
    with torch.no_grad():
        seed_all(5)
        assert torch.equal(model.train()(batch), without_gradients)


def test_hooks_of_the_stages_run_once(tight):
    model, batch = small(), tokens()
    ran = []
    for number, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, number=number: ran.append(("before", number)))
        block.register_forward_hook(lambda *_, number=number: ran.append(("after", number)))
    with tight.applied(model):
        model(batch).backward()
    assert ran == [(when, number) for number in range(3) for when in ("before", "after")]


def test_the_applied_plan_does_not_keep_the_model_alive(tight):
    import weakref

    model = small()
    alive = weakref.ref(model.blocks[0])
    following = tight.apply(model)
    model(tokens()).backward()
    del model
    assert alive() is None
    following.undo()


def test_backward_may_come_after_undo(tight):
    batch = tokens()
    expected = step_left(small(), batch)
    model = small()
    seed_all(11)
    with tight.applied(model):
        loss = model(batch)
    loss.backward()
    assert all(
        torch.equal(expected[f"gradient of {name}"], each.grad)
        for name, each in model.named_parameters()
    )


def test_a_gradient_of_a_gradient_under_a_plan(plan, tight):
    def told(made):
        seed_all(3)
        model, batch = Gpt(depth=3, dropout=0.0), tokens()
        following = made.applied(model) if made else contextlib.nullcontext()
        with following, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            loss = model(batch)
            first = torch.autograd.grad(loss, model.head.weight, create_graph=True)[0]
            return torch.autograd.grad(first.square().sum(), model.blocks[0].up.weight)[0]

    expected = told(None)
    assert torch.equal(expected, told(plan))
    assert torch.equal(expected, told(tight))


# ---- torch.compile -----------------------------------------------------------------------------


@pytest.fixture
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _all_compiled(model):
    return torch.compile(model, backend="aot_eager")


def _compiled_in_place(model):
    model.compile(backend="aot_eager")
    return model


def _one_by_one(model):
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend="aot_eager")
    return model


def _one_by_one_in_place(model):
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(
    "compiled", [_all_compiled, _compiled_in_place, _one_by_one, _one_by_one_in_place]
)
def test_compiled_stages_are_not_planned(compiled):
    model = compiled(small())
    with pytest.raises(ValueError, match=r"blocks\.0' is compiled: plan .* before torch\.compile"):
        holdfast.plan(model, tokens(), "50%")


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # by Dynamo
def test_a_model_may_be_compiled_with_a_plan_applied(tight):
    seed_all(3)
    model, batch = Gpt(depth=3, dropout=0.0), tokens()
    expected = step_left(copy.deepcopy(model), batch)
    with tight.applied(model):
        found = step_left(torch.compile(model, backend="aot_eager"), batch)
    assert differing(expected, {key.replace("_orig_mod.", ""): found[key] for key in found}) == []


# ---- JSON --------------------------------------------------------------------------------------


def test_a_plan_comes_back_from_json_as_it_was(plan, tight):
    for each in (plan, tight):
        again = ActivationPlan.from_json(each.to_json())
        assert again == each
        assert again.to_json() == each.to_json()
        assert ActivationPlan.from_json(each.to_json().encode()) == each
        # Other tools write the same values another way.
        assert ActivationPlan.from_json(json.dumps(json.loads(each.to_json()), indent=2)) == each


def test_a_plan_from_json_works_in_another_process(plan, tmp_path):
    (tmp_path / "plan.json").write_text(plan.to_json())
    model, batch = small(), tokens()
    expected = step_left(model, batch)
    torch.save(expected["gradient of blocks.0.up.weight"], tmp_path / "gradient.pt")
    code = """
        import sys
        sys.path.insert(0, sys.argv[1])
        import torch
        torch.set_num_threads(1)
        from holdfast import ActivationPlan
        from plan_models import Gpt, KINDS, seed_all, step_left
        plan = ActivationPlan.from_json(open(sys.argv[2] + "/plan.json").read())
        seed_all(3)
        model = Gpt(depth=3)
        torch.manual_seed(4)
        batch = KINDS["gpt"].batch(4)
        with plan.applied(model) as following:
            found = step_left(model, batch)
        assert following.fallbacks == (), following.fallbacks
        expected = torch.load(sys.argv[2] + "/gradient.pt")
        assert torch.equal(expected, found["gradient of blocks.0.up.weight"])
    """
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", textwrap.dedent(code), here, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "garbage",
    [
        "",
        "null",
        "3",
        "[]",
        "{}",
        "{",
        '"plan"',
        '{"version":1}',
        '{"version":1,"digest":"","decision":{},"summary":{}}',
        "[" * 100_000,
        '{"version":' * 5_000,
        '{"version":1e400,"digest":""}',
        b"\xff\xfe\x00",
        "\ud800",
        b"",
        None,
        3,
    ],
    ids=lambda each: repr(each)[:20],
)
def test_garbage_is_no_plan(garbage):
    with pytest.raises(PlanError, match="not a plan that to_json"):
        ActivationPlan.from_json(garbage)


def test_a_plan_of_another_version_says_so(plan):
    told = json.loads(plan.to_json())
    for version in (0, 2, -1):
        with pytest.raises(PlanError, match=f"version {version}, and this holdfast reads 1"):
            ActivationPlan.from_json(json.dumps({**told, "version": version}))
    with pytest.raises(PlanError, match="version 7"):
        ActivationPlan.from_json('{"version":7,"digest":"","other":"fields"}')


def paths_in(tree, path=()):
    items = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for key, value in items:
        yield (*path, key)
        yield from paths_in(value, (*path, key))


def test_a_plan_that_was_edited_is_refused(plan):
    text = plan.to_json()
    told = json.loads(text)
    paths = list(paths_in(told))
    chance = random.Random(7)
    for path in chance.sample(paths, 150):
        edited = json.loads(text)
        place = edited
        for key in path[:-1]:
            place = place[key]
        was = place[path[-1]]
        place[path[-1]] = chance.choice(
            [each for each in (-1, 0, 7, 10**15, 0.5, "x", None, [], {}) if each != was]
        )
        if was == [] and place[path[-1]] in ((), []):
            continue
        with pytest.raises(PlanError):
            ActivationPlan.from_json(json.dumps(edited))


def test_a_plan_that_was_cut_or_spoiled_is_refused(plan):
    data = plan.to_json().encode()
    chance = random.Random(7)
    for _ in range(100):
        at = chance.randrange(len(data))
        for spoiled in (
            data[:at],
            data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :],
        ):
            with contextlib.suppress(PlanError):
                assert ActivationPlan.from_json(spoiled) == plan


def resealed(plan, **parts):
    """A plan that holds together as far as its digest goes, and no further."""
    return replace(plan, decision=replace(plan.decision, **parts)).to_json()


def test_parts_that_do_not_belong_together_are_refused(plan):
    decision = plan.decision
    for parts in (
        {"stages": decision.stages[:2]},
        {"stages": (*decision.stages[1:], decision.stages[0])},
        {"stages": tuple(replace(each, recipes=None) for each in decision.stages)},
        {"schedule": Schedule(choices=(99, 0, 0))},
        {"schedule": Schedule(choices=(-1, 0, 0))},
        {"schedule": Schedule(choices=(None, 0, 0))},
        {"schedule": Schedule(choices=(0, 0))},
    ):
        with pytest.raises(PlanError, match="does not hold together"):
            ActivationPlan.from_json(resealed(plan, **parts))


def test_a_plan_goes_through_pickle(plan):
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan
    assert hash(again.decision.schedule) == hash(plan.decision.schedule)
    assert copy.deepcopy(plan) == plan
    assert msgspec.json.encode(again) == msgspec.json.encode(plan)


# ---- what is told ------------------------------------------------------------------------------


def test_planning_tells_what_it_does(caplog):
    said = []
    with caplog.at_level(logging.INFO, logger="holdfast.activation"):
        holdfast.plan(small(), tokens(), "60%", progress=said.append)
    assert said[0] == "trying the sample"
    assert any("plan 1" in each for each in said)
    assert [f"plan: {each}" for each in said] == [each.getMessage() for each in caplog.records]


def test_a_plan_that_fits_anyway_keeps_everything():
    model, batch = small(), tokens()
    made = holdfast.plan(model, batch, 1.0)
    assert {row.choice for row in made.summary.rows} == {"keep"}
    assert any("fits the budget" in note for note in made.summary.notes)
    assert made.peak_bytes <= made.budget_bytes
    expected = step_left(small(), batch)
    with made.applied(model):
        assert differing(expected, step_left(model, batch)) == []
        assert peak_of(model, batch) <= made.budget_bytes


def test_a_report_names_every_stage(tight, tmp_path):
    assert "blocks.0" in tight.report(width=100)
    tight.save_html(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert all(row.name in page for row in tight.summary.rows)


# ---- models that surprise ----------------------------------------------------------------------


class Clamped(nn.Module):
    """Its sum is written over where autograd does not look, in some blocks to other values."""

    def __init__(self, most):
        super().__init__()
        self.one, self.two, self.down = nn.Linear(32, 128), nn.Linear(32, 128), nn.Linear(128, 32)
        self.most = most

    def forward(self, x):
        h = torch.sin(self.one(x)) + torch.cos(self.two(x))
        with torch.no_grad():
            h.clamp_(max=self.most)
        return x + self.down(nn.functional.gelu(h))


def test_a_recipe_is_tried_on_every_stage_also_of_those_that_are_alike():
    seed_all(3)
    blocks = (Clamped(1e9 if number < 2 else 0.1) for number in range(6))
    model = nn.Sequential(nn.Linear(8, 32), *blocks)
    sample = torch.randn(600, 8)

    def gradients():
        model.zero_grad()
        model(sample).sum().backward()
        return [each.grad.clone() for each in model.parameters()]

    expected = gradients()
    for budget in ("60%", "40%", "32%"):
        with holdfast.plan(model, sample, budget, loss=torch.sum).applied(model):
            assert all(map(torch.equal, gradients(), expected))


class Inward(nn.Module):
    """Takes a gradient in its forward, which cannot be done again without its graph."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(inner.sin().sum(), inner)
        return x + torch.tanh(self.linear(x)) * slope


def test_a_stage_that_takes_gradients_itself_is_planned_as_far_as_it_can_be():
    seed_all(3)
    model = nn.Sequential(nn.Linear(8, 32), *(Inward() for _ in range(4)))
    sample = torch.randn(64, 8)
    plan = holdfast.plan(model, sample, "90%", loss=torch.sum)
    model(sample).sum().backward()
    expected = [each.grad.clone() for each in model.parameters()]
    model.zero_grad()
    with plan.applied(model):
        model(sample).sum().backward()
    assert all(map(torch.equal, [each.grad for each in model.parameters()], expected))


class LayerDrop(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(6))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        for number, block in enumerate(self.blocks):
            if self.calls % 7 != number:
                x = x + block(x)
        return x.sum()


def test_layers_that_are_left_out_at_times_are_told():
    seed_all(3)
    model = LayerDrop()
    with pytest.raises(PlanError, match=r"did not run in every step.*LayerDrop"):
        holdfast.plan(model, torch.randn(8, 16), "60%")
    assert forwards(model) == []
