"""What ranks do in the tests of `holdfast.plan`: a model replicated or sharded, its steps as they
are and the same under a plan."""

import datetime as dt
import functools
import gc
import json

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.activation import measure_peak
from holdfast.activation._planning.agreeing import together
from holdfast.errors import BudgetError, PlanError

WIDTH, PLACES, DEPTH = 32, 16, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        query, key, value = self.mixed(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(2))


class Added(torch.autograd.Function):
    """The sum over the ranks, whose backward is one too."""

    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x := x.clone())
        return x

    @staticmethod
    def backward(ctx, gradient):
        dist.all_reduce(gradient := gradient.clone())
        return gradient


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x):
        return functional.gelu(self.up(x))


class Block(nn.Module):
    """What its norms made is made again from their weights: a stale weight would show.

    ``talks``: ranks add something up in its forward. ``works``: it does so much for nothing, which
    takes time."""

    def __init__(self, *, talks=False, works=0):
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.wide, self.narrow = Wide(), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.talks, self.works = talks, works

    def forward(self, x):
        for _ in range(self.works):
            torch.mm(torch.ones(WIDTH, WIDTH), torch.ones(WIDTH, WIDTH))
        x = x + self.drop(self.attention(self.before(x)))
        x = x + self.drop(self.narrow(self.wide(self.between(x))))
        return x - Added.apply(x.mean((0, 1))) if self.talks else x


class Net(nn.Module):
    """``spare``: with a parameter that no step uses."""

    def __init__(self, *, spare=False, **words):
        super().__init__()
        self.start = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(**words) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 5)
        if spare:
            self.spare = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return {"loss": self.head(x).float().square().mean()}


@functools.cache
def settle():
    """Have the meter look at what the tests make, not at all that torch has imported."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


@functools.cache
def mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def made(kind, words=None, **net_words):
    """``kind``: alone, ddp, tp, fsdp, or "fsdp inside" with units inside of the blocks too."""
    settle()
    words = words or {}
    torch.manual_seed(5)
    net = Net(**net_words)
    with torch.no_grad():
        for block in net.blocks:  # of ones, nobody could tell a lost weight from a kept one
            block.before.weight.uniform_(0.5, 1.5)
            block.between.weight.uniform_(0.5, 1.5)
    match kind:
        case "alone":
            return net
        case "ddp":
            return DistributedDataParallel(net, **words)
        case "tp":
            for block in net.blocks:
                ways = {"wide.up": ColwiseParallel(), "narrow": RowwiseParallel()}
                parallelize_module(block, mesh(), ways)
            return net
        case "fsdp inside":
            for block in net.blocks:
                fully_shard(block.wide, mesh=mesh(), **words)
    for block in net.blocks:
        fully_shard(block, mesh=mesh(), **words)
    return fully_shard(net, mesh=mesh(), **words)


def batch(samples=6, seed=0, kind=""):
    """Another on every rank; not where ranks share the work on one."""
    rank = 0 if kind == "tp" else dist.get_rank()
    drawn = torch.Generator().manual_seed(100 * rank + seed)
    return torch.randn(samples, PLACES, WIDTH, generator=drawn)


def whole(tensor):
    """All of a tensor that ranks share out. By a plain gather: ``full_tensor`` waits for one of
    torch's functional collectives, in which a rank has died of a segmentation fault, twice in some
    200 runs of these jobs and never in 2,000 steps without a plan; why is not known."""
    if not isinstance(tensor, DTensor):
        return tensor
    (placement,), local = tensor.placements, tensor.to_local()
    if not placement.is_shard():
        return tensor.full_tensor()
    length = tensor.shape[placement.dim]
    shape = list(local.shape)
    shape[placement.dim] = -(-length // dist.get_world_size())
    parts = [local.new_empty(shape) for _ in range(dist.get_world_size())]
    own = local.new_zeros(shape)
    own.narrow(placement.dim, 0, local.shape[placement.dim]).copy_(local)
    dist.all_gather(parts, own)
    return torch.cat(parts, placement.dim).narrow(placement.dim, 0, length)


def allocate(net):
    """Gradients of 0, as a step finds them after zero_grad(set_to_none=False)."""
    for parameter in net.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        else:
            parameter.grad.zero_()


def told(net, given, run=None):
    """The loss and all gradients of a step, and the random stream after it."""
    allocate(net)
    torch.manual_seed(7 + dist.get_rank())
    loss = (run or _step)(net, given)
    found = {name: whole(each.grad).clone() for name, each in net.named_parameters()}
    return {"loss": loss.detach(), "stream": torch.get_rng_state(), **found}


def _step(net, given):
    loss = net(given)["loss"]
    loss.backward()
    return loss


def differing(one, other):
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def weights(net):
    return {name: whole(value).clone() for name, value in net.state_dict().items()}


def peak(net, given):
    """The lowest of some: buffers live until a collective ends, sooner or later."""
    peaks = []
    for _ in range(4):
        allocate(net)
        peaks.append(measure_peak(_step, net, given).peak_bytes)
    return min(peaks)


OWN = {
    "digest",
    "device",
    "save_all_peak_bytes",
    "measured_peak_bytes",
    "step_s",
    "predicted_step_s",
    "measured_step_s",
    "before",
    "after",
    "planning_s",
}
"""What a plan's report says of the rank that it was made on."""


