"""What torch's own non-reentrant checkpoint is known to do, ours does too.

The behaviours that torch's test suite holds its checkpoint to, in our words: what may be nested,
differentiated twice, gone through in parts, stopped early, or given back in odd shapes.
"""

import contextlib
import functools
import itertools

import pytest
import torch
from activation_tools import Counted, Watching, checked, grads, graph_left_by, slope, three
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import (
    GraphExecGroup,
    set_checkpoint_debug_enabled,
    set_checkpoint_early_stop,
)
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from holdfast.activation import checkpoint
from holdfast.errors import RecomputationError

stopping = pytest.mark.parametrize("early_stop", [True, False], ids=["early stop", "no early stop"])


@pytest.fixture(autouse=True)
def _seeded():
    state = torch.get_rng_state()
    torch.manual_seed(3)
    yield
    torch.set_rng_state(state)


def with_backward_inside(x):
    first, second = three(x), three(x)
    torch.autograd.grad(first.sum(), x)
    (gradient,) = torch.autograd.grad(second.sum(), x, retain_graph=True)
    return x.sin() * gradient + second


NESTINGS = {
    "c(f)": lambda f, c, g: (f, c(f)),
    "c(c(f))": lambda f, c, g: (f, c(c(f))),
    "c(c(c(f)))": lambda f, c, g: (f, c(c(c(f)))),
    "g(c(f))": lambda f, c, g: (g(f), g(c(f))),
    "g(c(c(f)))": lambda f, c, g: (g(f), g(c(c(f)))),
    "c(g(f))": lambda f, c, g: (g(f), c(g(f))),
    "g(c(g(f)))": lambda f, c, g: (g(g(f)), g(c(g(f)))),
    "c(g(g(c(f))))": lambda f, c, g: (g(g(f)), c(g(g(c(f))))),
    "g(c(g(c(f))))": lambda f, c, g: (g(g(f)), g(c(g(c(f))))),
    "g(g(c(c(f))))": lambda f, c, g: (g(g(f)), g(g(c(c(f))))),
    "g(c(g(g(c(f)))))": lambda f, c, g: (g(g(g(f))), g(c(g(g(c(f)))))),
    "g(c(g(c(g(c(f))))))": lambda f, c, g: (g(g(g(f))), g(c(g(c(g(c(f))))))),
}


@stopping
@pytest.mark.parametrize("nesting", NESTINGS)
@pytest.mark.parametrize("function", [three, with_backward_inside])
def test_checkpoints_and_gradients_nest_in_any_order(function, nesting, early_stop):
    wrap = functools.partial(checked, early_stop=early_stop)
    expected, nested = NESTINGS[nesting](function, wrap, slope)
    x = torch.randn((), requires_grad=True)
    assert torch.equal(expected(x), nested(x))
    assert torch.equal(slope(expected)(x), slope(nested)(x))
    assert graph_left_by(nested) == []


@pytest.mark.parametrize("ours_outside", [True, False])
@stopping
def test_torchs_own_checkpoint_nests_with_ours(ours_outside, early_stop):
    def theirs(function):
        return lambda x: torch_checkpoint(function, x, use_reentrant=False, early_stop=early_stop)

    def ours(function):
        return checked(function, early_stop=early_stop)

    outer, inner = (ours, theirs) if ours_outside else (theirs, ours)
    x = torch.randn(3, requires_grad=True)

    def region(run):
        return lambda x: run(three)(run(torch.tanh)(x.exp())).sin()

    plain = region(lambda function: function)
    nested = outer(region(inner))
    assert torch.equal(grads(plain, x)[0], grads(nested, x)[0])
    assert torch.equal(slope(slope(plain))(x), slope(slope(nested))(x))
    assert graph_left_by(nested) == []


@stopping
def test_a_region_has_two_regions_inside(early_stop):
    wrap = functools.partial(checked, early_stop=early_stop)
    x = torch.randn(3, 3, requires_grad=True)

    def second(x):
        return x.cos().sin().exp()

    def both(x):
        return second(three(x))

    def both_checked(x):
        return wrap(second)(wrap(three)(x))

    expected = slope(slope(both))(x)
    assert torch.equal(expected, slope(slope(wrap(both_checked)))(x))
    assert torch.equal(expected, slope(wrap(slope(wrap(both_checked))))(x))
    assert graph_left_by(slope(wrap(both_checked))) == []
    assert graph_left_by(slope(wrap(slope(wrap(both_checked))))) == []


