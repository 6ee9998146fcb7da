"""Around a region: contexts, autocast, devices, hooks, errors, other tensors, threads, compilers.

The replay sees what the forward saw, and whatever stands around it sees the region as it would
torch's own.
"""

import contextlib
import threading

import pytest
import torch
from activation_tools import Watching, checked, grads, keeping, right_or_refused, three
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

from holdfast.activation import checkpoint
from holdfast.errors import RecomputationError

aten = torch.ops.aten


def two(x):
    return x.sin().exp()


@pytest.fixture(autouse=True)
def _seeded():
    state = torch.get_rng_state()
    torch.manual_seed(3)
    yield
    torch.set_rng_state(state)


def test_forward_and_replay_run_under_their_contexts():
    forward, replay = Watching(), Watching()
    x = torch.ones(2, requires_grad=True)
    output = checkpoint(two, x, context_fn=lambda: (forward, replay))
    assert [n for n in forward.names if "detach" not in n] == ["sin.default", "exp.default"]
    assert replay.names == []
    output.sum().backward()
    assert [n for n in replay.names if "detach" not in n][:2] == ["sin.default", "exp.default"]
    assert len([n for n in forward.names if "detach" not in n]) == 2


def test_contexts_are_entered_for_each_replay_and_left_on_errors():
    entered, left = [], []

    class Noting:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            entered.append(self.name)

        def __exit__(self, *_):
            left.append(self.name)

    x = torch.ones(2, requires_grad=True)
    output = checkpoint(three, x, context_fn=lambda: (Noting("forward"), Noting("replay"))).sum()
    output.backward(retain_graph=True)
    output.backward()
    assert entered == left == ["forward", "replay", "replay"]
    with pytest.raises(ZeroDivisionError):
        checkpoint(lambda x: x / (1 // 0), x, context_fn=lambda: (Noting("f"), Noting("r")))
    assert entered == left == ["forward", "replay", "replay", "f"]


def test_a_context_that_swallows_the_error_of_a_forward_is_refused():
    def region(x):
        raise ValueError(x)

    with pytest.raises((RuntimeError, RecomputationError), match="context_fn"):
        checkpoint(
            region,
            torch.ones(1, requires_grad=True),
            context_fn=lambda: (contextlib.suppress(ValueError), contextlib.nullcontext()),
        )


@pytest.mark.parametrize("enabled", [True, False])
def test_the_replay_runs_under_the_autocast_of_the_forward(enabled):
    seen = []

    def region(x, y):
        product = torch.mm(x, y)
        seen.append(product.dtype)
        return torch.mm(product, y)

    torch._C._set_mkldnn_enabled(False)  # AMX may be told of and then not be allowed
    try:
        x, y = (torch.randn(3, 3, requires_grad=True) for _ in range(2))
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            output = checkpoint(region, x, y)
        output.float().sum().backward()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            plain = region(x, y)
        assert all(map(torch.equal, (x.grad, y.grad), torch.autograd.grad(plain.sum(), (x, y))))
    finally:
        torch._C._set_mkldnn_enabled(True)
    assert len(set(seen)) == 1
    assert seen[0] is (torch.bfloat16 if enabled else torch.float32)


def test_a_forward_without_autocast_is_replayed_without():
    seen = []

    def region(x):
        seen.append(torch.is_autocast_enabled("cpu"))
        return torch.mm(x, x).sin()

    x = torch.randn(3, 3, requires_grad=True)
    output = checkpoint(region, x)
    with torch.autocast("cpu", torch.bfloat16):
        output.sum().backward()
        assert torch.is_autocast_enabled("cpu")
    assert seen == [False, False]


def test_the_replay_runs_on_the_default_device_of_the_forward():
    def region(x):
        return (x * torch.ones(3, device=None)).sin() * torch.full((3,), 2.0)

    x = torch.randn(3, requires_grad=True)
    with torch.device("cpu"):
        output = checkpoint(region, x)
    with torch.device("meta"):
        output.sum().backward()
        assert torch.ones(1).device.type == "meta"
    assert torch.equal(x.grad, torch.autograd.grad(region(x).sum(), x)[0])


def test_a_default_dtype_of_the_forward_is_not_lost():
    def region(x):
        return (x * torch.ones(3)).sin()

    x = torch.randn(3, requires_grad=True)
    output = checkpoint(region, x, determinism_check="default")
    torch.set_default_dtype(torch.float64)
    try:
        with contextlib.suppress(RecomputationError):
            output.sum().backward()
            assert torch.equal(x.grad, torch.autograd.grad(x.sin().sum(), x)[0])
    finally:
        torch.set_default_dtype(torch.float32)


def test_what_decides_the_last_bits_is_in_the_replay_as_it_was():
    def now():
        precision = torch.backends.mkldnn.matmul.fp32_precision
        return torch.get_num_threads(), precision, torch.are_deterministic_algorithms_enabled()

    seen = []

    def noting(x):
        seen.append(now())
        return two(x)

    threads, precision, _ = before = now()
    try:
        torch.set_num_threads(threads + 1)
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # torch calls this mixed, and raises
        torch.use_deterministic_algorithms(True)
        output = checkpoint(noting, torch.ones(2, requires_grad=True))
        torch.set_num_threads(threads)
        torch.backends.mkldnn.matmul.fp32_precision = precision
        torch.use_deterministic_algorithms(False)
        output.sum().backward()
        assert now() == before
    finally:
        torch.set_num_threads(threads)
        torch.backends.mkldnn.matmul.fp32_precision = precision
        torch.use_deterministic_algorithms(False)
    assert seen == [(threads + 1, "bf16", True)] * 2


@pytest.mark.parametrize("level", [1, 2])
def test_hooks_around_the_region_see_what_it_keeps(level):
    """An offload around a checkpoint offloads the region's inputs, wherever they stand."""
    packed = []

    def pack(tensor):
        packed.append(tensor.detach().clone())
        return tensor

    x, y, z = (torch.randn(3, requires_grad=True) for _ in range(3))
    inputs = [x * 1, y * 1, z * 1]  # a leaf is kept by the graph already

    def region(a, others, *, c):
        return (a.exp() * others[0].sin() * c.cos()).sin()

    wrap = checked(region) if level == 1 else checked(checked(region))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = wrap(inputs[0], [inputs[1]], c=inputs[2])
    for tensor in inputs:
        assert any(torch.equal(tensor, other) for other in packed)
    output.sum().backward()
    expected = torch.autograd.grad(region(x, [y], c=z).sum(), (x, y, z))
    assert all(map(torch.equal, (x.grad, y.grad, z.grad), expected))


def test_inputs_moved_away_by_hooks_around_the_region_come_back():
    x = torch.randn(3, requires_grad=True)
    y = x * 2
    with torch.autograd.graph.save_on_cpu():
        output = checkpoint(lambda both: (both[0] * both[1]).exp(), [y, y.sin()])
    output.sum().backward()
    other = x * 2
    expected = torch.autograd.grad((other * other.sin()).exp().sum(), x)
    assert torch.equal(x.grad, expected[0])


def test_where_saved_tensor_hooks_are_disabled_the_call_says_so():
    x = torch.randn(3, requires_grad=True)
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"),
        pytest.raises(RuntimeError, match="no hooks here"),
    ):
        checkpoint(three, x)


def test_an_error_in_the_forward_is_the_regions_own():
    def region(x):
        x.sin().exp()
        raise KeyError("missing weight")

    x = torch.randn(3, requires_grad=True)
    with pytest.raises(KeyError, match="missing weight"):
        checkpoint(region, x)
    assert torch.equal(grads(checked(three), x)[0], grads(three, x)[0])


def test_an_error_in_the_replay_is_the_regions_own_and_the_graph_is_kept():
    broken = [True]  # not a plain variable: the replay would see it as it was

    def region(x):
        y = x.sin().exp()
        if broken and torch._C._current_graph_task_id() != -1:
            raise KeyError("missing weight")
        return y.sin()

    x = torch.randn(3, requires_grad=True)
    output = checkpoint(region, x, name="encoder").sum()
    with pytest.raises(KeyError, match="missing weight") as caught:
        output.backward(retain_graph=True)
    assert any("encoder" in note for note in caught.value.__notes__)
    broken.clear()
    output.backward()
    assert torch.equal(x.grad, grads(region, x)[0])


def test_ending_the_program_in_a_replay_is_not_turned_into_another_error():
    replaying = []

    def region(x):
        y = x.sin().exp()
        if replaying:
            raise KeyboardInterrupt
        return y.sin()

    output = checkpoint(region, torch.ones(1, requires_grad=True))
    replaying.append(True)
    with pytest.raises(KeyboardInterrupt):
        output.backward()


def test_a_region_that_catches_its_own_errors_is_stopped_early_all_the_same():
    fallbacks = []

    def region(x):
        y = x.sin()
        try:
            z = y.exp().sin()
            z = z * 1
        except Exception:
            fallbacks.append("fallback")
            z = y * 100
        return z.clone()

    x = torch.randn(3, requires_grad=True)
    got = grads(checked(region), x)
    assert fallbacks == []
    assert torch.equal(got[0], grads(region, x)[0])


def test_a_region_that_catches_everything_is_exact_or_an_error():
    def region(x):
        y = x.sin()
        try:
            z = y.exp().sin()
        except:  # noqa: E722 -- what users write
            z = y * 100
        return z.cos().sin()

    x = torch.randn(3, requires_grad=True)

    def run():
        return grads(checked(region), x)

    assert right_or_refused(run, grads(region, x), "", RecomputationError)


def test_a_region_leaves_its_own_contexts_in_a_stopped_replay():
    left = []

    def region(x):
        with contextlib.ExitStack() as stack:
            stack.callback(left.append, "left")
            return x.sin().exp()

    checkpoint(region, torch.ones(1, requires_grad=True)).backward()
    assert left == ["left", "left"]


def test_gradients_are_off_inside_a_region_that_turns_them_off():
    def told(run):
        x = torch.linspace(0, 1, 4).requires_grad_()

        def region(x):
            with torch.no_grad():
                factor = x.exp().sin()
            with torch.enable_grad():
                return (x * factor).sin()

        loss = run(region, x).sum()
        with torch.no_grad():
            loss.backward()
        return x.grad

    assert torch.equal(told(lambda function, x: function(x)), told(checkpoint))


class Wrapper(torch.Tensor):
    """A tensor around a tensor, which answers for its own sizes."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            dtype=inner.dtype,
            device=inner.device,
            requires_grad=inner.requires_grad,
            dispatch_sizes_strides_policy="sizes",
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = pytree.tree_map_only(cls, lambda t: t.inner, (args, kwargs or {}))
        return pytree.tree_map_only(torch.Tensor, cls, func(*args, **kwargs))


@pytest.mark.parametrize("selective", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_wrapped_tensors_go_in(selective, nested):
    keywords = {"context_fn": keeping(aten.sym_size.default)} if selective else {}

    def region(x):
        shaped = (x * x.sum()).view(-1).view(4, 3)
        assert list(shaped.grad_fn._saved_self_sym_sizes) == [12]
        return shaped.exp()

    leaf = torch.linspace(0, 1, 12).view(4, 3)

    def told(run):
        wrapped = Wrapper(leaf.clone().requires_grad_())
        output = run(wrapped)
        output.sum().backward()
        return wrapped.grad.inner

    wrap = checked(region, **keywords)
    assert torch.equal(told(region), told(checked(wrap) if nested else wrap))


class Plain(torch.Tensor):
    """A tensor of another name, with a storage of its own."""


def test_tensors_of_other_classes_keep_their_class():
    seen = []

    def region(x):
        seen.append(type(x))
        return x.sin().exp().sin()

    x = torch.randn(3).as_subclass(Plain).requires_grad_()
    got = grads(checked(region), x)
    assert seen == [Plain, Plain]
    assert torch.equal(got[0], grads(region, x)[0])


def test_a_packed_sequence_goes_in():
    cell = nn.LSTM(3, 4, batch_first=True)
    x = torch.randn(2, 5, 3, requires_grad=True)

    def packed(run):
        sequence = nn.utils.rnn.pack_padded_sequence(x, [5, 2], batch_first=True)
        return torch.autograd.grad(run(cell, sequence)[0].data.sum(), [x, *cell.parameters()])

    assert all(map(torch.equal, packed(checkpoint), packed(lambda cell, given: cell(given))))


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_tensors_go_in(layout):
    matrix = torch.eye(3).to_sparse(layout=layout)
    x = torch.randn(3, 3, requires_grad=True)

    def region(matrix, x):
        return torch.sparse.mm(matrix, x.exp()).sin()

    expected = torch.autograd.grad(region(matrix, x).sum(), x)
    assert torch.equal(torch.autograd.grad(checkpoint(region, matrix, x).sum(), x)[0], expected[0])


def test_sparse_gradients_come_out():
    table, places = nn.Embedding(10, 4, sparse=True), torch.tensor([1, 2, 2])

    def told(run):
        table.weight.grad = None
        run(table, places).exp().sum().backward()
        return table.weight.grad.to_dense()

    assert torch.equal(told(checkpoint), told(lambda table, places: table(places)))


def test_jagged_tensors_go_in():
    rows = [torch.randn(n, 3, requires_grad=True) for n in (2, 4)]

    def told(run):
        nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        output = run(lambda nested: (nested * 2).sin().exp(), nested)
        return torch.autograd.grad(output.values().sum(), rows)

    assert all(map(torch.equal, told(checkpoint), told(lambda region, nested: region(nested))))


def test_tensors_without_values_go_in():
    with FakeTensorMode():
        model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), torch.randn(2, 3, requires_grad=True)
        checkpoint(model, x).sum().backward()
        assert x.grad.shape == (2, 3)
    empty = nn.Sequential(nn.Linear(3, 4, device="meta"), nn.Tanh())
    x = torch.randn(2, 3, device="meta", requires_grad=True)
    checkpoint(empty, x).sum().backward()
    assert x.grad.shape == (2, 3)


def test_hooks_of_modules_and_tensors_inside_are_called_once_in_backward():
    calls = []
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    model[0].register_full_backward_hook(lambda *_: calls.append("module"))
    kept = []

    def region(x):
        y = model(x)
        y.register_hook(lambda _: calls.append("tensor"))
        if not kept:
            y.retain_grad()
            kept.append(y)
        return y.sin()

    checkpoint(region, torch.randn(2, 3, requires_grad=True)).sum().backward()
    assert sorted(calls) == ["module", "tensor"]
    assert kept[0].grad is not None


def test_modules_made_whole_by_their_first_forward():
    model = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyBatchNorm1d())
    x = torch.randn(5, 3, requires_grad=True)
    output = checkpoint(model, x)
    inputs = [x, *model.parameters()]
    got = torch.autograd.grad(output.square().sum(), inputs)
    assert model[2].num_batches_tracked == 1
    assert all(map(torch.equal, got, torch.autograd.grad(model(x).square().sum(), inputs)))


def test_vmap_over_a_region_gives_what_it_maps():
    x = torch.randn(4, 3, requires_grad=True)
    assert torch.equal(torch.vmap(checked(three))(x), torch.vmap(three)(x))


def test_vmap_over_a_region_goes_backward_or_is_refused():
    x = torch.randn(4, 3, requires_grad=True)
    expected = torch.autograd.grad(torch.vmap(three)(x).sum(), x)
    output = torch.vmap(checked(three))(x).sum()

    def run():
        return torch.autograd.grad(output, x)

    assert right_or_refused(run, expected, "vmap", RuntimeError, RecomputationError)


def test_functional_gradients_over_a_region_are_right_or_refused():
    x = torch.randn(3)
    expected = [torch.func.grad(lambda x: three(x).sum())(x)]

    def run():
        return [torch.func.grad(lambda x: checkpoint(three, x).sum())(x)]

    assert right_or_refused(run, expected, "hooks", RuntimeError)


def test_parameters_swapped_in_for_a_forward_are_right_or_an_error():
    class Holds(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))

        def forward(self, x, run=None):
            return run(self.inner, x) if run else self.inner(x)

    module = Holds()
    other = {k: torch.randn_like(p).requires_grad_() for k, p in module.named_parameters()}
    x = torch.randn(2, 3)
    expected = torch.func.functional_call(module, other, (x,))
    wanted = torch.autograd.grad(expected.sum(), [*other.values()])
    output = torch.func.functional_call(module, other, (x,), {"run": checkpoint})

    def run():
        return torch.autograd.grad(output.sum(), [*other.values()])

    assert right_or_refused(run, wanted, "weight", RecomputationError)


def test_threads_run_regions_of_their_own():
    start = threading.Barrier(4)
    x = [torch.full((64,), float(n + 1), requires_grad=True) for n in range(4)]
    got, failed = [None] * 4, []

    def train(n):
        try:
            start.wait(30)
            for _ in range(20):
                got[n] = grads(checked(checked(three)), x[n])[0]
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=train, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failed == []
    assert all(torch.equal(got[n], grads(three, x[n])[0]) for n in range(4))


def test_threads_go_backward_through_one_region_at_once():
    start = threading.Barrier(4)
    inputs = [torch.linspace(0, 1, 32).requires_grad_() for _ in range(3)]

    def region(*inputs):
        shared = sum(each.sin().exp() for each in inputs)
        return [(shared * each.cos()).sin().sum() for each in inputs] + [shared.sum()]

    outputs = checkpoint(region, *inputs)
    expected = [
        torch.autograd.grad(output, inputs, retain_graph=True) for output in region(*inputs)
    ]
    got, failed = [None] * 4, []

    def backward(n):
        try:
            start.wait(30)
            for _ in range(10):
                got[n] = torch.autograd.grad(outputs[n], inputs, retain_graph=True)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=backward, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failed == []
    for one, other in zip(got, expected, strict=True):
        assert all(map(torch.equal, one, other))


def test_a_backward_in_another_thread_than_the_forward():
    x = torch.randn(3, requires_grad=True)
    made = []
    forward = threading.Thread(target=lambda: made.append(checkpoint(checked(three), x)))
    forward.start()
    forward.join(30)
    failed = []

    def run():
        try:
            made[0].sum().backward()
        except BaseException as error:
            failed.append(error)

    backward = threading.Thread(target=run)
    backward.start()
    backward.join(30)
    assert failed == []
    assert torch.equal(x.grad, grads(three, x)[0])


def _compiled_runs():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.GELU())
    return model, torch.randn(2, 4, requires_grad=True)


def _gradients(model, x, output):
    return torch.autograd.grad(output.sum(), [x, *model.parameters()])


@pytest.fixture
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_compiled_function_may_call_checkpoint():
    model, x = _compiled_runs()

    @torch.compile(backend="aot_eager")
    def run(x):
        return checkpoint(model, x * 2).sin()

    got = _gradients(model, x, run(x))
    for one, other in zip(got, _gradients(model, x, model(x * 2).sin()), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_compiled_model_may_hold_checkpointed_blocks():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False).tanh()
            return x

    model, x = Model(), torch.randn(2, 4, requires_grad=True)
    expected = _gradients(model, x, model(x))
    got = _gradients(model, x, torch.compile(model, backend="aot_eager")(x))
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_region_may_be_compiled():
    model, x = _compiled_runs()
    compiled = torch.compile(model, backend="aot_eager")
    expected = _gradients(model, x, model(x).sin())
    for _ in range(2):
        got = _gradients(model, x, checkpoint(compiled, x).sin())
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other)
