"""What ranks do in the tests of mixed precision: models that are replicated or sharded."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from holdfast.distributed import CheckpointOptions, DistributedCheckpoint, LoadOptions, SaveOptions
from holdfast.errors import FallbackRequiresRewrapError
from holdfast.precision import (
    MixedPrecisionOptimizer,
    MixedPrecisionOptions,
    create_checkpoint,
    load_and_restore,
    save_checkpoint,
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = nn.Linear(6, 10)
        self.norm = nn.LayerNorm(10)
        self.head = nn.Linear(10, 3)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.start(x))))


def made(seed=0):
    torch._C._set_mkldnn_enabled(False)  # its bf16 kernels die of SIGILL on some machines
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    return Net()


def adamw(net, *, fused=True, lr=0.01):
    return torch.optim.AdamW(net.parameters(), lr=lr, fused=fused)


def batch(step):
    """Another on every rank."""
    drawn = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    return torch.randn(5, 6, generator=drawn)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def everyones(tensors):
    """Whether all ranks have the same values."""
    same = []
    for tensor in tensors:
        mine = whole(tensor.detach()).float().contiguous()
        found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(found, mine)
        same.append(all(torch.equal(mine, each) for each in found))
    return all(same)


def backward(net, optimizer, step):
    optimizer.zero_grad()
    optimizer.scale_loss(net(batch(step)).float().square().mean()).backward()


def spoil(optimizer, ranks):
    """Make a gradient infinite, on some ranks only."""
    if dist.get_rank() in ranks:
        gradient = next(iter(optimizer.training_weights.values())).grad
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        if local.numel():
            local.view(-1)[0] = math.inf


def wrapped_after(rank, words, *, fused=True, unscale=False):
    """The model as BF16 and then wrapped: gradients are averaged, ranks stay together, and go on
    from the masters of rank 0, not from its weights."""
    net = made(rank)  # DDP gives all of them the weights of rank 0
    options = MixedPrecisionOptions.for_bf16(**words)
    optimizer = MixedPrecisionOptimizer(adamw(net, fused=fused), options, model=net)
    first = {name: each.detach().clone() for name, each in optimizer.master_weights.items()}
    ddp = DistributedDataParallel(net)
    equal = []
    for step in range(4):
        backward(ddp, optimizer, step)
        equal.append(everyones([weight.grad for weight in net.parameters()]))
        if unscale:
            optimizer.unscale_()
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        result = optimizer.step()
        assert result
        assert not unscale or result.grad_norm < 0.11
    moved = max(
        float((each.detach() - first[name]).abs().max())
        for name, each in optimizer.master_weights.items()
    )
    return {
        "gradients": equal,
        "weights": everyones(net.parameters()),
        "masters": everyones(optimizer.master_weights.values()),
        "moved": moved,
        "dtypes": {str(weight.dtype) for weight in net.parameters()},
        "gradient dtypes": {str(weight.grad.dtype) for weight in net.parameters()},
    }


def added_up_under_ddp(rank):
    net = made()
    options = MixedPrecisionOptions.for_bf16(grad_accumulation="fp32")
    MixedPrecisionOptimizer(adamw(net), options, model=net)
    try:
        DistributedDataParallel(net)(batch(0))
    except ValueError as error:
        return str(error)
    return None


def wrapped_before(rank, model_given):
    """Refused, and the model and optimizer are as they were: training goes on, averaged."""
    net = made()
    ddp = DistributedDataParallel(net)
    inner = adamw(ddp)
    problem = None
    given = {"ddp": ddp, "inside": net, "none": None}[model_given]
    try:
        MixedPrecisionOptimizer(inner, MixedPrecisionOptions.for_bf16(), model=given)
    except ValueError as error:
        problem = str(error)
    ddp(batch(0)).square().mean().backward()
    inner.step()
    return problem, everyones([*net.parameters(), *(weight.grad for weight in net.parameters())])


def wrapped_as_bf16(rank):
    """A model that was BF16 when it was wrapped keeps its dtypes, so it is taken."""
    net = made().bfloat16()
    ddp = DistributedDataParallel(net)
    options = MixedPrecisionOptions.for_bf16(fp32_layer_patterns=())
    optimizer = MixedPrecisionOptimizer(adamw(ddp), options, model=ddp)
    equal = []
    for step in range(3):
        backward(ddp, optimizer, step)
        equal.append(everyones([weight.grad for weight in net.parameters()]))
        assert optimizer.step()
    return equal, list(optimizer.master_weights), everyones(optimizer.master_weights.values())


def falls_back(rank, with_rewrap):
    """Overflows until the model must be FP32: an error on all ranks, or wrapped anew."""
    net = made()
    calls = []

    def rewrap(model):
        calls.append(model is net)
        return DistributedDataParallel(model)

    options = MixedPrecisionOptions.for_fp16(max_consecutive_overflows=2)
    optimizer = MixedPrecisionOptimizer(
        adamw(net), options, model=net, rewrap=rewrap if with_rewrap else None
    )
    ddp = DistributedDataParallel(net)
    backward(ddp, optimizer, 0)
    assert optimizer.step()
    masters = {name: each.detach().clone() for name, each in optimizer.master_weights.items()}
    problem, fell_back = None, False
    for step in (1, 2):
        optimizer.zero_grad()
        # On one rank only, before it is averaged.
        (optimizer.scale_loss(ddp(batch(step)).sum()) * (math.inf if rank == 1 else 1.0)).backward()
        try:
            fell_back = optimizer.step().fell_back
        except FallbackRequiresRewrapError as error:
            problem = str(error)
    kept = all(torch.equal(each, masters[name]) for name, each in optimizer.master_weights.items())
    equal = []
    net = optimizer.model if with_rewrap else ddp
    for step in (3, 4):
        backward(net, optimizer, step)
        equal.append(everyones([weight.grad for weight in net.parameters()]))
        optimizer.step()
    return {
        "problem": problem,
        "fell back": fell_back,
        "kept": kept,
        "calls": calls,
        "gradients": equal,
        "weights": everyones(net.parameters()),
        "dtypes": {str(weight.dtype) for weight in net.parameters()},
        "has_fallback": optimizer.has_fallback,
    }


def rewrap_fails(rank):
    """Then the model is FP32 and says so: no half of a fallback."""
    net = made()

    def rewrap(model):
        raise RuntimeError("not today")

    options = MixedPrecisionOptions.for_fp16(max_consecutive_overflows=1)
    optimizer = MixedPrecisionOptimizer(adamw(net), options, model=net, rewrap=rewrap)
    ddp = DistributedDataParallel(net)
    optimizer.scale_loss(ddp(batch(0)).sum() * math.inf).backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        problem = str(error)
    dtypes = {str(weight.dtype) for weight in net.parameters()}
    return problem, optimizer.has_fallback, optimizer.scaler.scale, dtypes


def sharded(net, dtype=torch.bfloat16, **words):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for part in (net.start, net.head):
        fully_shard(part, mesh=mesh, mp_policy=policy, **words)
    return fully_shard(net, mesh=mesh, mp_policy=policy, **words)


def adopted(rank, fused, most):
    """Under FSDP2, beside torch's own step and clipping of the same gradients."""
    net, other = sharded(made()), sharded(made())
    before = [weight.to_local().data_ptr() for weight in net.parameters()]
    options = MixedPrecisionOptions.for_bf16(max_grad_norm=most)
    optimizer = MixedPrecisionOptimizer(adamw(net, fused=fused), options, model=net)
    reference = adamw(other, fused=fused)
    norms, spans = [], []
    for step in range(3):
        backward(net, optimizer, step)
        reference.zero_grad()
        other(batch(step)).float().square().mean().backward()
        found = nn.utils.clip_grad_norm_(other.parameters(), most or math.inf)
        reference.step()
        result = optimizer.step()
        norms.append((result.grad_norm, float(whole(found))))
        spans.append(
            max(
                float((whole(mine) - whole(theirs)).abs().max())
                for mine, theirs in zip(net.parameters(), other.parameters(), strict=True)
            )
        )
    return {
        "same memory": before
        == [w.to_local().data_ptr() for w in optimizer.master_weights.values()],
        "same": all(
            optimizer.master_weights[name] is weight for name, weight in net.named_parameters()
        ),
        "norms": norms,
        "spans": spans,
    }


