"""Torch's contexts that choose what is recomputed work around our regions as around torch's."""

import functools
import gc
import weakref

import pytest
import torch
from activation_tools import checked, grads, keeping, three
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from holdfast.activation import checkpoint
from holdfast.errors import RecomputationError


@pytest.fixture(autouse=True)
def _seeded():
    state = torch.get_rng_state()
    torch.manual_seed(3)
    yield
    torch.set_rng_state(state)


aten = torch.ops.aten


def test_selected_operations_are_not_run_again():
    x, y = (torch.randn(16, 16, requires_grad=True) for _ in range(2))

    def region(x, y):
        return torch.mm(x.cos(), y).sin().sum()

    def flops(**keywords):
        output = checkpoint(region, x, y, **keywords)
        with FlopCounterMode(display=False) as counter:
            got = torch.autograd.grad(output, (x, y))
        return counter.get_total_flops() / (2 * 16**3), got

    def by_policy(ctx, op, *args, **kwargs):
        mm = op is aten.mm.default
        return CheckpointPolicy.MUST_SAVE if mm else CheckpointPolicy.PREFER_RECOMPUTE

    def by_bool(ctx, op, *args, **kwargs):
        return op is aten.mm.default

    expected = grads(region, x, y)
    everything, got = flops()
    assert everything == 3.0
    assert all(map(torch.equal, got, expected))
    for policy in ([aten.mm.default], by_policy, by_bool):
        context_fn = functools.partial(create_selective_checkpoint_contexts, policy)
        selected, got = flops(context_fn=context_fn)
        assert selected == 2.0
        assert all(map(torch.equal, got, expected))


def test_selected_outputs_of_types_without_gradients():
    x, y = torch.tensor([1, 2, 3]), torch.randn(3, requires_grad=True)

    def region(x, y):
        return x.view(-1), y.sin().cos()

    output = checkpoint(region, x, y, context_fn=keeping(aten.view.default))
    assert torch.equal(
        torch.autograd.grad(output[1].sum(), y)[0],
        torch.autograd.grad(y.sin().cos().sum(), y)[0],
    )


def test_a_selection_with_two_outputs():
    x = torch.randn(3, requires_grad=True)
    asked = []

    def policy(ctx, op, *args, **kwargs):
        asked.append(op)
        return op is aten.var_mean.correction

    def region(x):
        variance, mean = torch.var_mean(x)
        return variance * mean

    context_fn = functools.partial(create_selective_checkpoint_contexts, policy)
    assert torch.equal(grads(checked(region, context_fn=context_fn), x)[0], grads(region, x)[0])
    assert aten.var_mean.correction in asked


def test_a_selection_of_an_operation_that_gives_more_than_tensors():
    with torch.library._scoped_library("holdfast_tests", "FRAGMENT"):
        runs = []

        @torch.library.custom_op("holdfast_tests::sin_and_two", mutates_args=())
        def sin_and_two(x: torch.Tensor) -> tuple[torch.Tensor, int]:
            runs.append("run")
            return x.sin(), 2

        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        def backward(ctx, gradient, _):
            return gradient * ctx.saved_tensors[0].cos()

        sin_and_two.register_autograd(backward, setup_context=setup_context)

        def region(x):
            return (sin_and_two(x)[0] * x.sin().exp()).sin()

        x = torch.randn(3, requires_grad=True)
        op = torch.ops.holdfast_tests.sin_and_two.default
        got = grads(checked(region, context_fn=keeping(op)), x)
        assert runs == ["run"]
        assert torch.equal(got[0], grads(region, x)[0])


def test_a_selection_allows_one_backward():
    x = torch.randn(3, requires_grad=True)
    output = checkpoint(lambda x: x.sin().cos().exp(), x, context_fn=keeping(aten.sin.default))
    output.sum().backward(retain_graph=True)
    with pytest.raises(Exception, match="extra time") as caught:
        output.sum().backward()
    assert isinstance(caught.value, RuntimeError | RecomputationError)


def test_a_selected_tensor_that_is_written_over_is_an_error_unless_allowed():
    def region(x):
        return x.sin().mul_(2).cos().exp()

    x = torch.randn(3, requires_grad=True)
    refused = checkpoint(region, x, context_fn=keeping(aten.sin.default))
    with pytest.raises(Exception, match="mutated") as caught:
        refused.sum().backward()
    assert isinstance(caught.value, RuntimeError | RecomputationError)
    allowed = keeping(aten.sin.default, allow_cache_entry_mutation=True)
    checkpoint(region, x, context_fn=allowed).sum().backward()
    assert x.grad is not None


def test_a_policy_keeps_its_state():
    asked = []

    class Policy:
        def __call__(self, ctx, op, *args, **kwargs):
            asked.append(op)
            return CheckpointPolicy.PREFER_RECOMPUTE

    x = torch.randn(3, requires_grad=True)
    context_fn = functools.partial(create_selective_checkpoint_contexts, Policy())
    got = grads(checked(three, context_fn=context_fn), x)
    assert [op for op in asked if op is not aten.detach.default] == [
        aten.sin.default,
        aten.exp.default,
        aten.sin.default,
    ]
    assert torch.equal(got[0], grads(three, x)[0])


@pytest.mark.parametrize("after", ["the graph", "a backward"])
def test_selected_tensors_die_without_the_collector(after):
    kept = []

    def region(x):
        output = x.cos().exp()
        mode = _get_current_dispatch_mode()
        if not kept:
            (entry,) = mode.storage[aten.exp.default].values()
            assert not entry.val.requires_grad
            kept.append(weakref.ref(entry.val))
        return output.sin()

    def everything(*_, **__):
        return CheckpointPolicy.MUST_SAVE

    gc.disable()
    try:
        x = torch.randn(3, requires_grad=True)
        context_fn = functools.partial(create_selective_checkpoint_contexts, everything)
        output = checkpoint(region, x, context_fn=context_fn)
        assert kept[0]() is not None
        if after == "the graph":
            del output
        else:
            output.sum().backward(retain_graph=True)
        assert kept[0]() is None
    finally:
        gc.enable()
