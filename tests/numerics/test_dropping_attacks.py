"""What could make a remade tensor another than it was: each is refused when the graph is read, or
notices in the call, or comes out right all the same. Nothing is silently wrong."""

import random

import pytest
import torch
from recipe_tools import all_same, compiled, gradients, loss_of, roots_of, same, without_onednn
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from holdfast.activation._recipes.graph import saved_handle, saved_names
from holdfast.errors import RecomputationError


@pytest.fixture(autouse=True)
def _seeded():
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(3)
    yield
    torch.set_rng_state(state)


def leaf(*shape):
    return torch.randn(*shape or (16, 8), requires_grad=True)


def base_kinds(output, *alive):
    """The operations whose results would be dropped."""
    return {item.label for item in compiled(output, alive=alive).items}


def is_dropped(output):
    """Whether anything of the graph has been dropped."""
    nodes = compiled(output).graph.nodes
    handles = [saved_handle(e.node, name) for e in nodes for name in saved_names(e.node)]
    return any(not isinstance(each, tuple) and each.unpack_hook is not None for each in handles)


def check(call, leaves, *, other=None):
    """Compile ``call``, drop from ``other`` (or from it again): whether it was dropped. The
    gradients are those without in any case."""
    found = compiled(call(*leaves), alive=leaves)
    dropping = found.dropping()
    call = call if other is None else other
    expected = gradients(loss_of(call(*leaves)), leaves)
    output = call(*leaves)
    dropped = dropping.drop(roots_of(output))
    assert is_dropped(output) == (dropped and bool(found.items))
    assert all_same(gradients(loss_of(output), leaves), expected)
    return dropped


# What a node lacks


@pytest.mark.parametrize(
    ("label", "call"),
    [
        ("Add", lambda x: x.sin() + 1.0),
        ("Add", lambda x: x.sin() + torch.ones(8)),
        ("Sub", lambda x: x.sin() - 1.0),
        ("Rsub", lambda x: 1.0 - x.sin()),
        ("MaskedFill", lambda x: x.sin().masked_fill(x > 0, -1e9)),
        ("Threshold", lambda x: functional.threshold(x.sin(), 0.1, 20.0)),
        ("NanToNum", lambda x: x.sin().nan_to_num(3.0)),
        ("Where", lambda x: torch.where(x > 0, x.sin(), 0.5)),
        ("ConstantPadNd", lambda x: functional.pad(x.sin(), (1, 1), value=2.0)),
        ("Cat", lambda x: torch.cat([x.sin(), torch.ones(16, 8)])),
        ("Lerp", lambda x: torch.lerp(x.sin(), torch.ones(8), 0.3)),
        ("Addmm", lambda x: functional.linear(x.sin(), torch.ones(4, 8), torch.ones(4))),
        (
            "Convolution",
            lambda x: functional.conv1d(x.sin()[None], torch.ones(4, 16, 3), torch.ones(4)),
        ),
        (
            "NativeBatchNorm",
            lambda x: functional.batch_norm(
                x.sin(), None, None, torch.ones(8), torch.ones(8), training=True
            ),
        ),
        (
            "NativeGroupNorm",
            lambda x: functional.group_norm(x.sin(), 2, torch.ones(8), torch.ones(8)),
        ),
        ("NativeLayerNorm", lambda x: functional.layer_norm(x.sin(), (8,), eps=3.3e-4)),
        ("AsStrided", lambda x: x.sin().as_strided((4, 8), (8, 2), 3)),
        ("Sin", lambda x: x.sin().as_strided((4, 8), (8, 2), 3)),
    ],
)
def test_what_the_node_does_not_tell_is_kept(label, call):
    x = leaf()
    used = call(x).cos()
    # The sine's own result would be remade from x; only the operation after it must not be.
    assert label not in base_kinds(used, x)
    check(lambda x: call(x).cos(), [x])


