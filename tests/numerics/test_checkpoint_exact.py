"""Checkpointed or not, a step leaves the same bits: gradients, buffers, random streams."""

import functools
import random
import sys
import types
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from activation_models import (
    CASES,
    MODES,
    Chain,
    Pair,
    checking,
    differing,
    left_by,
    loss_of,
    plain,
    seed_all,
    step_of,
    stream_states,
)
from activation_tools import right_or_refused
from torch import nn

from holdfast.activation import checkpoint
from holdfast.errors import RecomputationError

every_case = pytest.mark.parametrize("name", CASES)
every_mode = pytest.mark.parametrize("mode", MODES)


@pytest.fixture(autouse=True)
def _streams_as_before():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # many small operations: on a busy machine threads wait for threads
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    yield
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])  # noqa: NPY002
    torch.set_num_threads(threads)


@pytest.fixture
def _no_onednn():
    """Its bfloat16 kernels use AMX, which some machines tell of and then kill the process for."""
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(True)


@every_case
@every_mode
def test_a_step_is_bit_equal(name, mode):
    assert differing(step_of(CASES[name], None), step_of(CASES[name], mode)) == []


@every_case
@pytest.mark.parametrize("mode", ["each block", "blocks in the whole"])
def test_without_early_stop_a_step_is_bit_equal(name, mode):
    checked = step_of(CASES[name], mode, early_stop=False)
    assert differing(step_of(CASES[name], None), checked) == []


@every_case
@pytest.mark.parametrize("mode", ["each block", "blocks in the whole"])
def test_backward_twice_over_a_kept_graph_is_bit_equal(name, mode):
    expected = step_of(CASES[name], None, backwards=2)
    assert differing(expected, step_of(CASES[name], mode, backwards=2)) == []


@every_case
@every_mode
@pytest.mark.parametrize("last_first", [False, True])
def test_two_micro_batches_before_backward_are_bit_equal(name, mode, last_first):
    def told(run_of):
        seed_all(7)
        model = CASES[name].make()
        batches = [CASES[name].sample() for _ in range(2)]
        losses = [loss_of(run_of(model, batch)) for batch in batches]
        for loss in reversed(losses) if last_first else losses:
            loss.backward()
        return left_by(model, [(f"batch {n}", batch) for n, batch in enumerate(batches)])

    checked = told(lambda model, x: MODES[mode](model, x, checking(model)))
    assert differing(told(lambda model, x: model(x)), checked) == []


@every_case
def test_three_optimizer_steps_end_in_the_same_weights(name):
    def told(run_of):
        seed_all(7)
        model = CASES[name].make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(run_of(model, CASES[name].sample())).backward()
            optimizer.step()
        return left_by(model, model.named_parameters())

    checked = told(lambda model, x: model(x, checking(model)))
    assert differing(told(lambda model, x: model(x)), checked) == []


@pytest.mark.usefixtures("_no_onednn")
@every_mode
@pytest.mark.parametrize("backward_inside", [False, True])
@pytest.mark.parametrize("name", ["gpt", "resnet", "lstm"])
def test_autocast_is_bit_equal(name, mode, backward_inside):
    def told(run_of):
        seed_all(7)
        model, x = CASES[name].make(), CASES[name].sample()
        with torch.autocast("cpu", torch.bfloat16):
            output = run_of(model, x)
            if backward_inside:
                loss_of(output).backward()
        if not backward_inside:
            loss_of(output).backward()
        return left_by(model, [("input", x), ("output", output)])

    checked = told(lambda model, x: MODES[mode](model, x, checking(model)))
    assert differing(told(lambda model, x: model(x)), checked) == []


