"""Stages whose inputs are not kept but made again by the stages before: every way a schedule may
say it, bit for bit. The schedules are made by hand, so that each kind of step is met."""

import gc
import itertools
import threading
import weakref

import pytest
import torch
from activation_models import (
    GptBlock,
    PythonRandom,
    ResidualBlock,
    differing,
    left_by,
    loss_of,
    seed_all,
)
from torch import nn
from torch.nn import functional

from holdfast.activation._planning.applying import AppliedPlan
from holdfast.activation._planning.deciding import Decision, PlannedStage
from holdfast.activation._solving.chain import Chain, Option, Stage
from holdfast.activation._solving.schedule import Schedule, Segment, Step
from holdfast.activation._solving.solving import solve
from holdfast.errors import RecomputationError

KIB = 1024


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Net(nn.Module):
    """Blocks one after the other, ``between`` them whatever a test wants."""

    def __init__(self, blocks, between=lambda x: x, **keywords):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.between, self.keywords = between, keywords

    def forward(self, x):
        for block in self.blocks:
            x = self.between(block(x, **self.keywords))
        return x


class Simple(nn.Module):
    """Saves an input and what it makes of it."""

    def __init__(self, width=8):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return torch.tanh(self.linear(x)) * x.sigmoid()


class Masked(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x, *, mask):
        return x + functional.dropout(self.linear(x).sin() * mask, 0.2, self.training)


class Twofold(nn.Module):
    """Returns more than it is given: what goes on, and a tensor for nobody."""

    def __init__(self, width=8):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, given):
        x = given["next"] if isinstance(given, dict) else given
        made = self.linear(x).sin()
        return {"aside": made.exp(), "next": made * x}


class Skipping(nn.Module):
    """Now and then returns the tensor it is given, as stochastic depth does."""

    def __init__(self, width=8):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.skips = False

    def forward(self, x):
        return x if self.skips else self.linear(x).tanh()


class OverItsInput(nn.Module):
    """Writes over what it is given, which is what the stage before returned."""

    def __init__(self, *, writes, width=8):
        super().__init__()
        self.writes, self.linear = writes, nn.Linear(width, width)

    def forward(self, x):
        return self.linear((x.mul_(0.5) if self.writes else x).sin())


def steps(text):
    """As in ``"run 0, keep 1, replay 1, backward 1"``."""
    kinds = {"run": "run", "keep": "keep_input", "replay": "replay", "backward": "backward"}
    words = [each.split() for each in text.split(",")]
    return tuple(Step(kind=kinds[kind], stage=int(stage)) for kind, stage in words)


def stage(name, *, kept=8 * KIB, linked=True, replayable=True):
    keep = Option(label="keep", kept_bytes=kept, extra_s=0.0, backward_bytes=2 * kept)
    return Stage(
        name=name,
        options=(keep,),
        input_bytes=KIB,
        output_bytes=KIB,
        forward_s=1.0,
        forward_bytes=kept,
        replayed_bytes=2 * kept,
        replayable=replayable,
        linked=linked,
    )


def planned(model, name):
    module = model.get_submodule(name)
    count = sum(each.numel() for each in module.parameters())
    return PlannedStage(name=name, kind=type(module).__name__, parameters=count, recipes=None)


def following(model, schedule):
    """The plan of a schedule, at work on the model's blocks."""
    names = [f"blocks.{number}" for number in range(len(model.blocks))]
    decision = Decision(
        stages=tuple(planned(model, name) for name in names),
        chain=Chain(
            stages=tuple(stage(name, linked=name != names[0]) for name in names),
            base_bytes=0,
            head_bytes=0,
        ),
        schedule=schedule,
        solved_bytes=2**20,
        parameters=sum(each.numel() for each in model.parameters()),
    )
    decision.check()
    applied = AppliedPlan(decision)
    applied._install({name: model.get_submodule(name) for name in names})
    return applied