def test_a_bias_that_was_there_is_told_from_one_that_was_not():
    x, weight, bias = leaf(2, 3, 9), leaf(4, 3, 3), leaf(4)
    frozen = bias.detach()
    without = functional.conv1d(x, weight).sin()
    assert "Convolution" in base_kinds(without, x, weight)
    dropping = compiled(without, alive=[x, weight]).dropping()
    assert not dropping.drop(roots_of(functional.conv1d(x, weight, frozen).sin()))
    assert not dropping.drop(roots_of(functional.conv1d(x, weight, bias).sin()))


def test_an_argument_that_was_left_out_and_now_is_not():
    x, weight, bias = leaf(), leaf(8), leaf(8)

    def norm(x, weight=None, bias=None):
        return functional.layer_norm(x, (8,), weight, bias).sin()

    dropping = compiled(norm(x), alive=[x]).dropping()
    assert dropping.drop(roots_of(norm(x)))
    assert not dropping.drop(roots_of(norm(x, weight)))
    assert not dropping.drop(roots_of(norm(x, None, bias)))
    assert not dropping.drop(roots_of(norm(x, weight.detach())))
    assert not dropping.drop(roots_of(norm(x, None, bias.detach())))


def test_an_argument_that_somebody_packed_was_not_left_out():
    x, weight = leaf(), torch.rand(8)
    output = functional.layer_norm(x, (8,), weight).sin()
    assert "NativeLayerNorm" in base_kinds(output, x, weight)
    handle = output.grad_fn.next_functions[0][0]._raw_saved_weight
    handle.register_hooks(lambda tensor: tensor, lambda tensor: tensor)
    assert "NativeLayerNorm" not in base_kinds(output, x, weight)


# Other calls


def test_another_operation():
    assert not check(lambda x: x.sin().tanh().cos(), [leaf()], other=lambda x: x.sin().exp().cos())


def test_the_same_operations_on_the_other_of_two_tensors():
    def call(x, y, *, swapped=False):
        one, two = x.neg(), y.neg()
        a, b = one.exp(), two.exp()
        return (b if swapped else a).sin() + a * b

    dropped = check(call, [leaf(), leaf()], other=lambda x, y: call(x, y, swapped=True))
    assert not dropped


def test_the_same_operations_on_the_other_output_of_one():
    def call(x, *, which=0):
        parts = x.neg().exp().chunk(2, 1)
        return parts[which].sin() + parts[0] * parts[1]

    assert not check(call, [leaf()], other=lambda x: call(x, which=1))


def test_what_nobody_saved_made_from_the_other_of_two():
    def call(x, y, *, swapped=False):
        a, b = x.exp(), y.exp()
        return (b if swapped else a).neg().sin() + a * b

    def parts(x, *, which=0):
        parts = x.neg().exp().chunk(2, 1)
        return parts[which].neg().sin() + parts[0] * parts[1]

    assert check(call, [leaf(), leaf()])
    assert not check(call, [leaf(), leaf()], other=lambda x, y: call(x, y, swapped=True))
    assert check(parts, [leaf()])
    assert not check(parts, [leaf()], other=lambda x: parts(x, which=1))


def test_the_operands_of_one_operation_swapped():
    def call(x, y, *, swapped=False):
        one, two = x.exp(), y.exp()
        difference = two - one if swapped else one - two
        return difference.sin()

    leaves = [leaf(), leaf()]
    assert check(call, leaves)
    check(call, leaves, other=lambda x, y: call(x, y, swapped=True))


def test_other_settings_are_read_from_the_call_itself():
    def call(x, dim, slope, shape):
        return functional.leaky_relu(x.softmax(dim), slope).view(shape).sin()

    x = leaf()
    first = lambda x: call(x, 0, 0.1, (8, 16))  # noqa: E731
    assert check(first, [x], other=lambda x: call(x, 1, 0.7, (4, 32)))