@pytest.mark.usefixtures("_no_onednn")
@every_mode
def test_weights_shared_under_autocast_are_bit_equal(mode):
    """Autocast keeps the weights it has cast until it ends, for whichever block comes next."""

    def told(run_of):
        seed_all(7)
        linear = nn.Linear(8, 8)
        model = Chain(*(nn.Sequential(linear, nn.Tanh(), nn.Dropout(0.2)) for _ in range(3)))
        x = torch.randn(4, 8, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            output = run_of(model, x)
        loss_of(output).backward()
        return left_by(model, [("input", x), ("output", output)])

    checked = told(lambda model, x: MODES[mode](model, x, checkpoint))
    assert differing(told(lambda model, x: model(x)), checked) == []


@pytest.mark.parametrize("check", ["version", "digest"])
@pytest.mark.parametrize("determinism_check", ["default", "none", "values"])
def test_every_kind_of_check_lets_an_unchanged_model_through(check, determinism_check):
    words = {"check": check, "determinism_check": determinism_check}
    for name in ("gpt", "resnet", "changing buffers", "python random", "own streams"):
        checked = step_of(CASES[name], "blocks in the whole", **words)
        assert differing(step_of(CASES[name], None), checked) == []


def test_a_tensor_filled_after_it_was_saved_passes_the_check_by_value():
    """RReLU saves its noise before it draws it."""

    def told(run):
        seed_all(7)
        x = torch.randn(100, requires_grad=True)
        run(lambda x: nn.functional.rrelu(x.sin(), training=True).exp(), x).sum().backward()
        return {"gradient": x.grad} | stream_states()

    by_value = functools.partial(checkpoint, determinism_check="values")
    assert differing(told(plain), told(by_value)) == []


def test_evaluation_mode_is_bit_equal():
    def told(run):
        seed_all(7)
        model, x = CASES["resnet"].make().eval(), CASES["resnet"].sample()
        loss_of(model(x, run)).backward()
        return left_by(model, [("input", x)])

    assert differing(told(plain), told(checkpoint)) == []


def test_a_gradient_penalty_is_bit_equal():
    def told(run):
        seed_all(7)
        model = Chain(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3)) for _ in "123"))
        x = torch.randn(5, 8, requires_grad=True)
        output = model(x, run)
        (slope,) = torch.autograd.grad(loss_of(output), x, create_graph=True)
        (loss_of(output) + (slope.norm(dim=1) - 1).square().sum()).backward()
        return left_by(model, [("input", x)])

    assert differing(told(plain), told(checkpoint)) == []


def test_streams_drawn_from_between_forward_and_backward_stay_where_they_are():
    def told(run):
        seed_all(7)
        model, x = CASES["everything"].make(), CASES["everything"].sample()
        output = model(x, run)
        drawn = torch.rand(3), random.random(), np.random.rand()  # noqa: NPY002
        loss_of(output).backward()
        return left_by(model, [("input", x)]) | {"drawn": str(drawn)}

    assert differing(told(plain), told(checkpoint)) == []


def test_streams_seeded_between_forward_and_backward_stay_where_they_are():
    def told(run):
        seed_all(7)
        model, x = CASES["everything"].make(), CASES["everything"].sample()
        output = model(x, run)
        seed_all(99)
        loss_of(output).backward()
        return left_by(model, [("input", x)])

    assert differing(told(plain), told(checkpoint)) == []


def test_a_failed_replay_leaves_streams_and_buffers_where_they_were():
    seed_all(7)
    model, x = CASES["everything"].make(), CASES["everything"].sample()
    broken = []

    def region(x):
        x = model(x)
        if broken:
            raise ValueError("the disk is on fire")
        return x.sin()

    loss = loss_of(checkpoint(region, x))
    expected = left_by(model, [])
    broken.append(True)
    with pytest.raises(Exception, match="fire"):
        loss.backward()
    assert differing(expected, left_by(model, [])) == []


def test_a_gaussian_pair_is_not_split():
    """Each stream keeps the second of a pair of normal numbers for the next call."""

    def told(run):
        seed_all(7)
        random.gauss(0, 1)
        np.random.standard_normal()  # noqa: NPY002
        x = torch.ones(2, requires_grad=True)

        def region(x):
            scale = random.gauss(0, 1) * np.random.standard_normal()  # noqa: NPY002
            return (x * scale).sin() * random.gauss(0, 1)

        output = run(region, x) + run(region, x)
        output.sum().backward()
        return {"output": output, "gradient": x.grad} | stream_states()

    assert differing(told(plain), told(checkpoint)) == []


def test_a_stream_that_is_not_to_be_kept_moves_on():
    seed_all(7)
    x = torch.ones(100, requires_grad=True)
    output = checkpoint(nn.functional.dropout, x, preserve_rng_state=False)
    after_forward = torch.get_rng_state()
    output.sum().backward()
    assert not torch.equal(torch.get_rng_state(), after_forward)


class Net(nn.Module):
    """Needs its buffers found and put back, and its streams replayed."""

    def __init__(self):
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.3)

    def forward(self, x, *, scale=1.0):
        return self.drop(self.norm(torch.tanh(self.linear(x) * scale)))

    def method(self, x):
        return self(x).sin()

    @classmethod
    def of_class(cls, net, x):
        return net(x)


class Holder:
    def __init__(self, net):
        self.net = net

    def __call__(self, x):
        return self.net(x)

    def method(self, x):
        return self.net(x).sin()