def common(plan):
    """A plan's JSON, but for what was measured on this rank."""
    told = json.loads(plan.to_json())
    summary = {name: each for name, each in told["summary"].items() if name not in OWN}
    return {name: each for name, each in told.items() if name not in OWN} | {"summary": summary}


def facts(plan, applied):
    decision = plan.decision
    return {
        "plan": common(plan),
        "budget": plan.budget_bytes,
        "stages": [stage.name for stage in decision.stages],
        "kinds": {each.kind for each in decision.actions().stages.values()},
        "recipes": [len(each.recipes.made) if each.recipes else 0 for each in decision.stages],
        "fallbacks": [each.reason for each in applied.fallbacks],
    }


def planned(rank, kind, words, budget, *, samples=(6, 6), slow=(0, 0), **net_words):
    """Steps under a plan beside the same without; the weights after training with and without."""
    if "mp_policy" in words:
        torch._C._set_mkldnn_enabled(False)  # its bf16 kernels die of SIGILL on some machines
    net = made(kind, words, works=slow[rank], **net_words)
    given = batch(samples[rank], kind=kind)
    before = weights(net)
    expected = told(net, given)
    plan = holdfast.plan(net, given, budget)
    found = differing(expected, told(net, given))
    with plan.applied(net) as applied:
        found += differing(expected, told(net, given))
        taken = peak(net, given)
        found += differing(before, weights(net))
    everything = peak(net, given)
    found += differing(before, weights(net))
    with plan.applied(net):
        trained = _trained(net, given)
    found += differing(trained, _trained(made(kind, words, works=slow[rank], **net_words), given))
    return {
        "differing": found,
        "peak": taken / plan.budget_bytes,
        "share": taken / everything,
        "thought": plan.summary.save_all_peak_bytes / everything,
        **facts(plan, applied),
    }


def _trained(net, given):
    torch.manual_seed(7 + dist.get_rank())
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        _step(net, given)
        optimizer.step()
    return weights(net)


def unlike(rank, kind, budget, later, **net_words):
    """Steps under a plan with batches of other sizes than the sample's, on each rank another."""
    net = made(kind, **net_words)
    plan = holdfast.plan(net, batch(), budget)
    found = []
    with plan.applied(net) as applied:
        for sizes in later:
            given = batch(sizes[rank], seed=sizes[rank])
            got = told(net, given)
            applied.undo()
            found += differing(told(net, given), got)
            applied._install({name: net.get_submodule(name) for name in _stages(plan)})
    return {"differing": found, **facts(plan, applied)}


def _stages(plan):
    return [stage.name for stage in plan.decision.stages]