ALL_FOUR = {
    "from the first input each time": """
        run 0, run 1, run 2, keep 3, replay 3, backward 3,
        run 0, run 1, keep 2, replay 2, backward 2,
        run 0, keep 1, replay 1, backward 1, replay 0, backward 0""",
    "by halves": """
        run 0, run 1, keep 2, run 2, keep 3, replay 3, backward 3, replay 2, backward 2,
        run 0, keep 1, replay 1, backward 1, replay 0, backward 0""",
    "all held": """
        run 0, keep 1, run 1, keep 2, run 2, keep 3, replay 3, backward 3,
        replay 2, backward 2, replay 1, backward 1, replay 0, backward 0""",
    "all replayed at once": """
        replay 0, keep 1, replay 1, keep 2, replay 2, keep 3, replay 3,
        backward 3, backward 2, backward 1, backward 0""",
    "the first replayed, the rest run": """
        replay 0, keep 1, run 1, run 2, keep 3, replay 3, backward 3,
        run 1, keep 2, replay 2, backward 2, replay 1, backward 1, backward 0""",
    "the middle replayed on the way": """
        run 0, keep 1, replay 1, keep 2, replay 2, keep 3, replay 3,
        backward 3, backward 2, backward 1, replay 0, backward 0""",
    "held in the middle and replayed": """
        run 0, run 1, keep 2, replay 2, keep 3, replay 3, backward 3, backward 2,
        run 0, keep 1, replay 1, backward 1, replay 0, backward 0""",
}
SCHEDULES = {
    **{
        name: Schedule(choices=(None,) * 4, segments=(Segment(first=0, last=3, steps=steps(text)),))
        for name, text in ALL_FOUR.items()
    },
    "two segments": Schedule(
        choices=(None,) * 4,
        segments=(
            Segment(
                first=0,
                last=1,
                steps=steps("run 0, keep 1, replay 1, backward 1, replay 0, backward 0"),
            ),
            Segment(
                first=2, last=3, steps=steps("replay 2, keep 3, replay 3, backward 3, backward 2")
            ),
        ),
    ),
    "kept at both ends": Schedule(
        choices=(0, None, None, 0),
        segments=(
            Segment(
                first=1,
                last=2,
                steps=steps("run 1, keep 2, replay 2, backward 2, replay 1, backward 1"),
            ),
        ),
    ),
    "one and three": Schedule(
        choices=(None,) * 4,
        segments=(
            Segment(first=0, last=0, steps=steps("replay 0, backward 0")),
            Segment(
                first=1,
                last=3,
                steps=steps(
                    "run 1, run 2, keep 3, replay 3, backward 3,"
                    "replay 1, keep 2, replay 2, backward 2, backward 1"
                ),
            ),
        ),
    ),
}
HALVES = SCHEDULES["by halves"]
every_schedule = pytest.mark.parametrize("schedule", list(SCHEDULES.values()), ids=list(SCHEDULES))


def rows():
    return torch.randn(6, 8, requires_grad=True)


def pictures():
    return torch.randn(3, 8, 6, 6, requires_grad=True)


MODELS = {
    "plain": (lambda: Net(Simple() for _ in range(4)), rows),
    "dropout": (
        lambda: Net(GptBlock(8, 2, 0.2) for _ in range(4)),
        lambda: torch.randn(2, 5, 8, requires_grad=True),
    ),
    "batch norm": (lambda: Net(ResidualBlock(8) for _ in range(4)), pictures),
    "python's stream": (lambda: Net(PythonRandom(8) for _ in range(4)), rows),
    "a mask for all": (
        lambda: Net((Masked() for _ in range(4)), mask=(torch.arange(8) % 3 > 0).float()),
        rows,
    ),
    "more than one result": (
        lambda: nn.Sequential(Net(Twofold() for _ in range(4)), _Sum()),
        rows,
    ),
    "one who skips": (
        lambda: Net(_skipper(number) for number in range(4)),
        rows,
    ),
}
every_model = pytest.mark.parametrize("name", MODELS)


class _Sum(nn.Module):
    def forward(self, given):
        return given["next"]


def _skipper(number):
    block = Skipping()
    block.skips = number == 2
    return block


def blocks_of(model):
    return model if isinstance(model, Net) else model[0]