def overflows_on_one(rank, ranks):
    """A shard that is infinite on one rank is an overflow on all, which name the same parameter."""
    net = sharded(made())
    optimizer = MixedPrecisionOptimizer(adamw(net), MixedPrecisionOptions.for_bf16(), model=net)
    backward(net, optimizer, 0)
    spoil(optimizer, ranks)
    before = [whole(weight.detach()).clone() for weight in net.parameters()]
    result = optimizer.step()
    after = [whole(weight.detach()) for weight in net.parameters()]
    return result.applied, result.nonfinite, all(map(torch.equal, before, after))


def large_gradients(rank):
    """Finite on all ranks, though their squares are not."""
    net = sharded(made())
    options = MixedPrecisionOptions.for_bf16(max_grad_norm=1.0)
    optimizer = MixedPrecisionOptimizer(adamw(net), options, model=net)
    backward(net, optimizer, 0)
    for weight in net.parameters():
        weight.grad.to_local().fill_(1e30)
    result = optimizer.step()
    count = sum(weight.numel() for weight in net.parameters())
    return result.applied, result.grad_norm / (1e30 * math.sqrt(count))


def digest(optimizer):
    """Of masters and moments, whole."""
    held = [*optimizer.master_weights.values()]
    held += [optimizer.state[each][key] for each in held for key in ("exp_avg", "exp_avg_sq")]
    return [float(whole(each.detach()).double().sum()) for each in held]


