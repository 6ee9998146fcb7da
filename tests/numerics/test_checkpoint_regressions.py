"""What reviews of checkpoint() found, each as small as it gets."""

import collections
import gc
import threading
import warnings
import weakref

import pytest
import torch
from torch import nn

from holdfast.activation import CheckpointManager, checkpoint
from holdfast.errors import ClosedError, RecomputationError


def gradient(run, function, *args):
    torch.manual_seed(5)
    x = torch.linspace(0.1, 1, 8, requires_grad=True)
    run(function, x, *args).sum().backward()
    return x.grad


def plain(function, *args, **kwargs):
    return function(*args, **kwargs)


@pytest.mark.parametrize("function", [nn.RReLU(), nn.Sequential(nn.Tanh(), nn.RReLU())])
def test_noise_that_is_drawn_after_it_was_saved_is_drawn_in_the_replay(function):
    assert torch.equal(gradient(checkpoint, function), gradient(plain, function))


def test_noise_that_is_drawn_after_it_was_saved_is_not_moved_before():
    def region(x):
        return nn.functional.rrelu(x, training=True).sin()

    def told(run, **words):
        torch.manual_seed(5)
        x = torch.randn(1_000_000, requires_grad=True)
        run(region, x * 1.0, **words).sum().backward()
        return x.grad

    with CheckpointManager(tier="disk") as manager:
        moved = told(checkpoint, manager=manager, keep=lambda _: True)
    assert torch.equal(moved, told(plain))


class Adds(nn.Module):
    def __init__(self, buffer):
        super().__init__()
        self.register_buffer("b", buffer)

    def forward(self, x):
        self.b += 1
        return x


class Uses(nn.Module):
    def __init__(self, buffer):
        super().__init__()
        self.register_buffer("b", buffer)

    def forward(self, x):
        return (x * self.b.mean()).sin()