def step_of(name, schedule, *, backwards=1):
    seed_all(5)
    make, sample = MODELS[name]
    model, x = make(), sample()
    applied = None if schedule is None else following(blocks_of(model), schedule)
    output = model(x)
    for left in reversed(range(backwards)):
        loss_of(output).backward(retain_graph=left > 0)
    if applied is not None:
        assert applied.fallbacks == ()
    return left_by(model, [("input", x), ("output", output)])


@every_model
@every_schedule
def test_a_step_is_bit_equal(name, schedule):
    assert differing(step_of(name, None), step_of(name, schedule)) == []


@every_model
@pytest.mark.parametrize("schedule", [HALVES, SCHEDULES["the first replayed, the rest run"]])
def test_backward_twice_over_a_kept_graph_is_bit_equal(name, schedule):
    expected = step_of(name, None, backwards=2)
    assert differing(expected, step_of(name, schedule, backwards=2)) == []


@every_schedule
def test_the_gradient_of_a_gradient_is_bit_equal(schedule):
    def told(schedule):
        seed_all(5)
        model, x = MODELS["dropout"][0](), torch.randn(2, 5, 8, requires_grad=True)
        if schedule is not None:
            following(model, schedule)
        (gradient,) = torch.autograd.grad(loss_of(model(x)), x, create_graph=True)
        gradient.square().sum().backward()
        return left_by(model, [("input", x), ("gradient", gradient)])

    assert differing(told(None), told(schedule)) == []


@every_schedule
def test_micro_batches_in_any_order_are_bit_equal(schedule):
    def told(schedule, order):
        seed_all(5)
        model = MODELS["dropout"][0]()
        if schedule is not None:
            following(model, schedule)
        batches = [torch.randn(2, 5, 8, requires_grad=True) for _ in range(3)]
        losses = [loss_of(model(batch)) for batch in batches]
        for number in order:
            losses[number].backward()
        return left_by(model, [(f"batch {n}", batch) for n, batch in enumerate(batches)])

    for order in ([0, 1, 2], [2, 0, 1]):
        assert differing(told(None, order), told(schedule, order)) == []


@every_schedule
@pytest.mark.parametrize("writers", [[2], [3], [1, 2, 3], [0, 1, 2, 3]])
@pytest.mark.parametrize("backwards", [1, 2])
def test_a_stage_that_writes_over_its_input_is_replayed_right_or_refused(
    schedule, writers, backwards
):
    """Only what a segment keeps is spoiled by that: what it makes again, it can make once more."""

    def told(schedule):
        seed_all(5)
        model = Net(OverItsInput(writes=number in writers) for number in range(4))
        x = rows()
        if schedule is not None:
            following(model, schedule)
        output = model(x * 1)
        for left in reversed(range(backwards)):
            loss_of(output).backward(retain_graph=left > 0)
        return left_by(model, [("input", x)])

    firsts = {segment.first for segment in schedule.segments}
    if firsts.isdisjoint(writers):
        assert differing(told(None), told(schedule)) == []
    else:
        with pytest.raises(RecomputationError, match="changed in place"):
            told(schedule)


class Noted(nn.Module):
    """Notes when it runs."""

    def __init__(self, number, notes):
        super().__init__()
        self.linear, self.number, self.notes = nn.Linear(8, 8), number, notes

    def forward(self, x):
        self.notes.append(self.number)
        return self.linear(x).tanh()


@pytest.mark.parametrize(
    ("name", "again"),
    [
        ("from the first input each time", [0, 1, 2, 3, 0, 1, 2, 0, 1, 0]),
        ("by halves", [0, 1, 2, 3, 2, 0, 1, 0]),
        ("all held", [0, 1, 2, 3, 2, 1, 0]),
        ("all replayed at once", [0, 1, 2, 3]),
        ("the first replayed, the rest run", [0, 1, 2, 3, 1, 2, 1]),
        ("the middle replayed on the way", [0, 1, 2, 3, 0]),
        ("held in the middle and replayed", [0, 1, 2, 3, 0, 1, 0]),
        ("two segments", [2, 3, 0, 1, 0]),
        ("kept at both ends", [1, 2, 1]),
        ("one and three", [1, 2, 3, 1, 2, 0]),
    ],
)
def test_a_stage_runs_again_as_often_as_the_schedule_says(name, again):
    notes = []
    model = Net(Noted(number, notes) for number in range(4))
    following(model, SCHEDULES[name])
    output = model(rows())
    assert notes == [0, 1, 2, 3]
    notes.clear()
    output.sum().backward()
    assert notes == again