def sharded_falls_back(rank, folder, *, with_rewrap=False):
    """Which is refused; what it is then told to do is begun: it is saved."""
    net, calls = sharded(made(), torch.float16), []
    options = MixedPrecisionOptions.for_fp16(max_consecutive_overflows=2)
    rewrap = (lambda model: calls.append(1) or model) if with_rewrap else None
    optimizer = MixedPrecisionOptimizer(adamw(net), options, model=net, rewrap=rewrap)
    backward(net, optimizer, 0)
    assert optimizer.step()
    problem = None
    for step in range(2):
        backward(net, optimizer, step)
        spoil(optimizer, {0})
        try:
            optimizer.step()
        except FallbackRequiresRewrapError as error:
            problem = str(error)
    with DistributedCheckpoint.create(options=CheckpointOptions(storage=folder)) as store:
        store.save(net, optimizer, SaveOptions(checkpoint_prefix="a", overwrite=True))
    stats = optimizer.get_stats()
    return problem, optimizer.has_fallback, stats.skipped_steps, len(calls), digest(optimizer)


def goes_on_in_fp32(rank, folder):
    net = sharded(made(1), None)
    options = MixedPrecisionOptions(precision="fp32")
    optimizer = MixedPrecisionOptimizer(adamw(net), options, model=net)
    with DistributedCheckpoint.create(options=CheckpointOptions(storage=folder)) as store:
        store.load(net, optimizer, LoadOptions(checkpoint_prefix="a"))
    found, scale = digest(optimizer), optimizer.scaler.scale
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = net(batch(0)).square().mean()
        optimizer.scale_loss(loss).backward()
        assert optimizer.step()
        dist.all_reduce(loss := loss.detach())
        losses.append(float(loss))
    return found, scale, losses, everyones(net.parameters())


def goes_on_in_fp32_under_ddp(rank, path):
    net = made()
    options = MixedPrecisionOptions.for_fp16(max_consecutive_overflows=1)
    optimizer = MixedPrecisionOptimizer(adamw(net), options, model=net)
    ddp = DistributedDataParallel(net)
    backward(ddp, optimizer, 0)
    assert optimizer.step()
    before, problem = digest(optimizer), None
    backward(ddp, optimizer, 1)
    next(net.parameters()).grad.fill_(math.inf)
    try:
        optimizer.step()
    except FallbackRequiresRewrapError as error:
        problem = str(error)
    if rank == 0:
        save_checkpoint(create_checkpoint(optimizer), path)
    dist.barrier()
    net = made(5)
    options = MixedPrecisionOptions(precision="fp32")
    optimizer = MixedPrecisionOptimizer(adamw(net), options, model=net)
    ddp = DistributedDataParallel(net)
    load_and_restore(optimizer, path)
    same = digest(optimizer) == before
    equal = []
    for step in (2, 3):
        backward(ddp, optimizer, step)
        assert optimizer.step()
        equal.append(everyones([*net.parameters(), *(p.grad for p in net.parameters())]))
    return problem, same, equal


def refused(rank, case):
    """What is said of a model that FSDP2 shards otherwise than the options want."""
    options = MixedPrecisionOptions.for_bf16()
    given = True
    match case:
        case "16-bit":
            net = sharded(made().bfloat16())
        case "precision":
            net = sharded(made(), torch.float16)
        case "patterns":
            net, options = sharded(made()), MixedPrecisionOptions(fp32_layer_patterns=["norm"])
        case "remainder":
            net, options = sharded(made()), MixedPrecisionOptions(master_storage="remainder")
        case "no model":
            net, given = sharded(made()), False
    try:
        MixedPrecisionOptimizer(adamw(net), options, model=net if given else None)
    except ValueError as error:
        return str(error)
    return None
