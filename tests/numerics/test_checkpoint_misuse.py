"""Words `checkpoint` does not know are refused before anything runs, and warnings come once."""

import functools
import random
import sys
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.activation import CheckpointManager, checkpoint
from holdfast.errors import CheckpointError, ClosedError, RecomputationError

REFUSED = {
    "reentrant": ({"use_reentrant": True}, "use_reentrant"),
    "unknown check of determinism": ({"determinism_check": "sometimes"}, "determinism_check"),
    "unknown check of changes": ({"check": "hope"}, "check"),
    "no check at all": ({"check": None}, "check"),
    "a module that is none": ({"modules": [3]}, "modules"),
    "a generator that is none": ({"generators": [42]}, "generators"),
    "a generator of the system": ({"generators": [random.SystemRandom()]}, "generators"),
    "a class of generators": ({"generators": [np.random.Generator]}, "generators"),
    "keep is no function": ({"keep": 3}, "keep"),
    "an empty name": ({"name": ""}, "name"),
    "a blank name": ({"name": "  "}, "name"),
    "a name that is no text": ({"name": 3}, "name"),
    "a manager that is none": ({"manager": "disk"}, "manager"),
    "debug with contexts": (
        {"debug": True, "context_fn": lambda: (None, None)},
        "debug",
    ),
}


@pytest.fixture
def x():
    return torch.randn(3, requires_grad=True)


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("gradients", [True, False])
def test_what_makes_no_sense_is_refused_before_the_region_runs(x, case, gradients):
    words, named = REFUSED[case]
    ran = []

    def region(x):
        ran.append("ran")
        return x.sin()

    with torch.set_grad_enabled(gradients), pytest.raises((ValueError, TypeError), match=named):
        checkpoint(region, x, **words)
    assert ran == []


def test_a_function_that_is_none_is_refused(x):
    with pytest.raises(
        TypeError, match=r"fn must be a function, not Tensor.*checkpoint\(block, x\)"
    ):
        checkpoint(x, x)


def test_a_closed_manager_is_refused(x):
    manager = CheckpointManager()
    manager.close()
    with pytest.raises(ClosedError):
        checkpoint(lambda x: x.exp().sin(), x, manager=manager).sum().backward()


def test_a_manager_closed_before_backward_says_so_or_the_gradient_is_right(x):
    manager = CheckpointManager()
    output = checkpoint(lambda x: x.exp().sin(), x, manager=manager)
    manager.close()
    try:
        output.sum().backward()
    except CheckpointError:
        assert x.grad is None
    else:
        assert torch.equal(x.grad, torch.autograd.grad(x.exp().sin().sum(), x)[0])


def test_a_word_of_ours_that_the_region_needs_goes_through_a_partial(x):
    def region(x, name, check):
        return (x.exp() * len(name) * check).sin()

    output = checkpoint(functools.partial(region, name="four", check=2), x, name="region")
    output.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(region(x, "four", 2).sum(), x)[0])


def test_words_the_region_does_not_know_are_the_regions_error(x):
    with pytest.raises(TypeError, match="unknown_word"):
        checkpoint(lambda x: x, x, unknown_word=1)


def test_a_context_fn_that_gives_no_pair_is_refused(x):
    with pytest.raises((ValueError, TypeError)):
        checkpoint(lambda x: x.exp().sin(), x, context_fn=lambda: 3)


def test_keep_that_raises_leaves_its_own_error(x):
    def keep(tensor):
        raise KeyError("which one?")

    with pytest.raises(KeyError, match="which one"):
        checkpoint(lambda x: x.exp().sin(), x, keep=keep)
    checkpoint(lambda x: x.exp().sin(), x).sum().backward()


def test_iterators_are_read_once(x):
    generator = torch.Generator().manual_seed(3)
    drop = nn.Linear(3, 3)

    def region(x):
        return (drop(x) * torch.rand(3, generator=generator)).sin()

    start = generator.get_state()
    expected = torch.autograd.grad(region(x).sum(), x)
    generator.set_state(start)
    output = checkpoint(region, x, modules=iter([drop]), generators=iter([generator]))
    assert torch.equal(torch.autograd.grad(output.sum(), x)[0], expected[0])


_hidden = nn.Linear(3, 3)


def _uses_the_hidden(x):
    return vars(sys.modules[__name__])["_hid" + "den"](x).sin()


def test_a_parameter_of_no_known_module_is_warned_of_once(x):
    with pytest.warns(UserWarning, match="modules=") as told:
        checkpoint(_uses_the_hidden, x)
    assert told[0].filename == __file__
    assert "_uses_the_hidden" in str(told[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint(_uses_the_hidden, x)
        checkpoint(_uses_the_hidden, x, modules=[_hidden])


@pytest.mark.filterwarnings("ignore:.*modules=")
@pytest.mark.parametrize("check", ["version", "digest"])
def test_a_parameter_of_no_known_module_gets_its_gradient(x, check):
    expected = torch.autograd.grad(_uses_the_hidden(x).sum(), [x, *_hidden.parameters()])
    output = checkpoint(_uses_the_hidden, x, check=check)
    got = torch.autograd.grad(output.sum(), [x, *_hidden.parameters()])
    assert all(map(torch.equal, got, expected))


@pytest.mark.filterwarnings("ignore:.*modules=")
def test_a_parameter_of_no_known_module_is_watched_all_the_same(x):
    loss = checkpoint(_uses_the_hidden, x).sum()
    with torch.no_grad():
        _hidden.weight.add_(1)
    with pytest.raises(RecomputationError, match="changed"):
        loss.backward()


def test_names_in_errors_default_to_the_functions(x):
    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            return self.linear(x.exp()).sin()

        def half(self, x):
            return self.linear(x.exp()).sin()

    decoder = Decoder()
    for region, name in (
        (decoder, "Decoder"),
        (decoder.half, "Decoder.half"),
        (functools.partial(decoder.half), "Decoder.half"),
        (decoder.forward, "Decoder"),
    ):
        loss = checkpoint(region, x).sum()
        with torch.no_grad():
            decoder.linear.weight.add_(1)
        with pytest.raises(RecomputationError) as caught:
            loss.backward()
        assert caught.value.layer_id == name


def test_it_is_also_at_the_top():
    import holdfast

    assert holdfast.checkpoint is checkpoint