def saved_through(model, x):
    """The inputs of the blocks, as far as they are alive after the forward."""
    alive = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: alive.append(weakref.ref(args[0])))
    output = model(x)
    gc.collect()
    return output, [reference() is not None for reference in alive]


def test_only_the_first_input_of_a_segment_is_kept():
    model = Net(Simple() for _ in range(4))
    following(model, HALVES)
    output, alive = saved_through(model, rows())
    assert alive == [True, False, False, False]
    output.sum().backward()


def test_without_a_plan_all_inputs_are_kept():
    output, alive = saved_through(Net(Simple() for _ in range(4)), rows())
    assert alive == [True] * 4
    output.sum().backward()


@pytest.mark.parametrize(
    "between", [lambda x: x * 2, lambda x: x.mul_(2)], ids=["new tensor", "in place"]
)
def test_what_happens_between_stages_keeps_their_inputs(between, caplog):
    def told(schedule):
        seed_all(5)
        model, x = Net((Simple() for _ in range(4)), between), rows()
        applied = None if schedule is None else following(model, schedule)
        loss_of(model(x)).backward()
        return applied, left_by(model, [("input", x)])

    applied, got = told(HALVES)
    assert differing(told(None)[1], got) == []
    assert [each.stage for each in applied.fallbacks] == ["blocks.1", "blocks.2", "blocks.3"]
    assert all("not what the stage before returned" in each.reason for each in applied.fallbacks)
    assert len(caplog.records) == 3


def test_a_view_of_what_the_stage_before_returned_is_not_taken_for_it():
    def told(schedule):
        seed_all(5)
        model, x = Net((Simple() for _ in range(4)), lambda x: x.view_as(x)), rows()
        if schedule is not None:
            following(model, schedule)
        loss_of(model(x)).backward()
        return left_by(model, [("input", x)])

    assert differing(told(None), told(HALVES)) == []


def test_other_hooks_on_saved_tensors_are_left_alone():
    def told(schedule):
        seed_all(5)
        model, x = Net(Simple() for _ in range(4)), rows()
        applied = None if schedule is None else following(model, schedule)
        with torch.autograd.graph.save_on_cpu():
            output = model(x)
        loss_of(output).backward()
        return applied, left_by(model, [("input", x)])

    applied, got = told(HALVES)
    assert differing(told(None)[1], got) == []
    assert len(applied.fallbacks) == 4
    assert all("other hooks" in each.reason for each in applied.fallbacks)


def test_an_abandoned_forward_is_freed_at_once():
    model = Net(Simple() for _ in range(4))
    following(model, HALVES)
    x = rows()
    gc.collect()
    gc.disable()
    try:
        made = x * 1
        alive = weakref.ref(made)
        output = model(made)
        del made
        assert alive() is not None
        del output
        assert alive() is None
    finally:
        gc.enable()


def test_a_graph_is_freed_after_its_backward():
    model = Net(Simple() for _ in range(4))
    following(model, SCHEDULES["the first replayed, the rest run"])
    x = rows()
    gc.collect()
    gc.disable()
    try:
        made = x * 1
        alive = weakref.ref(made)
        model(made).sum().backward()
        del made
        assert alive() is None
    finally:
        gc.enable()


class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.fails = nn.Linear(8, 8), False

    def forward(self, x):
        if self.fails:
            raise ZeroDivisionError
        return self.linear(x).tanh()


def test_a_forward_that_fails_in_a_segment_leaves_nothing_behind():
    """Also no input of the segment: the error may have been a lack of memory."""
    model = Net(Failing() for _ in range(4))
    following(model, HALVES)
    model.blocks[2].fails = True
    x = rows()

    def run():
        made = x * 1
        with pytest.raises(ZeroDivisionError):
            model(made)
        return weakref.ref(made)

    alive = run()
    gc.collect()
    assert alive() is None
    model.blocks[2].fails = False
    model(x).sum().backward()
    assert x.grad is not None