def test_what_needs_a_gradient_in_one_call_and_not_in_another():
    x, weight = leaf(), leaf(8, 8)

    def call(frozen):
        made = [x.sin(), weight.sin()]
        if frozen is not None:
            made[frozen] = made[frozen].detach()
        return (made[0] @ made[1]).cos()

    dropping = compiled(call(None), alive=[x, weight]).dropping()
    for frozen in (0, 1):
        expected = gradients(loss_of(call(frozen)), [x, weight])
        output = call(frozen)
        dropping.drop(roots_of(output))
        assert all_same(gradients(loss_of(output), [x, weight]), expected)


def test_a_graph_that_is_freed_is_left_alone():
    x = leaf()
    output = x.exp().sin()
    dropping = compiled(output, alive=[x]).dropping()
    output.sum().backward()
    assert not dropping.drop(roots_of(output))
    assert not compiled(output, alive=[x]).items


# Memory written to


def test_a_write_under_no_grad_that_no_operation_accounts_for():
    def call(x, weight):
        made = functional.linear(x, weight)
        with torch.no_grad():
            made.clamp_(min=0)
        return made.sin()

    leaves = [leaf(), leaf(4, 8)]
    assert "Mm" not in base_kinds(call(*leaves), *leaves)
    check(call, leaves)


def test_a_write_through_detach():
    def call(x):
        made = torch.maximum(x.neg(), x)
        made.detach().mul_(2)
        return made.cos()

    x = leaf()
    assert "Maximum" not in base_kinds(call(x), x)
    check(call, [x])


def test_a_write_that_only_a_later_call_makes():
    def call(x, *, writes=False):
        made = x.neg().abs()
        if writes:
            with torch.no_grad():
                made.add_(1)
        return made.cos()

    assert not check(call, [leaf()], other=lambda x: call(x, writes=True))


def test_writes_that_operations_account_for():
    def call(x, y):
        made = functional.linear(x, torch.ones(8, 8))
        made += y
        made *= 0.5
        made.relu_()
        return made.cos() * y.exp_() if y.grad_fn else made.cos()

    x, y = leaf(), leaf()
    assert "Relu" in base_kinds(call(x, y.neg()), x, y)
    assert check(lambda x, y: call(x, y.neg()), [x, y])


def test_a_write_into_part_of_a_tensor():
    def call(x):
        made = x.neg().exp()
        made = made * 2
        made[:, :3] = x[:, 3:6].sin()
        made[2].mul_(3)
        return made.cos()

    x = leaf()
    assert "Mul" not in base_kinds(call(x), x)
    check(call, [x])


def test_a_write_that_rounds():
    """In place, the sum of a float and a double is a float."""

    def call(x, y):
        made = x * 3
        made += y.double() * (1 / 3)
        return made.to(torch.bfloat16).float().sin() + made.cos()

    assert check(call, [leaf(), leaf()])


def test_a_write_into_another_layout():
    def call(x, y):
        made = x.t() * 3
        made += y.neg()
        return made.cos()

    check(call, [leaf(16, 8), leaf(8, 16)])


def test_what_was_dropped_may_be_written_to_afterwards():
    x = leaf()
    expected = gradients(x.neg().exp().sin().sum(), [x])
    made = x.neg().exp()
    output = made.sin()
    assert compiled(output, alive=[x]).dropping().drop(roots_of(output))
    with torch.no_grad():
        made.zero_()
    assert all_same(gradients(output.sum(), [x]), expected)


def test_what_it_is_made_from_must_not_be():
    x = leaf()
    made = x.neg()
    output = functional.gelu(made).sin()
    dropping = compiled(output, alive=[x, made]).dropping()
    assert dropping.drop(roots_of(output))
    with torch.no_grad():
        made.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_nor_what_it_is_made_from_and_held():
    x = leaf(1, 2, 16, 8)
    query = x.neg()
    output = functional.scaled_dot_product_attention(query, query.detach(), query.detach()).sin()
    dropping = compiled(output, alive=[x, query]).dropping()
    assert dropping.drop(roots_of(output))
    with torch.no_grad():
        query.zero_()
    with pytest.raises((RuntimeError, RecomputationError), match="place"):
        output.sum().backward()