@stopping
def test_what_is_no_tensor_goes_in_and_comes_out(early_stop):
    def region(times, a, b, function, nothing=None):
        return function(times * a * b.exp()), 1, "text", nothing, {"k": [a.sin()]}

    a, b = (torch.randn(3, requires_grad=True) for _ in range(2))
    expected = region(3, a, b, torch.sin)
    given = checkpoint(region, 3, a, b, torch.sin, early_stop=early_stop)
    assert given[1:4] == (1, "text", None)
    for one, other in ((expected[0], given[0]), (expected[4]["k"][0], given[4]["k"][0])):
        assert torch.equal(one, other)
        wanted = torch.autograd.grad(one.sum(), (a, b), allow_unused=True, retain_graph=True)
        got = torch.autograd.grad(other.sum(), (a, b), allow_unused=True, retain_graph=True)
        assert [*map(str, wanted)] == [*map(str, got)]


def test_a_region_without_tensors_just_runs():
    assert checkpoint(lambda a, b=1: [a + b, None], 2, b=3) == [5, None]


@stopping
def test_keywords_are_the_regions(early_stop):
    def region(a, factor=None):
        return three(a.sin().exp() * (1 if factor is None else factor))

    a, b = (torch.randn(3, requires_grad=True) for _ in range(2))
    assert all(map(torch.equal, grads(region, a), grads(checked(region), a)))
    expected = grads(lambda a, b: region(a, factor=b), a, b)
    given = grads(lambda a, b: checkpoint(region, a, factor=b, early_stop=early_stop), a, b)
    assert all(map(torch.equal, expected, given))


@stopping
def test_backward_runs_over_the_graph_of_the_forward(early_stop):
    x = torch.randn(3, requires_grad=True)
    output = checkpoint(three, x, early_stop=early_stop)
    seen = []
    output.grad_fn.next_functions[0][0].register_hook(lambda *_: seen.append("hook"))
    output.sum().backward()
    assert seen == ["hook"]


@stopping
def test_a_backward_inside_a_backward(early_stop):
    x = torch.randn(3, requires_grad=True)

    def region(x):
        middle = x.sin().cos()
        return middle, middle.sin()

    def told(run):
        x.grad = None
        middle, output = run(region, x)
        partly = middle.sum()
        output.grad_fn.register_hook(lambda *_: partly.backward(retain_graph=True))
        output.sum().backward(retain_graph=True)
        return x.grad

    expected = told(lambda function, x: function(x))
    assert torch.equal(expected, told(functools.partial(checkpoint, early_stop=early_stop)))


SWITCHES = [
    ({}, None, 1),
    ({"early_stop": True}, None, 1),
    ({"early_stop": False}, None, 2),
    ({}, False, 2),
    ({}, True, 1),
    ({"early_stop": False}, True, 1),
    ({"early_stop": True}, False, 2),
]


@pytest.mark.parametrize(("keywords", "switch", "calls"), SWITCHES)
def test_early_stop_ends_the_replay_at_the_last_tensor_needed(keywords, switch, calls):
    copy = Counted(torch.clone)  # saves nothing, so nobody needs it in a replay
    with contextlib.nullcontext() if switch is None else set_checkpoint_early_stop(switch):
        output = checkpoint(
            lambda x: copy(x.sin().cos()), torch.ones(2, requires_grad=True), **keywords
        )
    output.sum().backward()
    assert copy.calls == calls


@stopping
def test_a_region_whose_only_saved_tensor_is_its_input(early_stop):
    region = Counted(torch.sin)
    with Watching() as watching:
        output = checkpoint(region, torch.tensor(1.0, requires_grad=True), early_stop=early_stop)
        output.backward()
    assert watching.names.count("sin.default") == (1 if early_stop else 2)
    assert region.calls <= 2


