"""A small training in every kind of parallelism, run by ranks, and what it must look like.

Gradients are made from the parameters, element by element, so that every layout has bit for bit
the values that one process has: ``reference`` is the same training, whole.
"""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from holdfast.distributed import (
    CheckpointOptions,
    DistributedCheckpoint,
    LoadOptions,
    SaveOptions,
    per_rank,
)

KINDS = {
    "single": (1,),
    "ddp": (1, 2, 3, 4),
    "fsdp": (1, 2, 3, 4),
    "tp": (2, 3, 4),
    "hsdp": (4,),
    "fsdp_tp": (4,),
}


class Net(nn.Module):
    """Odd sizes, so that no number of ranks divides them; a buffer, a tied and a frozen weight."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.up = nn.Linear(7, 13)
        self.down = nn.Linear(13, 7)
        self.norm = nn.BatchNorm1d(7)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(5, 1)
        self.frozen.requires_grad_(False)
        self.scalar = nn.Parameter(torch.tensor([1.5]))


def new_net(seed):
    torch.manual_seed(seed)
    return Net()


@functools.cache
def mesh_of(shape, names=None):
    """One mesh of each kind in a rank: torch keeps the groups of every mesh until it ends."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def parallel(net, kind, world):
    if kind == "ddp" and world > 1:
        return nn.parallel.DistributedDataParallel(net)
    if kind == "fsdp":
        fully_shard(net, mesh=mesh_of((world,)))
    if kind == "tp":
        mesh = mesh_of((world,))
        parallelize_module(net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if kind == "hsdp":
        mesh = mesh_of((2, world // 2), ("replicate", "shard"))
        fully_shard(net, mesh=mesh)
    if kind == "fsdp_tp":
        mesh = mesh_of((2, world // 2), ("dp", "tp"))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(net, mesh["tp"], plan)
        for layer in (net.up, net.down):
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(net, mesh=mesh["dp"])
    return net


def new_optimizer(net):
    """Two groups with their own hyper-parameters; one parameter never gets a gradient."""
    first = [p for n, p in net.named_parameters() if p.requires_grad and "up" in n]
    rest = [p for n, p in net.named_parameters() if p.requires_grad and "up" not in n]
    return torch.optim.AdamW([{"params": first, "lr": 0.25}, {"params": rest, "lr": 0.5}])


def train(net, optimizer, steps):
    for _ in range(steps):
        for name, parameter in net.named_parameters():
            if parameter.requires_grad and not name.endswith("scalar"):
                parameter.grad = parameter.detach() * 0.5
        optimizer.step()


def reference(seed, steps):
    net = new_net(seed)
    optimizer = new_optimizer(net)
    train(net, optimizer, steps)
    return net, optimizer


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def plain_name(name):
    return name.removeprefix("module.")


def require_equal(net, optimizer, seed, steps):
    """The state is bit for bit that of the reference, on this rank's view of the whole."""
    expected, expected_optimizer = reference(seed, steps)
    wanted = expected.state_dict()
    found = {plain_name(name): value for name, value in net.state_dict().items()}
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        assert torch.equal(whole(value), wanted[name]), name
    by_name = {plain_name(n): p for n, p in net.named_parameters()}
    for name, parameter in expected.named_parameters():
        state = expected_optimizer.state.get(parameter, {})
        mine = optimizer.state.get(by_name[name], {})
        assert mine.keys() == state.keys(), name
        for key, value in state.items():
            assert torch.equal(whole(mine[key]), value), (name, key)
            assert mine[key].dtype == value.dtype
    for mine, group in zip(optimizer.param_groups, expected_optimizer.param_groups, strict=True):
        assert mine["lr"] == group["lr"]


def checkpointer(folder, **options):
    return DistributedCheckpoint.create(options=CheckpointOptions(storage=folder, **options))


def save_job(rank, folder, kind, prefix, *, seed=1, steps=2, **options):
    world = dist.get_world_size()
    net = parallel(new_net(seed), kind, world)
    optimizer = new_optimizer(net)
    train(net, optimizer, steps)
    with checkpointer(folder) as ckpt:
        extra = {"step": steps, "mine": per_rank({"rank": rank, "at": torch.tensor([rank])})}
        return ckpt.save(
            net, optimizer, SaveOptions(checkpoint_prefix=prefix, **options), extra=extra
        )


def load_job(rank, folder, kind, prefix, *, seed=1, steps=2, stepped=False, **options):
    """Load into another net and check it, then that training goes on alike."""
    world = dist.get_world_size()
    net = parallel(new_net(seed + 1000), kind, world)
    optimizer = new_optimizer(net)
    if stepped:
        train(net, optimizer, 1)
    with checkpointer(folder) as ckpt:
        options.setdefault("remap", saved_rank)
        extra = {"step": 0, "mine": {"rank": -1, "at": torch.tensor([-1])}}
        result = ckpt.load(
            net, optimizer, LoadOptions(checkpoint_prefix=prefix, **options), extra=extra
        )
    require_equal(net, optimizer, seed, steps)
    assert extra["step"] == steps
    saved = rank % result.source_world_size
    assert extra["mine"]["rank"] == saved
    assert extra["mine"]["at"].tolist() == [saved]
    train(net, optimizer, 1)
    require_equal(net, optimizer, seed, steps + 1)
    return result.was_resharded


def saved_rank(rank, world_size, saved_world_size):
    return rank % saved_world_size