def test_nor_where_torch_would_not_look():
    """The attention itself is not differentiated, so its node never asks for its query."""
    x, weight = leaf(1, 2, 16, 8), leaf(8, 8)
    query = x.neg()
    mixed = functional.scaled_dot_product_attention(query, query.detach(), query.detach())
    output = (mixed @ weight).sum()
    assert compiled(output, alive=[x, query, weight]).dropping().drop(roots_of(output))
    with torch.no_grad():
        query.zero_()
    with pytest.raises(RecomputationError, match="changed in place"):
        gradients(output, [weight])


def test_a_tensor_that_is_given_other_memory_by_set():
    def call(x, *, sets=False):
        made = x.neg().abs()
        if sets:
            with torch.no_grad():
                made.set_(made.detach().clone() + 1)
        return made.cos()

    x = leaf()
    assert not compiled(call(x), alive=[x]).dropping().drop(roots_of(call(x, sets=True)))


# Parameters


def _changed_by_sgd(parameters):
    torch.optim.SGD(parameters, 0.1).step()


def _changed_by_fused_adam(parameters):
    torch.optim.Adam(parameters, 0.1, fused=True).step()


def _given_other_memory(parameters):
    for each in parameters:
        each.data = each.data + 1


@pytest.mark.parametrize("change", [_changed_by_sgd, _changed_by_fused_adam, _given_other_memory])
@pytest.mark.parametrize("which", ["weight", "bias"])
def test_a_parameter_that_changes_between_forward_and_backward(change, which):
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), leaf() * 1
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    output = model(x).sin()
    dropping = compiled(output, [x], list(model.parameters())).dropping()
    assert dropping.drop(roots_of(output))
    change([getattr(model[0], which)])
    with pytest.raises(
        (RecomputationError, RuntimeError), match=r"chang|other memory|modified by an inplace"
    ):
        loss_of(output).backward()
    assert torch.is_grad_enabled()


def test_parameters_that_nothing_is_remade_from_may_change():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), leaf() * 1
    model[2].bias.grad = torch.ones(8)
    output = model(x)
    dropping = compiled(output, [x], list(model.parameters())).dropping()
    assert dropping.drop(roots_of(output))
    _changed_by_fused_adam([model[2].bias])
    loss_of(output).backward()


def test_running_statistics_that_a_later_forward_moves():
    norm, x = nn.BatchNorm1d(8), leaf()
    norm(x)
    norm.eval()
    leaves = [x, *norm.parameters()]
    expected = gradients(loss_of(norm(x).sin()), leaves)
    output = norm(x).sin()
    found = compiled(output, alive=leaves)
    assert "NativeBatchNorm" in {item.label for item in found.items}
    before = output.grad_fn._saved_self.clone()
    assert found.dropping().drop(roots_of(output))
    norm.train()
    norm(x * 5 + 1)
    assert same(output.grad_fn._saved_self, before)
    assert same(gradients(loss_of(output), leaves)[2], expected[2])  # of the bias


# Epsilons


@pytest.mark.parametrize("epsilon", [1e-6, 1e-3, 5e-2, 0.0])
def test_another_epsilon_than_the_one_that_was_found(epsilon):
    norm = lambda x, eps=1e-5: functional.layer_norm(x, (8,), eps=eps).sin()  # noqa: E731
    assert check(norm, [leaf()], other=lambda x: norm(x, epsilon))


def test_an_epsilon_that_nobody_uses_is_an_error_not_a_guess():
    x = leaf()
    norm = lambda eps: functional.layer_norm(x, (8,), eps=eps).sin()  # noqa: E731
    dropping = compiled(norm(1e-5), alive=[x]).dropping("the norm")
    output = norm(3.3e-4)
    assert dropping.drop(roots_of(output))
    with pytest.raises(RecomputationError, match="the norm") as caught:
        output.sum().backward()
    assert caught.value.layer_id == "the norm"
    assert torch.is_grad_enabled()


# Masks