def accumulated(rank, kind, words, way):
    """Two batches whose gradients are added up before ranks exchange them, or two forwards before
    the first backward."""
    given = [batch(seed=1), batch(seed=2)]
    net = made(kind, words)

    def apart(net, given):
        first, second = given
        if kind == "ddp":
            with net.no_sync():
                _step(net, first)
        else:
            net.set_requires_gradient_sync(False)
            _step(net, first)
            net.set_requires_gradient_sync(True)
        return _step(net, second)

    def both(net, given):
        losses = [net(each)["loss"] for each in given]
        for loss in losses:
            loss.backward()
        return losses[1]

    run = {"apart": apart, "both": both}[way]
    expected = told(net, given, run)
    plan = holdfast.plan(net, given[0], "60%")
    with plan.applied(net) as applied:
        got = told(net, given, run)
    return {"differing": differing(expected, got), **facts(plan, applied)}


def inner(rank):
    """A plan for the model inside of the wrapper, which is then trained through the wrapper."""
    net = made("ddp")
    given = batch()
    expected = told(net, given)
    plan = holdfast.plan(net.module, given, "50%")
    with plan.applied(net.module) as applied:
        got = told(net, given)
        taken = peak(net, given)
    refused = ""
    try:
        plan.apply(net)
    except PlanError as error:
        refused = str(error)
    return {
        "differing": differing(expected, got),
        "peak": taken / plan.budget_bytes,
        "refused": refused,
        **facts(plan, applied),
    }


def refused(rank, kind, budgets, *, samples=(6, 6), asked=({}, {}), **net_words):
    """What a rank is told when there is no plan, and whether the model is then as it was."""
    net = made(kind, **net_words)
    given = batch(samples[rank])
    expected = told(net, given)
    problem = None
    try:
        holdfast.plan(net, given, budgets[rank], **asked[rank])
    except (BudgetError, PlanError, ValueError) as error:
        problem = type(error).__name__, str(error)
    return problem, differing(expected, told(net, given))


def broken(rank, kind, where, call):
    """One rank whose model raises in the forward of its so many-th call: what each is told, and
    whether they can then train together as if nothing had been."""
    net = made(kind)
    given = batch()
    expected = told(net, given)
    calls = []

    def fail(*_):
        calls.append(rank)
        if rank == where and len(calls) == call:
            raise ZeroDivisionError("the batch of this rank is empty")

    hook = (net.module if kind == "ddp" else net).head.register_forward_pre_hook(fail)
    problem = None
    try:
        holdfast.plan(net, given, "60%")
    except (ZeroDivisionError, PlanError) as error:
        problem = type(error).__name__, str(error)
    hook.remove()
    return problem, len(calls), differing(expected, told(net, given))


def hooked(rank, kind):
    """What is told where an optimizer steps in backward, by hooks on what the wrapper has."""
    net = made(kind)
    given = batch()
    before = weights(net)
    problem = ""
    handle = next(net.parameters()).register_post_accumulate_grad_hook(lambda _: None)
    try:
        holdfast.plan(net, given, "60%")
    except PlanError as error:
        problem = str(error)
    handle.remove()
    holdfast.plan(net, given, "60%")
    return problem, differing(before, weights(net))


def unsynced(rank):
    """Planned while FSDP keeps gradients to itself: what is told, and the gradients in the end."""
    found = []
    problem = ""
    for tries in (False, True):
        net = made("fsdp")
        torch.manual_seed(3)
        net.set_requires_gradient_sync(False)
        _step(net, batch(seed=1))
        try:
            if tries:
                holdfast.plan(net, batch(), "60%")
        except PlanError as error:
            problem = str(error)
        net.set_requires_gradient_sync(True)
        _step(net, batch(seed=2))
        found.append({name: whole(each.grad) for name, each in net.named_parameters()})
    return problem, differing(*found)


def decided(rank):
    """What ranks that would decide differently end with, and who was asked."""
    asked = []

    def decide():
        asked.append(rank)
        return f"as rank {rank} would have it"

    with together() as ranks:
        first = ranks.decided(decide)
        agreed = ranks.agreed(10 * rank, rank, "heaviest")
        return first, agreed, ranks.decided(decide), asked


def late(rank):
    """What a rank is told that waits where the other does not come."""
    try:
        with together() as ranks:
            assert ranks._store.timeout == dist.group.WORLD.get_group_store().timeout
            # Not sooner, for connecting may take as long, too.
            ranks._store.set_timeout(dt.timedelta(seconds=1))
            if rank == 0:
                ranks.meet()
    except PlanError as error:
        return str(error)
    return ""
