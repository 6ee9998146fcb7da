"""What changes between forward and backward is named, unless the region does not use it."""

import copy
import functools
import itertools
import os

import pytest
import torch
from activation_models import loss_of, seed_all
from activation_tools import right_or_refused
from torch import nn

from holdfast.activation import checkpoint
from holdfast.errors import RecomputationError

CHANGED = "changed|place|memory|values|step"


class Pair(nn.Module):
    """Two networks in one module, and methods that use one of them."""

    def __init__(self):
        super().__init__()
        self.used = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.other = nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 0.5))
        self.register_buffer("unread", torch.ones(4))

    def forward(self, x):
        return torch.tanh(self.used(x) * self.scale).sin()

    def both(self, x):
        return self.other(self(x)).sin()


@pytest.fixture
def pair():
    seed_all(3)
    return Pair()


@pytest.fixture
def x():
    return torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()


def gradients(module, x, output):
    inputs = [x, *module.parameters()]
    return torch.autograd.grad(loss_of(output), inputs, allow_unused=True)


def same(one, other):
    return [*map(str, one)] == [*map(str, other)] and all(
        torch.equal(a, b) for a, b in zip(one, other, strict=True) if a is not None
    )


def in_place(pair):
    with torch.no_grad():
        pair.used[0].weight.add_(1)


def through_a_view(pair):
    with torch.no_grad():
        pair.used[0].weight.view(-1)[3].zero_()


def other_data(pair):
    pair.used[0].weight.data = torch.ones(4, 4)


def replaced(pair):
    pair.used[0].weight = nn.Parameter(torch.ones(4, 4))


def replaced_module(pair):
    pair.used[0] = nn.Linear(4, 4)


def loaded(pair):
    pair.load_state_dict({k: v + 1 for k, v in copy.deepcopy(pair.state_dict()).items()})


def stepped(optimizer):
    def change(pair):
        parameters = [pair.used[0].weight]
        parameters[0].grad = torch.ones(4, 4)
        optimizer(parameters).step()
        parameters[0].grad = None

    return change


sgd, adamw = torch.optim.SGD, torch.optim.AdamW

CHANGES = {
    "in place": in_place,
    "through a view": through_a_view,
    ".data = other": other_data,
    "load_state_dict": loaded,
    "SGD": stepped(functools.partial(sgd, lr=0.1, foreach=False)),
    "foreach SGD": stepped(functools.partial(sgd, lr=0.1, foreach=True)),
    "fused SGD": stepped(functools.partial(sgd, lr=0.1, fused=True)),
    "foreach AdamW": stepped(functools.partial(adamw, lr=0.1, foreach=True)),
    "fused AdamW": stepped(functools.partial(adamw, lr=0.1, fused=True)),
    "fused Adagrad": stepped(functools.partial(torch.optim.Adagrad, lr=0.1, fused=True)),
    "RMSprop": stepped(functools.partial(torch.optim.RMSprop, lr=0.1)),
}