def test_an_error_in_backward_comes_through_and_the_graph_can_be_used_again():
    model = Net(Failing() for _ in range(4))
    following(model, HALVES)
    seed_all(5)
    x = rows()
    output = model(x)
    model.blocks[1].fails = True
    with pytest.raises(ZeroDivisionError):
        output.sum().backward(retain_graph=True)
    model.blocks[1].fails = False
    model.zero_grad()
    x.grad = None
    output.sum().backward()
    got = left_by(model, [("input", x)])
    for parameter in (*model.parameters(), x):
        parameter.grad = None
    for block in model.blocks:
        del block.__dict__["forward"]
    model(x).sum().backward()
    assert differing(left_by(model, [("input", x)]), got) == []


def test_a_weight_changed_before_backward_is_noticed():
    model = Net(Simple() for _ in range(4))
    following(model, HALVES)
    output = model(rows())
    with torch.no_grad():
        model.blocks[1].linear.weight.add_(1.0)
    with pytest.raises(RecomputationError, match=r"blocks\.1"):
        output.sum().backward()


def test_the_plan_may_be_undone_between_forward_and_backward():
    expected = step_of("dropout", None)
    seed_all(5)
    make, sample = MODELS["dropout"]
    model, x = make(), sample()
    applied = following(model, HALVES)
    output = model(x)
    applied.undo()
    loss_of(output).backward()
    assert differing(expected, left_by(model, [("input", x), ("output", output)])) == []


def test_threads_follow_the_plan_each_for_itself():
    """All forwards are begun before any goes on, and all backwards likewise."""
    count = 4
    meeting = threading.Barrier(count)

    class Meeting(nn.Module):
        def __init__(self, number):
            super().__init__()
            self.linear, self.number = nn.Linear(8, 8), number

        def forward(self, x):
            if self.number == 1 and torch._C._current_graph_task_id() == -1:
                meeting.wait(60)
            return self.linear(x).tanh() * x

    seed_all(5)
    model = Net(Meeting(number) for number in range(4))
    inputs = [torch.randn(6, 8) for _ in range(count)]

    def gradients(x):
        return torch.autograd.grad(loss_of(model(x)), model.parameters())

    def together():
        found = [None] * count

        def run(number):
            x = inputs[number]
            loss = loss_of(model(x))
            meeting.wait(60)
            found[number] = torch.autograd.grad(loss, model.parameters())

        threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        return found

    expected = together()
    applied = following(model, HALVES)
    for one, other in zip(expected, together(), strict=True):
        assert other is not None
        assert all(map(torch.equal, one, other))
    assert applied.fallbacks == ()


def chains():
    """Chains of which some small budget makes segments."""
    for count, kept in itertools.product([3, 5, 7], [4 * KIB, 32 * KIB]):
        names = [f"blocks.{number}" for number in range(count)]
        yield Chain(
            stages=tuple(stage(name, kept=kept, linked=name != names[0]) for name in names),
            base_bytes=0,
            head_bytes=0,
        )


@pytest.mark.parametrize("chain", list(chains()), ids=lambda chain: f"{len(chain.stages)} stages")
def test_what_the_solver_makes_for_any_budget_is_bit_equal(chain):
    count = len(chain.stages)

    def told(schedule):
        seed_all(5)
        model = Net(GptBlock(8, 2, 0.2) for _ in range(count))
        x = torch.randn(2, 5, 8, requires_grad=True)
        if schedule is not None:
            following(model, schedule)
        loss_of(model(x)).backward()
        return left_by(model, [("input", x)])

    expected = told(None)
    low = solve(chain, 1).smallest_bytes
    high = sum(each.keep.kept_bytes for each in chain.stages) * 2
    met = set()
    for part in range(5):
        schedule = solve(chain, low + (high - low) * part // 5).schedule
        if schedule not in met:
            met.add(schedule)
            assert differing(expected, told(schedule)) == []
    assert any(segment.last > segment.first for each in met for segment in each.segments)