@pytest.mark.parametrize(
    "mask",
    [
        [0.0, 0.5, 1.0],
        [-0.0, 1.0],
        [0.0, -0.0, 1.0],
        [0.0, float("nan")],
        [0.0, float("nan"), 1.0],
        [-1.0, 0.0],
        [-1.0, 0.0, 1.0],
        [0.0],
        [2.0],
        [float("inf"), 0.0],
        [1e-42, 0.0],
    ],
)
def test_a_mask_of_other_values_in_a_later_call(mask):
    values = torch.tensor(mask).repeat(128)[:128].view(16, 8)
    usual = torch.tensor([0.0, 2.0]).repeat(64).view(16, 8)
    x = leaf()
    assert "mask" in base_kinds((x.sin() * usual).cos(), x)
    call = lambda x, mask=usual: (x.sin() * mask).cos()  # noqa: E731
    found = compiled(call(x), alive=[x]).dropping()
    expected = gradients(loss_of(call(x, values)), [x])
    output = call(x, values)
    assert found.drop(roots_of(output))
    assert same(output.grad_fn.next_functions[0][0]._saved_other, values)
    assert all_same(gradients(loss_of(output), [x]), expected)


def test_a_mask_of_another_layout():
    mask = lambda *shape: (torch.rand(shape) > 0.5).float()  # noqa: E731
    x = leaf()

    def twice(x, one, other):
        return (x.sin() * one).cos() * other

    usual = mask(16, 8)
    dropping = compiled(twice(x, usual, usual), alive=[x]).dropping()
    for pair in ((usual, mask(16, 8)), (usual, usual.t().contiguous().t())):
        expected = gradients(loss_of(twice(x, *pair)), [x])
        output = twice(x, *pair)
        assert dropping.drop(roots_of(output))
        assert all_same(gradients(loss_of(output), [x]), expected)
    masks = [mask(8, 16).t(), mask(16, 1), mask(8), mask(16, 16)[:, ::2], mask(1, 1).expand(16, 8)]
    for each in masks:
        call = lambda x, each=each: (x.sin() * each).cos()  # noqa: E731
        check(call, [x])
        check(lambda x: (x.sin() * mask(16, 8)).cos(), [x], other=call)


# Memory formats


def test_a_copy_in_another_format_than_before():
    def call(x, *, form=torch.contiguous_format, transposed=False):
        made = x.neg().permute(0, 2, 3, 1) if transposed else x.neg()
        copied = made.clone(memory_format=form)
        return copied.sin() + copied.flatten(1, 2).cos().sum()

    x = leaf(2, 4, 4, 4)
    forms = (torch.contiguous_format, torch.preserve_format, torch.channels_last)
    for first in forms:
        for then in forms:
            check(lambda x, f=first: call(x, form=f), [x], other=lambda x, t=then: call(x, form=t))
            check(
                lambda x, f=first: call(x, form=f, transposed=True),
                [x],
                other=lambda x, t=then: call(x, form=t, transposed=True),
            )


def test_a_copy_that_nobody_saved_is_not_guessed():
    x, y = leaf(8, 8), leaf(8, 8)
    assert "Add" not in base_kinds((x.neg().t().clone() + y).sin(), x, y)
    assert "Add" in base_kinds((x.neg().t() + y).sin(), x, y)
    assert "Add" in base_kinds((x.neg().t().reshape(64) + y.view(64)).sin(), x, y)  # contiguous


def test_inputs_in_another_layout_than_before():
    def call(x, y):
        made = (x * y).exp() + x
        return functional.gelu(made).clone().sin() + made.t().reshape(-1)[0]

    plain = [leaf(), leaf()]
    dropping = compiled(call(*plain), alive=plain).dropping()
    for lay in (
        lambda t: t.detach().t().contiguous().t(),
        lambda t: t.detach().repeat_interleave(2, 1)[:, ::2],
    ):
        leaves = [lay(each).requires_grad_() for each in plain]
        for given in (leaves, [leaves[0], plain[1]], [plain[0], leaves[1]]):
            expected = gradients(loss_of(call(*given)), given)
            output = call(*given)
            dropping.drop(roots_of(output))
            assert all_same(gradients(loss_of(output), given), expected)