REGIONS = {
    "module": lambda pair: pair,
    "method": lambda pair: pair.both,
    "lambda": lambda pair: lambda x: pair(x),  # noqa: PLW0108
    "partial": lambda pair: functools.partial(pair.both),
    "inner module": lambda pair: pair.used,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("region", REGIONS)
def test_a_changed_parameter_is_named(pair, x, region, change):
    loss = loss_of(checkpoint(REGIONS[region](pair), x, name="the region"))
    CHANGES[change](pair)
    with pytest.raises(RecomputationError, match=CHANGED) as caught:
        loss.backward()
    assert caught.value.layer_id == "the region"
    assert "0.weight" in str(caught.value)


@pytest.mark.parametrize("change", CHANGES)
def test_a_parameter_changed_under_a_nested_region_is_named(pair, x, change):
    inner = functools.partial(checkpoint, pair.used, name="inner")
    loss = loss_of(checkpoint(lambda x: inner(x.exp()).sin(), x, name="outer", modules=[pair]))
    CHANGES[change](pair)
    with pytest.raises(RecomputationError, match=CHANGED) as caught:
        loss.backward()
    assert caught.value.layer_id in {"inner", "outer"}
    assert "0.weight" in str(caught.value)


@pytest.mark.parametrize("change", [replaced, replaced_module])
@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("nested", [False, True])
def test_what_is_put_in_a_parameters_place_is_not_used_or_named(pair, x, region, change, nested):
    function = REGIONS[region](pair)
    inputs = [x, *pair.used.parameters()]
    expected = torch.autograd.grad(loss_of(function(x)), inputs)
    output = checkpoint(checkpoint, function, x) if nested else checkpoint(function, x)
    change(pair)

    def run():
        return torch.autograd.grad(loss_of(output), inputs)

    now = pair.used[0].weight
    assert right_or_refused(run, expected, "0.weight", RecomputationError)
    assert pair.used[0].weight is now


UNSEEN = {
    ".data.add_": lambda pair: pair.used[0].weight.data.add_(1),
    "NumPy": lambda pair: pair.used[0].weight.detach().numpy().fill(7),
    "set_ by hand": lambda pair: torch._C._autograd._unsafe_set_version_counter(
        (_added(pair.used[0].weight),), (_version(pair),)
    ),
}


def _version(pair):
    return pair.used[0].weight._version - 1


def _added(weight):
    with torch.no_grad():
        return weight.add_(1)


@pytest.mark.parametrize("change", UNSEEN)
@pytest.mark.parametrize("region", ["module", "method", "lambda"])
def test_a_change_behind_torchs_back_is_found_by_digest(pair, x, region, change):
    loss = loss_of(checkpoint(REGIONS[region](pair), x, check="digest"))
    UNSEEN[change](pair)
    with pytest.raises(RecomputationError, match=r"0\.weight"):
        loss.backward()


def test_digests_of_what_is_the_same_again_are_the_same(pair, x):
    expected = gradients(pair, x, pair(x))
    output = checkpoint(pair, x, check="digest")
    pair.used[0].weight.data.neg_().neg_()
    pair.unread.data.add_(1)
    assert same(gradients(pair, x, output), expected)


ARGUMENTS = {
    "alone": lambda run, a, b: run(lambda a, b: (a.exp() * b).sin(), a, b),
    "in a list": lambda run, a, b: run(lambda a, r: (a.exp() * r[0]).sin(), a, [b]),
    "in a dict": lambda run, a, b: run(lambda a, r: (a.exp() * r["b"]).sin(), a, {"b": b}),
    "as a keyword": lambda run, a, b: run(lambda a, b: (a.exp() * b).sin(), a, b=b),
    "in a list as a keyword": lambda run, a, b: run(
        lambda a, r: (a.exp() * r[0]["b"]).sin(), a, r=[{"b": b}]
    ),
}


@pytest.mark.parametrize("place", ARGUMENTS)
@pytest.mark.parametrize("nested", [False, True])
def test_an_argument_changed_in_place_is_named(place, nested, x):
    run = functools.partial(checkpoint, checkpoint) if nested else checkpoint
    b = x.detach().clone()
    loss = loss_of(ARGUMENTS[place](run, x, b))
    b.add_(1)
    with pytest.raises(RecomputationError, match="changed in place") as caught:
        loss.backward()
    assert "args" in str(caught.value)


@pytest.mark.parametrize("place", ARGUMENTS)
def test_an_argument_that_needs_a_gradient_changed_in_place_is_named(place, x):
    b = x * 2
    loss = loss_of(ARGUMENTS[place](checkpoint, x, b))
    b.add_(1)
    with pytest.raises(RecomputationError, match="changed in place"):
        loss.backward()


WEIGHT_CHANGES = {
    "fused AdamW": lambda weight: _stepped(weight, fused=True),
    "foreach AdamW": lambda weight: _stepped(weight, foreach=True),
    ".data = other": lambda weight: setattr(weight, "data", torch.ones(4, 4)),
}


def _stepped(weight, **words):
    weight.grad = torch.ones_like(weight)
    adamw([weight], lr=0.1, **words).step()


@pytest.mark.parametrize("change", WEIGHT_CHANGES)
@pytest.mark.parametrize("place", ["alone", "in a list"])
def test_a_weight_given_as_an_argument_that_changes_is_named(x, change, place):
    weight = nn.Parameter(torch.eye(4))
    if place == "alone":
        output = checkpoint(lambda x, w: nn.functional.linear(x.exp(), w).sin(), x, weight)
    else:
        output = checkpoint(lambda x, w: nn.functional.linear(x.exp(), w[0]).sin(), x, [weight])
    WEIGHT_CHANGES[change](weight)
    with pytest.raises(RecomputationError, match=CHANGED):
        output.sum().backward()


def test_an_argument_changed_behind_torchs_back_is_found_by_digest(x):
    b = x.detach().clone()
    output = checkpoint(lambda a, b: (a.exp() * b).sin(), x, b, check="digest")
    b.data.add_(1)
    with pytest.raises(RecomputationError, match="arg"):
        output.sum().backward()


def test_a_tensor_closed_over_that_changes_is_named(x):
    factor = torch.full((4,), 2.0)
    loss = loss_of(checkpoint(lambda x: (x.exp() * factor).sin(), x))
    factor.add_(1)
    with pytest.raises(RecomputationError, match="changed"):
        loss.backward()


def test_a_weight_closed_over_that_an_optimizer_steps_is_named(x):
    weight = torch.full((4,), 2.0, requires_grad=True)
    loss = loss_of(checkpoint(lambda x: (x.exp() * weight).sin(), x))
    weight.grad = torch.ones(4)
    adamw([weight], lr=0.1, fused=True).step()
    with pytest.raises(RecomputationError, match="step"):
        loss.backward()


class Masked(nn.Module):
    """Reads a buffer it never writes."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mask", torch.full((width, 4), 0.5))

    def forward(self, x):
        return torch.tanh(self.linear(x) * self.mask[:3].clone()).sin()


BUFFER_CHANGES = {
    "in place": lambda module: module.mask.add_(1),
    "replaced": lambda module: setattr(module, "mask", torch.ones(3, 4)),
    ".data = other": lambda module: setattr(module.mask, "data", torch.ones(3, 4)),
    "gone": lambda module: delattr(module, "mask"),
}


@pytest.mark.parametrize("change", BUFFER_CHANGES)
@pytest.mark.parametrize("width", [3, 100_000])
def test_a_buffer_that_changes_is_replayed_as_it_was_or_named(x, change, width):
    seed_all(3)
    module = Masked(width)
    expected = gradients(module, x, module(x))
    output = checkpoint(module, x)
    BUFFER_CHANGES[change](module)
    now = dict(module.named_buffers())

    def run():
        return gradients(module, x, output)

    assert right_or_refused(run, expected, "mask", RecomputationError, AttributeError)
    assert dict(module.named_buffers()).keys() == now.keys()
    assert all(now[name] is buffer for name, buffer in module.named_buffers())


class Attributed(nn.Module):
    """Keeps a tensor as a plain attribute, as many do with masks."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.mask = torch.full((4,), 0.5)

    def forward(self, x):
        return torch.tanh(self.linear(x) * self.mask.clone()).sin()


ATTRIBUTE_CHANGES = {
    "in place": lambda module: module.mask.add_(1),
    "replaced": lambda module: setattr(module, "mask", torch.ones(4)),
    ".data = other": lambda module: setattr(module.mask, "data", torch.ones(4)),
}


@pytest.mark.parametrize("change", ATTRIBUTE_CHANGES)
def test_a_tensor_among_a_modules_attributes_that_changes_is_not_used_or_named(x, change):
    seed_all(3)
    module = Attributed()
    expected = gradients(module, x, module(x))
    output = checkpoint(module, x)
    ATTRIBUTE_CHANGES[change](module)

    def run():
        return gradients(module, x, output)

    assert right_or_refused(run, expected, "", RecomputationError)


def test_a_weight_that_its_own_forward_writes():
    """An embedding with a largest norm cuts its rows before it reads them."""

    def told(run):
        seed_all(3)
        table = nn.Embedding(10, 4, max_norm=1.0)
        run(table, torch.tensor([1, 2, 2])).exp().sum().backward()
        return table.weight, table.weight.grad

    assert same(told(lambda table, places: table(places)), told(checkpoint))


def test_a_buffer_the_region_changes_may_change_again():
    """Plain autograd refuses it, having saved the buffer; a replay has its own copy."""

    def told(run, change):
        seed_all(3)
        norm = nn.Sequential(nn.BatchNorm1d(4), nn.Tanh(), nn.BatchNorm1d(4, momentum=None))
        x = torch.randn(6, 4, requires_grad=True)
        output = run(norm, x)
        if change:
            norm[0].reset_running_stats()
            norm[2].running_mean.fill_(7)
        loss_of(output).backward()
        if change:
            assert norm[0].num_batches_tracked == 0
            assert torch.equal(norm[2].running_mean, torch.full((4,), 7.0))
        return x.grad, *(p.grad for p in norm.parameters())

    assert same(told(lambda fn, x: fn(x), change=False), told(checkpoint, change=True))


NO_MATTER = {
    "the other network, in place": lambda pair: pair.other.weight.data.mul_(2),
    "the other network, seen by torch": lambda pair: nn.init.ones_(pair.other.weight),
    "the other network, replaced": lambda pair: setattr(pair, "other", nn.Linear(4, 4)),
    "a buffer not read": lambda pair: pair.unread.add_(1),
    "gradients": lambda pair: [setattr(p, "grad", torch.ones_like(p)) for p in pair.parameters()],
    "evaluation": lambda pair: pair.eval(),
    "a new attribute": lambda pair: setattr(pair, "steps", 3),
    "a new buffer": lambda pair: pair.register_buffer("late", torch.ones(1)),
    "a hook": lambda pair: pair.used[0].register_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("change", NO_MATTER)
@pytest.mark.parametrize("check", ["version", "digest"])
def test_what_the_region_does_not_use_may_change(pair, x, change, check):
    expected = gradients(pair, x, pair(x))
    output = checkpoint(pair, x, check=check)
    parameters = [x, *pair.parameters()]
    NO_MATTER[change](pair)
    got = torch.autograd.grad(loss_of(output), parameters, allow_unused=True)
    assert same(got, expected)


class Adversaries(nn.Module):
    """Generator and discriminator in one module, trained by two optimizers."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Tanh())
        self.discriminator = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def make(self, x):
        return self.generator(x).sin()

    def judge(self, x):
        return self.discriminator(x).sin()


@pytest.mark.parametrize("words", [{"fused": True}, {"foreach": True}])
def test_another_optimizer_may_step_the_other_network_in_between(words):
    def told(run):
        seed_all(3)
        both = Adversaries()
        steps_generator = adamw(both.generator.parameters(), lr=0.1, **words)
        steps_judge = adamw(both.discriminator.parameters(), lr=0.1, **words)
        for _ in range(3):
            made = run(both.make, torch.randn(5, 4))
            loss_of(run(both.judge, made.detach())).backward()
            steps_judge.step()
            steps_judge.zero_grad()
            loss_of(made).backward()
            steps_generator.step()
            steps_generator.zero_grad()
        return [*both.parameters()]

    assert same(told(lambda fn, x: fn(x)), told(checkpoint))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("words", [{"fused": True}, {"foreach": True}])
def test_parameters_may_be_stepped_while_backward_goes_on(nested, words):
    """The trick of stepping each parameter as soon as its gradient is there."""

    def told(run):
        seed_all(3)
        model = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Dropout(0.2))
            for _ in range(3)
        )
        steppers = {p: adamw([p], lr=0.1, **words) for p in model.parameters()}

        def step(parameter):
            steppers[parameter].step()
            steppers[parameter].zero_grad()

        for parameter in steppers:
            parameter.register_post_accumulate_grad_hook(step)

        def through(x):
            return functools.reduce(lambda x, block: run(block, x), model, x)

        for _ in range(2):
            x = torch.randn(5, 4)
            loss_of(run(through, x) if nested else through(x)).backward()
        return [*model.parameters()]

    assert same(told(lambda fn, x: fn(x)), told(checkpoint))


def test_a_step_before_the_forward_is_no_change(pair, x):
    optimizer = adamw(pair.parameters(), lr=0.1, fused=True)
    for _ in range(3):
        expected = gradients(pair, x, pair(x))
        loss = loss_of(checkpoint(pair, x))
        loss.backward()
        assert same([x.grad, *(p.grad for p in pair.parameters())], expected)
        optimizer.step()
        optimizer.zero_grad()
        x.grad = None


def test_a_step_between_two_backwards_is_told_at_the_second(pair, x):
    optimizer = sgd(pair.parameters(), lr=0.1, foreach=True)
    loss = loss_of(checkpoint(pair, x))
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RecomputationError, match=CHANGED):
        loss.backward()


def test_a_step_of_an_older_region_is_told_and_the_newer_is_right(pair, x):
    optimizer = adamw(pair.parameters(), lr=0.1, fused=True)
    older = loss_of(checkpoint(pair, x))
    for p in pair.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()
    expected = gradients(pair, x, pair(x))
    newer = checkpoint(pair, x)
    assert same(gradients(pair, x, newer), expected)
    with pytest.raises(RecomputationError, match="step"):
        older.backward()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("first", [True, False])
def test_train_and_eval_are_those_of_the_forward(first, dropout):
    def told(run):
        seed_all(3)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(dropout), nn.Tanh())
        model.train(first)
        x = torch.randn(6, 4, requires_grad=True)
        output = run(model, x)
        model.train(not first)
        loss_of(output).backward()
        assert [m.training for m in model.modules()] == [not first] * 5
        return x.grad, *(p.grad for p in model.parameters()), *model.buffers()

    assert same(told(lambda fn, x: fn(x)), told(checkpoint))


@pytest.mark.parametrize("first", [True, False])
def test_a_parameter_frozen_or_thawed_in_between_is_named_or_exact(pair, x, first):
    weight = pair.used[0].weight
    weight.requires_grad_(first)
    inputs = [x, *(p for p in pair.used.parameters() if p is not weight)]
    expected = torch.autograd.grad(loss_of(pair(x)), inputs)
    output = checkpoint(pair, x)
    weight.requires_grad_(not first)

    def run():
        return torch.autograd.grad(loss_of(output), inputs)

    assert right_or_refused(run, expected, "requires_grad", RecomputationError)


def test_a_list_the_caller_appends_to_is_replayed_as_it_was(x):
    items = [x, x.detach() * 2]
    expected = torch.autograd.grad(loss_of(sum(i.exp() for i in items).sin()), x)
    output = checkpoint(lambda items: sum(i.exp() for i in items).sin(), items)
    items.append(torch.ones(()))
    items[1] = torch.zeros(())
    assert same(torch.autograd.grad(loss_of(output), x), expected)


def test_a_dict_the_region_empties_is_replayed_as_it_was(x):
    def region(options):
        return (options.pop("a").exp() * options.pop("scale", 1)).sin()

    expected = torch.autograd.grad(loss_of(region({"a": x, "scale": 3})), x)
    output = checkpoint(region, {"a": x, "scale": 3})
    assert same(torch.autograd.grad(loss_of(output), x), expected)


def test_an_output_written_over_is_right_or_refused(x):
    expected = torch.autograd.grad(x.exp().sum(), x)
    output = checkpoint(torch.exp, x)
    output.add_(1)

    def run():
        return torch.autograd.grad(output.sum(), x)

    assert right_or_refused(run, expected, "", RecomputationError)


class Unlisted(nn.Module):
    """Draws from where nobody can bring it back."""

    def __init__(self, draw):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.draw = draw

    def forward(self, x):
        return torch.tanh(self.linear(x) * self.draw())


def _by_counter():
    counter = itertools.count(1)
    return lambda: float(next(counter))


SOURCES = {
    "os.urandom": lambda: lambda: 1.0 + int.from_bytes(os.urandom(8), "big") / 2**63,
    "a counter": _by_counter,
    "a generator of its own": lambda: functools.partial(
        torch.rand, 4, generator=torch.Generator().manual_seed(5)
    ),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("early_stop", [True, False])
def test_a_source_nobody_named_is_named_by_value(x, source, early_stop):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Unlisted(SOURCES[source]()), nn.Tanh())
    loss = loss_of(
        checkpoint(model, x, determinism_check="values", name="blocks", early_stop=early_stop)
    )
    with pytest.raises(RecomputationError) as caught:
        loss.backward()
    told = str(caught.value)
    assert caught.value.layer_id == "blocks"
    assert "in blocks.2, " in told
    assert f"{os.path.basename(__file__)}:" in told  # noqa: PTH119 -- a name in a text
    assert "position" in told


def test_a_source_that_was_named_passes_the_check_by_value(x):
    generator = torch.Generator().manual_seed(5)
    model = Unlisted(functools.partial(torch.rand, 4, generator=generator))
    start = generator.get_state()
    expected = gradients(model, x, model(x))
    generator.set_state(start)
    words = {"determinism_check": "values", "generators": [generator]}
    assert same(gradients(model, x, checkpoint(model, x, **words)), expected)


def test_values_that_are_not_numbers_are_the_same_values(x):
    def region(x):
        return torch.where(x > 0, x.exp().log() / 0, x * float("nan")).sin()

    output = checkpoint(region, x, determinism_check="values")
    output.nan_to_num().sum().backward()
    assert x.grad is not None
