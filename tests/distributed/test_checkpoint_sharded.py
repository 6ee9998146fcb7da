"""Checkpointed blocks in sharded and in replicated models: the same gradients on every rank."""

import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from holdfast.activation import CheckpointConfig, checkpoint, checkpoint_layers
from holdfast.errors import RecomputationError
from holdfast.testing import RankGang

WIDTH = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Net(nn.Module):
    """``around`` says where the regions are: in the blocks, around each, or around them all."""

    def __init__(self, around, **words):
        super().__init__()
        self.around = around
        self.run = functools.partial(checkpoint, **words)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x):
        if self.around == "all":
            return self.head(self.run(self.through, x))
        for block in self.blocks:
            x = self.run(block, x) if self.around == "each" else block(x)
        return self.head(x)

    def through(self, x):
        for block in self.blocks:
            x = self.run(block, x)
        return x


def _inside(block, run):
    """A region inside of what FSDP wraps: FSDP's hooks run once, around it."""
    forward = block.forward
    block.forward = lambda x: run(forward, x)


@functools.cache
def _mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def _made(kind, around, words, checks):
    torch.manual_seed(5)
    net = Net(around, **checks)
    if around == "inside":
        for block in net.blocks:
            _inside(block, net.run)
    if around == "layers":
        checkpoint_layers(net, CheckpointConfig.half())
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(net, **words)
    if kind == "tp":
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in net.blocks:
            parallelize_module(block, _mesh(), plan)
        return net
    for block in net.blocks:
        fully_shard(block, mesh=_mesh(), **words)
    return fully_shard(net, mesh=_mesh(), **words)


def _gradients(net):
    told = {}
    for name, parameter in net.named_parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        told[name.removeprefix("module.")] = gradient.clone()
    return told


def _steps(kind, around, words, checks, micro_batches):
    net = _made(kind, around, words, checks)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    torch.manual_seed(100 + dist.get_rank())
    told = []
    for _ in range(2):
        optimizer.zero_grad()
        losses = [net(torch.randn(4, WIDTH)).square().sum() for _ in range(micro_batches)]
        for loss in losses:
            loss.backward()
        told.append(_gradients(net))
        optimizer.step()
    told.append({"stream": torch.get_rng_state()})
    return told


def warned(rank, kind, around):
    """What holdfast warns of while the model trains."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _steps(kind, around, {}, {}, 1)
    return [str(each.message) for each in caught if "holdfast" in str(each.message)]


def compared(rank, kind, around, words, *, checks=None, micro_batches=1):
    expected = _steps(kind, None, words, {}, micro_batches)
    checked = _steps(kind, around, words, checks or {}, micro_batches)
    return [
        name
        for one, other in zip(expected, checked, strict=True)
        for name in one
        if not torch.equal(one[name], other[name])
    ]


def stepped_between(rank, kind):
    net = _made(kind, "each", {}, {})
    inner = net.module if kind == "ddp" else net
    optimizer = torch.optim.AdamW(inner.blocks[0].up.parameters(), lr=0.01, foreach=True)
    net(torch.ones(4, WIDTH)).sum().backward()
    loss = net(torch.ones(4, WIDTH)).sum()
    optimizer.step()
    try:
        loss.backward()
    except RecomputationError as error:
        return str(error)
    return "nothing was said"


@pytest.fixture(scope="module")
def gang():
    with RankGang(2) as ranks:
        yield ranks


@pytest.mark.parametrize("around", ["each", "all", "inside", "layers"])
@pytest.mark.parametrize("kind", ["fsdp", "ddp", "tp"])
def test_gradients_are_those_of_the_same_model_without(gang, kind, around):
    assert gang.run(compared, kind, around, {}) == [[], []]


@pytest.mark.parametrize("around", ["each", "all", "inside"])
@pytest.mark.parametrize("kind", ["fsdp", "ddp", "tp"])
def test_the_parameters_of_sharded_models_are_known(kind, around):
    with RankGang(2) as fresh:  # a warning is given once a process
        assert fresh.run(warned, kind, around) == [[], []]


@pytest.mark.parametrize("around", ["each", "all", "inside"])
@pytest.mark.parametrize("resharded", [True, False])
def test_weights_kept_whole_or_not_after_the_forward(gang, around, resharded):
    words = {"reshard_after_forward": resharded}
    assert gang.run(compared, "fsdp", around, words) == [[], []]


@pytest.mark.parametrize("around", ["each", "inside"])
def test_two_micro_batches_before_backward(gang, around):
    words = {"reshard_after_forward": True}
    assert gang.run(compared, "fsdp", around, words, micro_batches=2) == [[], []]


def test_parameters_of_another_type_in_the_forward(gang):
    words = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float64)}
    assert gang.run(compared, "fsdp", "each", words) == [[], []]


@pytest.mark.parametrize("checks", [{"check": "digest"}, {"determinism_check": "values"}])
@pytest.mark.parametrize("around", ["each", "inside"])
@pytest.mark.parametrize("kind", ["fsdp", "tp"])
def test_checks_of_values_leave_sharded_tensors_usable(kind, around, checks):
    with RankGang(2) as own:
        assert own.run(compared, kind, around, {}, checks=checks) == [[], []]


@pytest.mark.parametrize("words", [{"static_graph": True}, {"gradient_as_bucket_view": True}])
@pytest.mark.parametrize("around", ["each", "all"])
def test_ways_of_replicating(gang, words, around):
    assert gang.run(compared, "ddp", around, words) == [[], []]


@pytest.mark.parametrize("kind", ["fsdp", "ddp", "tp"])
def test_a_step_between_forward_and_backward_is_told_on_every_rank(gang, kind):
    for told in gang.run(stepped_between, kind):
        assert "step" in told or "changed" in told