# Surroundings that decide the last bits


def _adds_up(x, weight):
    made = (x @ weight).exp()
    return (made * made.sum() + made.mean(0)).softmax(-1).sin()


def test_other_surroundings_in_backward():
    leaves = [leaf(300, 200), leaf(200, 100)]
    threads = torch.get_num_threads()
    expected = gradients(loss_of(_adds_up(*leaves)), leaves)
    output = _adds_up(*leaves)
    before = {number: tensor.clone() for number, tensor in enumerate(_all_saved(output))}
    assert compiled(output, alive=leaves).dropping().drop(roots_of(output))
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        changed = torch.get_num_threads()
        torch._C._set_mkldnn_enabled(False)
        torch.use_deterministic_algorithms(True)
        torch.set_default_dtype(torch.float64)
        after = dict(enumerate(_all_saved(output)))
        assert after.keys() == before.keys()
        assert all(same(after[number], before[number]) for number in before)
        assert torch.get_num_threads() == changed
        assert not torch._C._get_mkldnn_enabled()
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.set_num_threads(threads)
        torch._C._set_mkldnn_enabled(True)
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)
    assert all_same(gradients(loss_of(output), leaves), expected)


def test_precisions_that_torch_calls_mixed():
    before = torch.backends.mkldnn.matmul.fp32_precision
    seen = []

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.exp.default:
                seen.append(torch.backends.mkldnn.matmul.fp32_precision)
            return func(*args, **(kwargs or {}))

    try:
        torch.backends.mkldnn.matmul.fp32_precision = "ieee"
        x = leaf()
        output = x.neg().exp().sin()
        assert compiled(output, alive=[x]).dropping().drop(roots_of(output))
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        with Seeing():
            output.sum().backward()
        assert seen == ["ieee"]
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before


def _all_saved(output):
    for entry in compiled(output).graph.nodes:
        for name in saved_names(entry.node):
            if saved_handle(entry.node, name).data is not None:
                yield getattr(entry.node, f"_saved_{name}")


def test_small_numbers_taken_for_zero_in_one_pass_only():
    x = torch.full((16, 8), 1e-20, requires_grad=True)
    call = lambda x: (x.neg() * x).mul(4.0).sin()  # noqa: E731
    for forward, backward in ((True, False), (False, True)):
        output = None
        try:
            if not torch.set_flush_denormal(forward):
                pytest.skip("this machine cannot")
            output = call(x)
            before = output.grad_fn._saved_self.clone()
            assert compiled(output, alive=[x]).dropping().drop(roots_of(output))
            torch.set_flush_denormal(backward)
            assert same(output.grad_fn._saved_self, before)
        finally:
            torch.set_flush_denormal(False)


def test_what_was_remade_in_inference_mode_is_an_ordinary_tensor():
    x = leaf()
    made = x.neg().exp()
    one, other = made.sin(), made.cos()
    assert compiled([one, other], alive=[x]).dropping().drop(roots_of([one, other]))
    total = one.sum()
    with torch.inference_mode():
        gradients(total, [made], retain_graph=True)  # remade, and kept for the other
    (slope,) = gradients(other.sum(), [x], create_graph=True)
    (got,) = gradients(slope.sum(), [x])
    (slope,) = gradients(x.neg().exp().cos().sum(), [x], create_graph=True)
    assert same(got, gradients(slope.sum(), [x])[0])


# What has no node of torch's own


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2 * ctx.saved_tensors[0].sign()


def test_a_function_of_somebody_elses_in_the_middle():
    def call(x):
        return _Doubled.apply(functional.gelu(x.sin())).tanh().cos()

    x = leaf()
    assert check(call, [x])
    assert "_Doubled" not in base_kinds(call(x), x)