@stopping
def test_a_region_that_saves_nothing_runs_once(early_stop):
    region = Counted(torch.clone)
    checkpoint(region, torch.ones(2, requires_grad=True), early_stop=early_stop).sum().backward()
    assert region.calls == 1


def test_a_region_runs_once_forward_and_once_for_a_backward():
    region = Counted(three)
    output = checkpoint(region, torch.ones(2, requires_grad=True))
    assert region.calls == 1
    output.sum().backward()
    assert region.calls == 2


def test_a_region_nobody_asks_for_is_not_replayed():
    region = Counted(three)
    x = torch.ones(2, requires_grad=True)
    y = torch.ones(2, requires_grad=True)
    output = checkpoint(region, x) + y.exp()
    torch.autograd.grad(output.sum(), y)
    assert region.calls == 1


@pytest.mark.parametrize("needs_gradient", [True, False])
def test_many_small_regions(needs_gradient):
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(10, 100), nn.ReLU(), nn.Linear(100, 10))

        def forward(self, data):
            return self.layers(data)

    module = Small()
    rows = [torch.rand(1, 10, requires_grad=needs_gradient) for _ in range(200)]

    def told(run):
        module.zero_grad()
        torch.stack([run(row) for row in rows]).mean().backward()
        return [parameter.grad for parameter in module.parameters()]

    assert all(map(torch.equal, told(module), told(lambda row: checkpoint(module, data=row))))


def test_a_region_detached_from_the_graph():
    class Detached(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            with torch.no_grad():
                return self.second(self.first(x))

    module = Detached()
    x = torch.randn(2, 2, requires_grad=True)
    for _ in range(3):
        output = checkpoint(module, x)
        assert not output.requires_grad
        (output + x).sum().backward()
    assert torch.equal(x.grad, torch.full((2, 2), 3.0))


def test_a_region_partly_detached():
    x = torch.randn(4, requires_grad=True)

    def region(x):
        y = x.exp()
        with torch.no_grad():
            z = y.sin()
        return y.detach() * x.cos() + z * y

    assert all(map(torch.equal, grads(region, x), grads(checked(region), x)))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_region_just_runs(mode):
    x = torch.randn(3, requires_grad=True)
    region = Counted(three)
    with mode():
        output = checkpoint(region, x)
        assert torch.equal(output, three(x))
    assert region.calls == 1
    assert not output.requires_grad


def test_a_region_may_turn_gradients_on_itself():
    x = torch.randn(3, requires_grad=True)
    with torch.no_grad():
        output = checkpoint(slope(three), x)
    assert torch.equal(output, slope(three)(x))


class SavesAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        between = x * y
        output = between + between
        ctx.save_for_backward(x, y, between, output)
        return output

    @staticmethod
    def backward(ctx, gradient):
        x, y, between, output = ctx.saved_tensors
        return gradient * (y * 2 + between * 0), gradient * (x * 2 + output * 0)


def test_a_custom_function_saves_inputs_outputs_and_others():
    x, y = (torch.randn(3, requires_grad=True) for _ in range(2))

    def region(x, y):
        return SavesAll.apply(x * y, y.exp()).sin()

    assert all(map(torch.equal, grads(region, x, y), grads(checked(region), x, y)))


def test_saved_tensors_can_be_read_twice_in_one_backward():
    """Torch refuses it; plain autograd does not."""

    class ReadsTwice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x, x.exp())
            return x.exp()

        @staticmethod
        def backward(ctx, gradient):
            once, again = ctx.saved_tensors, ctx.saved_tensors
            assert all(map(torch.equal, once, again))
            return gradient * again[1]

    x = torch.randn(3, requires_grad=True)

    def region(x):
        return ReadsTwice.apply(x.sin())

    assert all(map(torch.equal, grads(region, x), grads(checked(region), x)))


def test_a_saved_tensor_that_needs_no_gradient_is_the_very_same():
    got = []

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(y)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            got.extend(ctx.saved_tensors)
            return gradient, None

    x, y = torch.ones(2, requires_grad=True), torch.ones(2)
    checkpoint(Keeps.apply, x, y).sum().backward()
    assert got[0] is y


