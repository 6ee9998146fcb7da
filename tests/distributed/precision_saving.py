"""What ranks do in the tests of mixed precision under `DistributedCheckpoint`: train, save on some
number of ranks, and go on with it on another."""

import hashlib

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from holdfast.distributed import CheckpointOptions, DistributedCheckpoint, LoadOptions, SaveOptions
from holdfast.errors import CheckpointError
from holdfast.precision import (
    MixedPrecisionOptimizer,
    MixedPrecisionOptions,
    create_checkpoint,
    save_checkpoint,
)

WORDS = {"dynamic_scaling": True, "initial_scale": 64.0, "growth_interval": 4, "max_grad_norm": 0.5}
OPTIONS = {
    "fp16": MixedPrecisionOptions.for_fp16(**WORDS, hysteresis=2),
    "bf16": MixedPrecisionOptions.for_bf16(**WORDS, hysteresis=2),
    "remainder": MixedPrecisionOptions.for_bf16(**WORDS, master_storage="remainder"),
    "soon fp32": MixedPrecisionOptions.for_fp16(**WORDS, max_consecutive_overflows=2),
}


class Scaled(nn.Module):
    """Has a buffer of the model's dtype, which each forward in training changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.tensor(0.3))

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.detach().mean().to(self.mean.dtype), 0.1)
        return x * (1 + self.mean)


class Made:
    """A model of one process, of DDP or of FSDP2, and its optimizer."""

    def __init__(self, way, precision="bf16", seed=1, kind="adamw"):
        torch._C._set_mkldnn_enabled(False)
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        # Under FSDP2 a buffer would stay FP32, and this one would not be sharded.
        middle = nn.Tanh() if way == "fsdp" else Scaled()
        self.bare = nn.Sequential(nn.Linear(4, 7), middle, nn.Linear(7, 5), nn.Linear(5, 3))
        options = OPTIONS[precision]
        if way == "fsdp":
            mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
            policy = MixedPrecisionPolicy(param_dtype=options.precision.dtype)
            for part in (self.bare[0], self.bare):
                fully_shard(part, mesh=mesh, mp_policy=policy)
        make = {
            "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
            "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
            "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
        }[kind]
        inner = make(self.bare.parameters())
        self.optimizer = MixedPrecisionOptimizer(inner, options, model=self.bare)
        self.model = DistributedDataParallel(self.bare) if way == "ddp" else self.bare

    def train(self, start, stop, *, overflow=()):
        """Every rank sees the same data."""
        seen = []
        for number in range(start, stop):
            make = torch.Generator().manual_seed(number)
            loss = self.model(torch.randn(4, 4, generator=make)).float().square().mean()
            self.optimizer.scale_loss(loss).backward()
            if number in overflow:
                weight = next(self.bare.parameters())
                weight.grad = weight.grad * torch.inf
            self.optimizer.step()
            self.optimizer.zero_grad()
            seen.append(digest(self))
        return seen


def digest(made):
    return hashlib.sha256(repr(whole(made)).encode()).hexdigest()


def whole(made):
    """Everything that a checkpoint has, as values that do not say how they were laid out."""
    tree = {"model": dict(made.bare.state_dict()), "optimizer": made.optimizer.state_dict()}
    return list(_leaves(tree, ()))


def _leaves(value, place):
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, (*place, key))
    elif isinstance(value, list | tuple):
        for nth, item in enumerate(value):
            yield from _leaves(item, (*place, nth))
    elif isinstance(value, torch.Tensor):
        full = value.full_tensor() if isinstance(value, DTensor) else value
        bits = full.detach().contiguous().reshape(-1).view(torch.uint8)
        yield place, (str(full.dtype), tuple(full.shape), bits.numpy().tobytes())
    else:
        yield place, value


def opened(folder):
    return DistributedCheckpoint.create(options=CheckpointOptions(storage=folder))


def saved(rank, folder, way, precision="bf16", kind="adamw", **how):
    """Train, save, and go on: what there was, and what follows."""
    made = Made(way, precision, kind=kind)
    made.train(0, 6, overflow={2, 3})
    with opened(folder) as checkpoint:
        options = SaveOptions(checkpoint_prefix="a", step=6, **how)
        checkpoint.save(made.model, made.optimizer, options)
    then = whole(made)
    return then, made.train(6, 12, overflow={9})


def resumed(rank, folder, way, precision="bf16", *, kind="adamw", warm=0):
    """The same in a job that has just begun, or, with ``warm``, has trained otherwise before."""
    made = Made(way, precision, seed=2, kind=kind)
    made.train(50, 50 + warm)
    with opened(folder) as checkpoint:
        result = checkpoint.resume(made.model, made.optimizer)
    assert result.step == 6
    then = whole(made)
    state = made.optimizer.state_dict()["inner"]["state"]
    kinds = {type(held["exp_avg"]).__name__ for held in state.values() if "exp_avg" in held}
    return then, made.train(6, 12, overflow={9}), kinds


def refused(rank, folder, way, precision, kind):
    """Loading what does not fit: the error, and whether anything changed."""
    made = Made(way, precision, seed=2, kind=kind)
    made.train(50, 53)
    before = whole(made)
    with opened(folder) as checkpoint:
        try:
            checkpoint.load(made.model, made.optimizer, LoadOptions(checkpoint_prefix="a"))
        except CheckpointError as error:
            return type(error).__name__, str(error), whole(made) == before
    return None


class Broken:
    """Part of a state, and the last to be loaded, which on rank 1 fails."""

    def __init__(self, rank):
        self.rank = rank

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        if self.rank == 1:
            raise RuntimeError("not here")


def saved_beside(rank, folder, way, precision):
    made = Made(way, precision)
    made.train(0, 6, overflow={2, 3})
    with opened(folder) as checkpoint:
        options = SaveOptions(checkpoint_prefix="a")
        checkpoint.save(made.model, made.optimizer, options, extra={"last": Broken(rank)})


def one_rank_fails(rank, folder, way, precision):
    """A rank cannot apply what all have read: every rank is as it was, dtypes included, and goes on
    as one that never tried."""
    made, other = (Made(way, precision, seed=2) for _ in range(2))
    for each in (made, other):
        each.train(50, 53)
    before = whole(made)
    with opened(folder) as checkpoint:
        try:
            options = LoadOptions(checkpoint_prefix="a")
            extra = {"last": Broken(rank)}
            checkpoint.load(made.model, made.optimizer, options, extra=extra)
        except CheckpointError as error:
            told = str(error)
    return told, whole(made) == before, made.train(53, 58) == other.train(53, 58)


def file_of_a_sharded_one(rank, path):
    made = Made("fsdp")
    made.train(0, 2)
    checkpoint = create_checkpoint(made.optimizer)
    try:
        save_checkpoint(checkpoint, path)
    except CheckpointError as error:
        return type(error).__name__, str(error)
    return None


def restored_from_memory(rank):
    """A checkpoint of a sharded optimizer that never becomes a file."""
    from holdfast.precision import restore_checkpoint

    made = Made("fsdp")
    made.train(0, 3)
    before, checkpoint = whole(made), create_checkpoint(made.optimizer)
    after = made.train(3, 6)
    restore_checkpoint(made.optimizer, checkpoint)
    return whole(made) == before, made.train(3, 6) == after