@pytest.mark.parametrize("size", [4, 100_000])
@pytest.mark.parametrize("part", [lambda b: b, lambda b: b[: len(b) // 2], lambda b: b[1::2]])
def test_buffers_in_one_memory_stay_in_one_memory(size, part):
    def model():
        buffer = torch.zeros(size)
        return nn.Sequential(Adds(buffer), Uses(part(buffer)))

    checked = model()
    assert torch.equal(gradient(checkpoint, checked), gradient(plain, model()))
    assert checked[0].b.sum() == size


def test_an_attribute_in_a_buffers_memory_is_written_with_it():
    class Aliased(Adds):
        def __init__(self):
            super().__init__(torch.zeros(4))
            self.alias = self.b

        def forward(self, x):
            self.b += 1
            return (x * self.alias.mean()).sin()

    assert torch.equal(gradient(checkpoint, Aliased()), gradient(plain, Aliased()))


@pytest.mark.parametrize("kind", ["quantized", "conjugate", "sparse"])
def test_a_large_buffer_that_cannot_be_compared_is_no_obstacle(kind):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    values = torch.randn(300, 300)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantized tensors are on their way out
        buffer = {
            "quantized": lambda: torch.quantize_per_tensor(values, 0.1, 0, torch.qint8),
            "conjugate": lambda: torch.complex(values, values).conj(),
            "sparse": lambda: values.relu().to_sparse(),
        }[kind]()
    model.register_buffer("b", buffer)
    assert torch.equal(gradient(checkpoint, model), gradient(plain, model))


class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 2 + 0 * x


def test_a_backward_does_not_take_what_another_has_just_replayed():
    def region(x):
        first = Saves.apply(x.sin())
        second = first
        for _ in range(30):
            second = Saves.apply(second.cos())
        return first, second

    x = torch.randn(64, requires_grad=True)
    first, second = checkpoint(region, x)
    expected = torch.autograd.grad(first.sum(), x, retain_graph=True)[0]
    wrong = []

    def again():
        for _ in range(20):
            try:
                (got,) = torch.autograd.grad(first.sum(), x, retain_graph=True)
            except RecomputationError as error:
                wrong.append(error)
            else:
                if not torch.equal(got, expected):
                    wrong.append(got)

    threads = [threading.Thread(target=again) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert second.requires_grad


class Trainer:
    def __init__(self):
        self.net = nn.Linear(4, 4)
        self.last = None
        self.state = {}

    def step(self, x):
        return self.net(x).tanh()


@pytest.mark.parametrize("where", ["attribute", "dict"])
def test_what_a_holder_remembers_is_not_held_by_the_next_region(where):
    trainer = Trainer()
    alive = []
    gc.disable()
    try:
        for _ in range(10):
            output = checkpoint(trainer.step, torch.randn(3, 4))
            alive.append(weakref.ref(output))
            if where == "attribute":
                trainer.last = output
            else:
                trainer.state["h"] = output
            del output
        assert sum(each() is not None for each in alive) == 1
    finally:
        gc.enable()


def test_a_lambda_in_a_loop_is_replayed_with_the_layer_it_had():
    layers = [nn.Linear(8, 8) for _ in range(3)]

    def through(run):
        x = h = torch.linspace(0, 1, 8, requires_grad=True)
        for layer in layers:
            h = run(lambda h: layer(h).tanh(), h)  # noqa: B023 -- the subject
        h.sum().backward()
        return x.grad

    assert torch.equal(through(checkpoint), through(plain))


_scale = 1.0


def test_a_global_that_changes_is_replayed_as_it_was():
    global _scale  # noqa: PLW0603 -- the subject
    _scale = 2.0
    x = torch.ones(3, requires_grad=True)
    output = checkpoint(lambda x: (x * _scale).sin(), x)
    _scale = 3.0
    output.sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2 * torch.cos(torch.tensor(2.0)).item()))
    assert _scale == 3.0


class Log(list):
    pass


@pytest.mark.parametrize(
    "make",
    [
        lambda x: collections.OrderedDict(h=x),
        lambda x: {"h": x},
        lambda x: collections.defaultdict(int, h=x),
    ],
)
def test_a_mapping_the_region_changes_is_replayed_as_it_was(make):
    def region(d):
        d["h"] = d["h"].sin()
        return d["h"]

    x = torch.ones(3, requires_grad=True)
    checkpoint(region, make(x)).sum().backward()
    assert torch.equal(x.grad, torch.ones(3).cos())


@pytest.mark.parametrize("make", [Log, list, collections.deque])
def test_a_list_the_region_changes_is_replayed_as_it_was(make):
    def region(items):
        items.append(items[0].sin())
        return (
            sum(items[1:], torch.zeros(3)) * len(items)
            if make is not collections.deque
            else (items[-1] * len(items))
        )

    x = torch.ones(3, requires_grad=True)
    checkpoint(region, make([x])).sum().backward()
    assert torch.equal(x.grad, 2 * torch.ones(3).cos())


def test_what_stands_among_the_arguments_twice_is_one_thing_in_the_replay():
    def region(x, a, b):
        a.append(1.0)
        return (x * len(b)).sin()

    items = []
    x = torch.ones(3, requires_grad=True)
    checkpoint(region, x, items, items).sum().backward()
    assert torch.equal(x.grad, torch.ones(3).cos())


def test_a_container_that_holds_itself_is_no_obstacle():
    items = {"x": torch.ones(3, requires_grad=True)}
    items["self"] = items
    checkpoint(lambda d: d["self"]["self"]["x"].sin(), items).sum().backward()
    assert torch.equal(items["x"].grad, torch.ones(3).cos())


def test_a_result_of_torch_among_the_arguments_is_watched():
    x = torch.randn(4, 3, requires_grad=True)
    found = (x * 2).max(0)
    output = checkpoint(lambda r: r.values.sin(), found)
    found.values.add_(1)
    with pytest.raises(RecomputationError, match="changed in place"):
        output.sum().backward()


def test_children_put_in_anothers_place_are_not_used_by_the_replay():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    expected = gradient(plain, model)
    torch.manual_seed(5)
    x = torch.linspace(0.1, 1, 8, requires_grad=True)
    output = checkpoint(model, x)
    model[1] = nn.Sigmoid()
    model.append(nn.ReLU())
    output.sum().backward()
    assert torch.equal(x.grad, expected)
    assert isinstance(model[1], nn.Sigmoid)
    assert len(model) == 4


def test_names_that_were_deleted_stay_deleted():
    model = Adds(torch.zeros(4))
    model.mask = torch.ones(8)
    x = torch.linspace(0.1, 1, 8, requires_grad=True)
    output = checkpoint(lambda x: (model(x) * model.mask).sin(), x)
    del model.b, model.mask
    output.sum().backward()
    assert "mask" not in model.__dict__
    assert "b" not in model._buffers


def test_an_embedding_that_renorms_itself_may_be_used_in_two_regions():
    def told(run):
        torch.manual_seed(5)
        embedding = nn.Embedding(6, 4, max_norm=1.0)
        with torch.no_grad():
            embedding.weight.mul_(5)
        index = torch.tensor([1, 2, 3])
        first = run(lambda i: embedding(i).sin(), index)
        second = run(lambda i: embedding(i).cos(), index)
        (first.sum() + second.sum()).backward()
        return embedding.weight.grad

    assert torch.equal(told(checkpoint), told(plain))


def test_an_embedding_that_renorms_itself_passes_the_check_by_digest():
    embedding = nn.Embedding(6, 4, max_norm=1.0)
    with torch.no_grad():
        embedding.weight.mul_(5)
    output = checkpoint(lambda i: embedding(i).sin(), torch.tensor([1, 2]), check="digest")
    output.sum().backward()
    assert embedding.weight.grad is not None


def test_a_kept_parameter_that_was_stepped_is_named():
    layer = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    output = checkpoint(layer, torch.randn(3, 8, requires_grad=True), keep=lambda _: True)
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with pytest.raises(RecomputationError, match=r"Linear\.weight.*step"):
        output.sum().backward()


def test_a_change_that_makes_the_replay_fail_is_told_with_the_failure():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    output = checkpoint(model, torch.randn(3, 8, requires_grad=True))
    model[0].weight.data = torch.ones(3, 3)
    with pytest.raises(RuntimeError) as caught:
        output.sum().backward()
    told = " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "0.weight was given other memory" in told


def test_a_switch_of_the_kernels_is_brought_back():
    conv = nn.Conv2d(3, 8, 3)
    x = torch.randn(2, 3, 16, 16, requires_grad=True)
    seen = []

    def region(x):
        seen.append((torch._C._get_mkldnn_enabled(), torch.get_float32_matmul_precision()))
        return conv(x).sin()

    before = torch.get_float32_matmul_precision()
    torch._C._set_mkldnn_enabled(False)
    torch.set_float32_matmul_precision("medium")
    try:
        output = checkpoint(region, x)
    finally:
        torch._C._set_mkldnn_enabled(True)
        torch.set_float32_matmul_precision(before)
    output.sum().backward()
    assert seen == [(False, "medium")] * 2
    assert torch._C._get_mkldnn_enabled()
    assert torch.get_float32_matmul_precision() == before


def test_a_manager_closed_before_backward_is_told_as_such():
    with CheckpointManager() as manager:
        output = checkpoint(torch.sin, torch.ones(3, requires_grad=True), manager=manager)
    with pytest.raises(ClosedError, match=r"region 'sin'.*call backward\(\) first"):
        output.sum().backward()


def test_generators_that_would_not_be_replayed_are_refused():
    with pytest.raises(ValueError, match="preserve_rng_state"):
        checkpoint(torch.sin, torch.ones(1), generators=torch.Generator(), preserve_rng_state=False)


def test_a_forward_that_fails_while_tensors_wait_to_be_moved_leaves_nothing(tmp_path):
    alive = []

    def region(x):
        for _ in range(3):
            x = x.sin()
            alive.append(weakref.ref(x))
        raise KeyError("in the middle")

    gc.disable()
    try:
        with CheckpointManager(tier="disk", folder=tmp_path) as manager:
            x = torch.randn(100_000, requires_grad=True)
            with pytest.raises(KeyError):
                checkpoint(region, x, manager=manager, keep=lambda _: True)
            assert [each() for each in alive] == [None, None, None]
    finally:
        gc.enable()