def test_saved_tensors_can_be_read_outside_a_backward():
    region = Counted(lambda a: torch.exp((a * a) * a))
    x = torch.randn(5, requires_grad=True)
    output = checkpoint(region, x)
    assert torch.equal(output.grad_fn._saved_result, output)
    assert region.calls == 2
    assert torch.equal(output.grad_fn._saved_result, output)
    output.sum().backward()
    assert region.calls == 4
    with pytest.raises(RuntimeError, match="already been freed"):
        _ = output.grad_fn._saved_result


def test_backward_and_grad_agree():
    x = torch.randn(2, 2, requires_grad=True)
    expected = torch.exp(x)
    checkpoint(torch.exp, x).sum().backward()
    assert torch.equal(x.grad, expected)
    assert torch.equal(grads(checked(torch.exp), x)[0], expected)


def test_backward_twice_without_keeping_the_graph_is_refused_by_autograd():
    output = checkpoint(three, torch.ones(2, requires_grad=True)).sum()
    output.backward()
    with pytest.raises(RuntimeError, match="second time"):
        output.backward()


def test_each_of_several_backwards_replays_again():
    region = Counted(three)
    x = torch.randn(3, requires_grad=True)
    output = checkpoint(region, x).sum()
    first = torch.autograd.grad(output, x, retain_graph=True)
    second = torch.autograd.grad(output, x, retain_graph=True)
    assert torch.equal(first[0], second[0])
    assert region.calls == 3


def test_data_parallel_inside():
    model = nn.Linear(2, 2, bias=False)
    x = torch.randn(2, 2, requires_grad=True)
    expected = grads(model, x)
    assert torch.equal(grads(checked(nn.DataParallel(model)), x)[0], expected[0])


def test_a_weight_used_inside_and_outside_gets_its_hook_called_once():
    weight = torch.randn(4, 4, requires_grad=True)
    calls = []
    weight.register_hook(calls.append)
    inner = weight * torch.rand(4, 4, requires_grad=True)
    checkpoint(lambda x: weight * x, inner).sum().backward()
    assert len(calls) == 1


def test_a_tensor_used_in_two_regions_and_between_them():
    def told(run):
        x = torch.linspace(0.1, 1, 5).requires_grad_()
        first = run(three, x)
        second = run(lambda a, b: (a * b).exp(), first, x)
        third = run(lambda a, b: (a * b).sin(), second, first)
        return torch.autograd.grad((first * second * third).sum(), x)[0]

    assert torch.equal(told(lambda function, *args: function(*args)), told(checkpoint))


def test_an_input_given_back_is_the_input():
    x = torch.randn(3, requires_grad=True)
    y = torch.randn(3)
    first, second, third = checkpoint(lambda x, y: (x, y, x.sin()), x, y)
    assert first is x
    assert second is y
    (first.sum() + third.sum()).backward()
    assert torch.equal(x.grad, 1 + x.cos())


def test_a_graph_can_be_gone_through_in_parts():
    region = Counted(lambda x: (x.sin().cos(), x.sin().cos().sin().cos()))
    x = torch.randn(3, requires_grad=True)
    middle, output = checkpoint(region, x)
    wanted = torch.autograd.grad((region.function(x)[1]).sum(), x)
    (part,) = torch.autograd.grad(output.sum(), x, retain_graph=True)
    assert torch.equal(part, wanted[0])
    (of_middle,) = torch.autograd.grad(middle.sum(), x)
    assert torch.equal(of_middle, torch.autograd.grad(x.sin().cos().sum(), x)[0])


def _in_two_parts(group, region, x):
    """From the output to what is between, then on to the input, as two backwards."""
    between, output = checkpoint(region, x)
    with group:
        (gradient,) = torch.autograd.grad(output.sum(), between)
        return torch.autograd.grad(between, x, grad_outputs=gradient)[0]


def test_parts_of_one_backward_share_a_replay_in_a_group():
    def region(x):
        between = x.sin().cos()
        return between, between.sin().cos()

    x = torch.randn(3, requires_grad=True)
    (expected,) = torch.autograd.grad(region(x)[1].sum(), x)
    alone, together = Counted(region), Counted(region)
    assert torch.equal(_in_two_parts(contextlib.nullcontext(), alone, x), expected)
    assert torch.equal(_in_two_parts(GraphExecGroup(), together, x), expected)
    assert alone.calls <= 3
    assert together.calls == 2