def test_a_checkpointed_part_is_neither_read_nor_dropped():
    calls = []

    def part(x):
        calls.append(1)
        return x.exp().sin()

    def call(x):
        return functional.gelu(checkpoint(part, x.neg(), use_reentrant=False)).sin()

    x = leaf()
    output = call(x)
    found = compiled(output, alive=[x])
    assert "Gelu" in {item.label for item in found.items}
    assert len(calls) == 1
    calls.clear()
    assert check(call, [x])
    assert len(calls) == 5  # three forwards, and two backwards


def test_tensors_of_other_kinds_are_kept():
    class Other(torch.Tensor):
        pass

    check(lambda x: x.neg().exp().as_subclass(Other).sin(), [leaf()])
    check(lambda x: x.neg().as_subclass(Other).exp().sin(), [leaf()])


def test_an_error_in_backward_leaves_everything_as_it_was():
    x = leaf()
    made = x.neg()
    output = functional.gelu(made).sin()
    assert compiled(output, alive=[x, made]).dropping().drop(roots_of(output))
    version = made._version
    with torch.no_grad():
        made.add_(0)
    assert made._version != version
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()
        assert torch.is_autocast_enabled("cpu")
        assert torch.is_grad_enabled()


# Anything

_OPERATIONS = [
    lambda r, a, b: a + b,
    lambda r, a, b: a * b,
    lambda r, a, b: a - b * 0.5,
    lambda r, a, b: (a * 1).add_(b),
    lambda r, a, b: (a + b).relu_(),
    lambda r, a, b: functional.gelu(a),
    lambda r, a, b: functional.silu(a) * b,
    lambda r, a, b: a.tanh(),
    lambda r, a, b: a.softmax(r.choice([0, 1])),
    lambda r, a, b: functional.layer_norm(a, (8,), eps=r.choice([1e-5, 1e-6])),
    lambda r, a, b: functional.batch_norm(a, None, None, training=True),
    lambda r, a, b: a @ b.t() @ a * 0.1,
    lambda r, a, b: functional.dropout(a, 0.3),
    lambda r, a, b: torch.cat([a[:, 4:], -b[:, :4]], 1),
    lambda r, a, b: a.t().contiguous().t(),
    lambda r, a, b: a.reshape(4, 16).t().reshape(8, 8),
    lambda r, a, b: a.view(2, 4, 8).transpose(0, 1).flatten(0, 1),
    lambda r, a, b: a.unbind(0)[2] + b,
    lambda r, a, b: torch.stack(a.chunk(2, 1), 0).sum(0).repeat(1, 2),
    lambda r, a, b: a.double().float() * 2,
    lambda r, a, b: a.bfloat16().to(a.dtype),
    lambda r, a, b: torch.where(a > b, a, b),
    lambda r, a, b: a / (1 + b * b),
    lambda r, a, b: a.clone().exp_().clamp(max=3),
    lambda r, a, b: a * a.mean(-1, keepdim=True),
    lambda r, a, b: a[None].expand(3, 8, 8).sum(0).sin(),
    lambda r, a, b: functional.linear(a, b, b[0]).sigmoid(),
    lambda r, a, b: torch.maximum(a, b).cos(),
    lambda r, a, b: a.detach() * b,
]


def random_call(seed):
    """A call of a dozen operations on what came before, with one to three results."""

    def call(*leaves):
        choice = random.Random(seed)
        torch.default_generator.manual_seed(seed)
        made = list(leaves)
        for _ in range(12):
            operation = choice.choice(_OPERATIONS)
            made.append(operation(choice, choice.choice(made[-5:]), choice.choice(made)))
        return [each for each in made[-choice.randint(1, 3) :] if each.grad_fn is not None]

    return call


@pytest.mark.parametrize("seed", range(40))
def test_calls_of_any_operations(seed):
    call, leaves = random_call(seed), [leaf(8, 8), leaf(8, 8)]
    if call(*leaves):
        found = compiled(call(*leaves), alive=leaves)
        with without_onednn() if seed % 2 else torch.enable_grad():
            assert check(call, leaves) or not found.items