@dataclass
class Kept:
    inner: dict[str, list[Holder]]

    def method(self, x):
        return self.inner["here"][0](x)


class Slotted:
    __slots__ = ("net",)

    def __init__(self, net):
        self.net = net

    def __call__(self, x):
        return self.net(x)


_globals = types.SimpleNamespace()
_net = None


def _of_a_global(x):
    return _net(x)


def _of_a_global_namespace(x):
    return _globals.net(x)


def _set_globals(net):
    globals()["_net"] = net
    _globals.net = net


def _of_a_global_one_call_away(x):
    return _of_a_global(x)


def _of_what_only_running_shows(x):
    return vars(sys.modules[__name__])["_n" + "et"](x)


def _decorated(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


def _with_default(net):
    def region(x, net=net):
        return net(x)

    return region


def _closing_over(held, pick):
    return lambda x: pick(held)(x)  # noqa: PLW0108


FORMS = {
    "a module": lambda net: net,
    "its __call__": lambda net: net.__call__,
    "its forward": lambda net: net.forward,
    "a bound method": lambda net: net.method,
    "a class method of it": lambda net: functools.partial(Net.of_class, net),
    "a partial": lambda net: functools.partial(net, scale=0.5),
    "a partial of a partial": lambda net: functools.partial(functools.partial(net.method)),
    "a lambda over a cell": lambda net: lambda x: net(x),  # noqa: PLW0108
    "a lambda over a method in a cell": lambda net: _closing_over(net.method, lambda held: held),
    "a function over a global": lambda net: _of_a_global,
    "a lambda over a global": lambda net: lambda x: _net(x),  # noqa: PLW0108
    "a function over a global namespace": lambda net: _of_a_global_namespace,
    "a function that calls another": lambda net: _of_a_global_one_call_away,
    "a closure over a list": lambda net: _closing_over([None, net], lambda held: held[1]),
    "a closure over a dict": lambda net: _closing_over({"a": net}, lambda held: held["a"]),
    "a closure over a list in a dict": lambda net: _closing_over(
        {"a": (0, [net])}, lambda held: held["a"][1][0]
    ),
    "a closure over a holder": lambda net: _closing_over(Holder(net), lambda held: held.net),
    "a callable object": Holder,
    "a callable object with slots": Slotted,
    "a method of a holder": lambda net: Holder(net).method,
    "a method of a holder of holders": lambda net: Kept({"here": [Holder(net)]}).method,
    "a decorated lambda": lambda net: _decorated(lambda x: net(x)),  # noqa: PLW0108
    "a decorated method": lambda net: _decorated(net.method),
    "a default argument": _with_default,
}


def _told_of(call):
    seed_all(7)
    net = Net()
    _set_globals(net)
    x = torch.randn(6, 4, requires_grad=True)
    output = call(net, x)
    loss_of(output).backward()
    return left_by(net, [("input", x), ("output", output)])


@pytest.mark.parametrize("form", FORMS)
def test_modules_are_found_in(form):
    expected = _told_of(lambda net, x: FORMS[form](net)(x))
    assert differing(expected, _told_of(lambda net, x: checkpoint(FORMS[form](net), x))) == []


@pytest.mark.parametrize(
    "call",
    [
        lambda run, net, x: run(lambda net, x: net(x), net, x),
        lambda run, net, x: run(lambda nets, x: nets[0](x), [net], x),
        lambda run, net, x: run(lambda nets, x: nets["a"](x), {"a": net}, x),
        lambda run, net, x: run(lambda x, net: net(x), x, net=net),
        lambda run, net, x: run(lambda x, call: call(x), x, call=net.method),
        lambda run, net, x: run(lambda holder, x: holder(x), Holder(net), x),
        lambda run, net, x: run(lambda call, x: call(x), functools.partial(net, scale=2.0), x),
    ],
)
def test_modules_are_found_in_arguments(call):
    expected = _told_of(lambda net, x: call(plain, net, x))
    assert differing(expected, _told_of(lambda net, x: call(checkpoint, net, x))) == []


def test_a_module_that_nothing_leads_to_is_named_by_the_caller():
    def call(net, x, run):
        return run(_of_what_only_running_shows, x)

    named = _told_of(lambda net, x: call(net, x, functools.partial(checkpoint, modules=[net])))
    assert differing(_told_of(lambda net, x: call(net, x, plain)), named) == []


PLACES = {
    "alone": lambda run, f, a, b: run(f, a, b),
    "in a list": lambda run, f, a, b: run(lambda both: f(*both), [a, b]),
    "in a tuple": lambda run, f, a, b: run(lambda both, _: f(*both), (a, b), None),
    "in a dict": lambda run, f, a, b: run(lambda d: f(d["a"], d["b"]), {"a": a, "b": b}),
    "in a named tuple": lambda run, f, a, b: run(lambda p: f(p.first, p.second), Pair(a, b)),
    "as keywords": lambda run, f, a, b: run(lambda *, a, b: f(a, b), a=a, b=b),
    "in a list as a keyword": lambda run, f, a, b: run(lambda a, *, r: f(a, *r), a, r=[b]),
    "deep down": lambda run, f, a, b: run(
        lambda tree, n, *, more: f(tree["x"][1].first, more[0]["b"]) * n,
        {"x": [None, Pair(a, "text")]},
        3,
        more=({"b": b}, object()),
    ),
    "twice": lambda run, f, a, b: run(lambda a, rest: f(a, rest[0]) + rest[1], a, [b, a]),
    "in an object": lambda run, f, a, b: run(
        lambda o: f(o.a, o.b), types.SimpleNamespace(a=a, b=b)
    ),
    "in a cell": lambda run, f, a, b: run(lambda: f(a, b)),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("leaves", [True, False])
def test_tensors_are_taken(place, nested, leaves):
    def told(run):
        seed_all(7)
        a = torch.randn(3, 4, requires_grad=True)
        b = torch.randn(3, 4, requires_grad=True)

        def mixed(a, b):
            return (a.exp() * b).sin() + nn.functional.dropout(a * b.tanh(), 0.4)

        def inner(function, *args, **kwargs):
            return run(run, function, *args, **kwargs) if nested else run(function, *args, **kwargs)

        output = PLACES[place](inner, mixed, *((a, b) if leaves else (a * 2, b.sin())))
        loss_of(output).backward()
        return {"output": output, "of a": a.grad, "of b": b.grad} | stream_states()

    assert differing(told(plain), told(checkpoint)) == []


@pytest.mark.parametrize("flags", [(True, False), (False, True), (True, True)])
def test_only_what_needs_a_gradient_gets_one(flags):
    def told(run):
        seed_all(7)
        a, b = (torch.randn(3, 4, requires_grad=flag) for flag in flags)
        run(lambda a, b: (a.exp() * b).sin(), a, b).sum().backward()
        return {"of a": a.grad, "of b": b.grad}

    assert differing(told(plain), told(checkpoint)) == []


def test_views_and_bases_keep_their_shapes():
    def told(run):
        seed_all(7)
        x = torch.randn(4, 6, requires_grad=True)

        def region(x):
            base = x.exp()
            turned = base.t()[1:4, ::2]
            wide = base[:3, :1].expand(3, 2)
            strided = base.as_strided((3, 2), (1, 6), 2)
            return (turned * strided).sin() + wide * wide

        output = run(region, x)
        loss_of(output).backward()
        return {"output": output, "gradient": x.grad}

    assert differing(told(plain), told(checkpoint)) == []


def test_an_input_that_the_region_writes_over_is_refused_or_exact():
    def told(run):
        seed_all(7)
        leaf = torch.randn(4, requires_grad=True)
        x = leaf * 1

        def region(x):
            y = x.exp() * 2
            x.mul_(3)
            return y.sin() + x

        run(region, x).sum().backward()
        return {"gradient": leaf.grad}

    expected = told(plain).values()
    run = functools.partial(told, checkpoint)
    assert right_or_refused(lambda: run().values(), expected, "changed", RecomputationError)


def test_in_place_operations_inside_are_exact():
    def told(run):
        seed_all(7)
        x = torch.randn(4, 4, requires_grad=True)

        def region(x):
            y = x.clone().sin_()
            y[0] = y[1].exp()
            y.mul_(y.detach() + 2).add_(x)
            return torch.relu_(y).sin()

        output = run(region, x)
        loss_of(output).backward()
        return {"output": output, "gradient": x.grad}

    assert differing(told(plain), told(checkpoint)) == []


def test_complex_and_integer_tensors_are_exact():
    def told(run):
        seed_all(7)
        x = torch.randn(4, dtype=torch.complex64, requires_grad=True)
        places = torch.tensor([3, 1, 0, 0])

        def region(x, places):
            return (x[places] * x.conj()).abs() + x.real.exp()

        output = run(region, x, places)
        loss_of(output).backward()
        return {"output": output, "gradient": x.grad}

    assert differing(told(plain), told(checkpoint)) == []