def test_backwards_of_one_group_that_overlap_are_right():
    """Torch refuses these; it would have to replay a second time."""
    x = torch.randn(3, requires_grad=True)
    output = checkpoint(three, x).sum()
    with GraphExecGroup():
        output.backward(retain_graph=True)
        output.backward()
    assert torch.equal(x.grad, 2 * grads(three, x)[0])


def first_then(first, then):
    turns = itertools.chain([first], itertools.repeat(then))

    def region(x):
        return next(turns)(x)

    return region


def two(x):
    return x.sin().exp()


def two_of_other_shape(x):
    return x.sin() * torch.tensor([1.0, 2.0])


def two_of_other_dtype(x):
    return x.sin().double().exp()


@pytest.mark.parametrize(
    ("then", "early_stop"),
    [(two, True), (two, False), (lambda x: three(x).exp().sin(), False)],
    ids=["fewer", "fewer, no early stop", "more"],
)
def test_another_number_of_saved_tensors_is_an_error(then, early_stop):
    output = checkpoint(
        first_then(three, then),
        torch.ones(1, requires_grad=True),
        early_stop=early_stop,
        name="decoder",
    )
    with pytest.raises(RecomputationError, match="tensors") as caught:
        output.sum().backward()
    assert caught.value.layer_id == "decoder"
    assert "decoder" in str(caught.value)


def test_what_comes_after_the_last_needed_tensor_does_not_matter_with_early_stop():
    x = torch.ones(1, requires_grad=True)
    assert torch.equal(grads(checked(first_then(two, three)), x)[0], grads(two, x)[0])


@pytest.mark.parametrize(
    ("then", "words"),
    [(two_of_other_shape, r"\[?\(?1.*2"), (two_of_other_dtype, "float32.*float64")],
    ids=["shape", "dtype"],
)
@pytest.mark.parametrize("check", ["default", "values"])
def test_other_shapes_or_types_are_an_error(then, words, check):
    output = checkpoint(
        first_then(two, then),
        torch.ones(1, requires_grad=True),
        determinism_check=check,
        name="decoder",
    )
    with pytest.raises(RecomputationError, match=f"(?s){words}") as caught:
        output.sum().backward()
    assert caught.value.layer_id == "decoder"


def test_the_check_of_shapes_can_be_left_out():
    x = torch.ones(1, requires_grad=True)
    output = checkpoint(
        first_then(lambda x: x.sin() * torch.ones(1), two_of_other_shape),
        x,
        determinism_check="none",
    )
    output.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("debug", [True, False])
@pytest.mark.parametrize("switch", [None, True, False])
def test_debug_lists_the_operations_of_both_runs(debug, switch):
    x = torch.ones(1, requires_grad=True)
    with contextlib.nullcontext() if switch is None else set_checkpoint_debug_enabled(switch):
        output = checkpoint(first_then(two, two_of_other_shape), x, debug=debug)
        with pytest.raises(RecomputationError) as caught:
            output.sum().backward()
    listed = "aten.sin.default" in str(caught.value) and "aten.exp.default" in str(caught.value)
    assert listed == (debug if switch is None else switch)


def test_debug_leaves_a_right_region_alone():
    x = torch.ones(3, requires_grad=True)
    assert torch.equal(grads(checked(three, debug=True), x)[0], grads(three, x)[0])


def test_tensors_are_freed_while_backward_goes_on():
    alive = []
    storages = []

    def region(x):
        storages.clear()
        for _ in range(4):
            x = x**2
            storages.append(StorageWeakRef(x.untyped_storage()))
            x.register_hook(
                lambda _: alive.append(sum(not storage.expired() for storage in storages))
            )
        return x.sum()

    x = torch.full((10,), 1.01, requires_grad=True)
    checkpoint(region, x).backward(retain_graph=True)
    assert alive[0] == 0  # the forward kept none; the first unpacking replays
    assert alive[1:] == sorted(alive[1:], reverse=True)
    assert alive[-1] < alive[1]
