"""What ranks do in the tests of ``save_async``: trainings that go on with their collectives while
they are saved, and one rank that is early, late, wrong or gone."""

import contextlib
import hashlib
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_jobs import mesh_of
from fault_jobs import (
    TIMEOUT_S,
    Ended,
    TrappedStorage,
    checkpointer,
    ended_with,
    listen,
    state_of,
    telling,
)
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from holdfast.coordination import TorchCoordinator
from holdfast.distributed import DistributedCheckpoint, LoadOptions, SaveOptions
from holdfast.errors import SaveError, SaveInProgressError
from holdfast.storage import LocalStorage

SOON_S = 60.0
CALM_S = 30.0  # without a sign of life, where no rank is stopped


class Net(nn.Module):
    """Sizes that no number of ranks divides; weights that are not small, and a buffer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(301, 211)
        self.up = nn.Linear(211, 307)
        self.norm = nn.BatchNorm1d(307)
        self.down = nn.Linear(307, 211)
        self.head = nn.Linear(211, 301, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words):
        hidden = self.embed(words)
        hidden = self.down(torch.relu(self.norm(self.up(hidden))))
        return self.head(hidden)


def new_training(kind, seed):
    torch.manual_seed(seed)
    net = Net()
    world = dist.get_world_size()
    if kind == "ddp" and world > 1:
        net = nn.parallel.DistributedDataParallel(net, broadcast_buffers=True)
    if kind == "fsdp":
        for layer in (net.up, net.down):
            fully_shard(layer, mesh=mesh_of((world,)))
        fully_shard(net, mesh=mesh_of((world,)))
    return net, torch.optim.AdamW(net.parameters(), lr=0.01, fused=kind == "fsdp")


def train_step(net, optimizer, step, rank):
    """Forward, backward and a step, with the collectives of the parallelism. Returns the loss."""
    made = torch.Generator().manual_seed(1000 * step + rank)
    words = torch.randint(0, 301, (16,), generator=made)
    loss = nn.functional.cross_entropy(net(words), words.roll(1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def digest_of(net, optimizer):
    """Of the whole state, whatever rank holds which part of it; buffers are rank 0's."""
    seen = hashlib.sha256()
    names = {p: n.removeprefix("module.") for n, p in net.named_parameters()}
    values = {n.removeprefix("module."): v for n, v in net.state_dict().items()}
    for parameter, name in names.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            values[f"{name} {key}"] = value
    for name in sorted(values):
        if "running" not in name and "tracked" not in name:
            seen.update(name.encode())
            seen.update(_whole(values[name]).contiguous().view(-1).numpy().tobytes())
    return seen.hexdigest()


def _whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


@contextlib.contextmanager
def saver(folder, **options):
    with (
        TorchCoordinator(liveness_timeout_s=CALM_S, timeout_s=TIMEOUT_S) as ranks,
        DistributedCheckpoint(coordinator=ranks, storage=folder, **options) as ckpt,
    ):
        yield ckpt


def train_job(rank, folder, kind, *, steps=12, every=None, **options):
    """Train, and save every few steps. Returns the losses, the state in the end, and that of each
    save."""
    net, optimizer = new_training(kind, seed=1)
    losses, saved = [], {}
    with saver(folder) as ckpt:
        for step in range(steps):
            if every and step % every == 1:
                saved[f"step_{step}"] = digest_of(net, optimizer)
                # The running averages differ between ranks; one's are as good as another's.
                chosen = SaveOptions(
                    checkpoint_prefix=f"step_{step}", step=step, replicas_from=0, **options
                )
                ckpt.save_async(net, optimizer, chosen, extra={"step": step})
            losses.append(train_step(net, optimizer, step, rank))
        ckpt.wait(SOON_S)
    return losses, digest_of(net, optimizer), saved


def load_job(rank, folder, kind, prefix):
    net, optimizer = new_training(kind, seed=77)
    extra = {"step": -1}
    with saver(folder) as ckpt:
        options = LoadOptions(checkpoint_prefix=prefix, load_rng_state=False)
        ckpt.load(net, optimizer, options, extra=extra)
    assert prefix == f"step_{extra['step']}"
    return digest_of(net, optimizer)


class Hold:
    """Holds the saves of this rank before they look at anything, until it is released."""

    def __init__(self, ckpt: DistributedCheckpoint) -> None:
        self._released = threading.Event()
        ranks: Any = ckpt.coordinator
        real = ranks.operation

        @contextlib.contextmanager
        def operation(name, timeout_s=None):
            if name == "save":
                assert self._released.wait(SOON_S)
            with real(name, timeout_s) as found:
                yield found

        ranks.operation = operation

    def release(self) -> None:
        self._released.set()


def told(handle) -> Ended:
    error = handle.exception(SOON_S)
    value = handle.prefix if error is None else None
    return Ended(at_s=time.monotonic(), value=value) if error is None else ended_with(error)


def wrong_job(rank, folder, wrong):
    """Rank 1 has something that cannot be saved, or changes something that is being saved."""
    kind = "fsdp" if wrong.startswith("fsdp") else "ddp"
    net, optimizer = new_training(kind, seed=1)
    train_step(net, optimizer, 0, rank)
    own = {"value": object(), "state_dict": _Failing()}.get(wrong, 1)
    chosen = SaveOptions(step=5 + (rank if wrong == "step" else 0), replicas_from=0)
    with saver(folder) as ckpt:
        hold = Hold(ckpt)
        began_s = time.monotonic()
        try:
            handle = ckpt.save_async(net, optimizer, chosen, extra={"x": own if rank else 1})
            if rank == 1 and wrong in ("in_place", "fsdp_data", "fsdp_numpy"):
                _change(net, wrong)
            hold.release()
            end = told(handle)
        except SaveError as error:
            hold.release()
            end = ended_with(error)
        took_s = time.monotonic() - began_s
        train_step(net, optimizer, 1, rank)
        return end, took_s, _goes_on(ckpt, net, optimizer)


def _change(net, how):
    parameter = net.up.weight if isinstance(net, Net) else net.module.up.weight
    local = getattr(parameter, "_local_tensor", parameter)
    if how == "in_place":
        with torch.no_grad():
            local.add_(1)
    elif how == "fsdp_data":
        local.data.mul_(2)
    else:
        local.detach().numpy()[:] += 1


def _goes_on(ckpt, net, optimizer):
    """What the next save of all ranks ends with."""
    return ckpt.save_async(net, optimizer, SaveOptions(replicas_from=0)).result(SOON_S) is not None


class _Failing:
    def state_dict(self):
        raise ZeroDivisionError("on purpose")

    def load_state_dict(self, state):
        raise NotImplementedError


def harmed_job(rank, folder, harm):
    """As ``fault_jobs.save_job``, in the background, while the training takes steps."""
    with checkpointer(folder, harm, rank) as (ckpt, trap):
        state = state_of(2, rank, trap)
        chosen = SaveOptions(checkpoint_prefix="next", progress=telling(trap))
        handle = ckpt.save_async(state.model, state.optimizer, chosen, extra=state.extra)
        while not handle.wait(0.01):
            for parameter in state.model.parameters():
                parameter.grad = torch.ones_like(parameter)
            state.optimizer.step()
        return told(handle)


class _Events:
    """A trap that holds this rank at one event."""

    hanging = False

    def __init__(self, event):
        self._event = event
        self.reached, self._open = threading.Event(), threading.Event()

    def __call__(self, event):
        if event == self._event and not self.reached.is_set():
            self.reached.set()
            assert self._open.wait(SOON_S)

    def open(self):
        self._open.set()


def cancel_job(rank, folder, event, who):
    """One rank, which is held at an event of its own, gives the save up."""
    trap = _Events(event if rank == who else "none")
    net, optimizer = new_training("fsdp", seed=1)
    storage = TrappedStorage(LocalStorage(folder), trap)
    records = []
    with saver(storage, on_save=records.append) as ckpt:
        listen(ckpt.coordinator, trap)
        handle = ckpt.save_async(net, optimizer, SaveOptions(replicas_from=0))
        agreed = None
        if rank == who:
            assert trap.reached.wait(SOON_S)
            agreed = handle.cancel()
            trap.open()
        error = handle.exception(SOON_S)
        dist.barrier()
        left = [info.key for info in storage.list() if "metadata" in info.key]
        text = type(error).__name__ if error is None else f"{type(error).__name__}: {error}"
        dist.barrier()
        ckpt.wait(SOON_S)  # that it was cancelled is no failure, on no rank
        goes_on = _goes_on(ckpt, net, optimizer)
        return agreed, handle.cancelled(), text, left, records[0].was_cancelled, goes_on


def apart_job(rank, folder):
    """Rank 0 has taken two steps more by the time that rank 1 comes to the save."""
    torch.manual_seed(1)
    net = Net()
    fully_shard(net, mesh=mesh_of((dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    _step_alone(net, optimizer)
    expected = digest_of(net, optimizer)
    with saver(folder) as ckpt:
        if rank != 0:
            dist.barrier()
        handle = ckpt.save_async(
            net, optimizer, SaveOptions(checkpoint_prefix="step_1", replicas_from=0),
            extra={"step": 1},
        )  # fmt: skip
        _step_alone(net, optimizer)
        _step_alone(net, optimizer)
        if rank == 0:
            dist.barrier()
        handle.result(SOON_S)
    return expected, digest_of(net, optimizer)


def _step_alone(net, optimizer):
    for parameter in net.parameters():
        parameter.grad = parameter.detach() * 0.5
    optimizer.step()
    optimizer.zero_grad()


def refuse_job(rank, folder):
    """The save is over on rank 1, and not yet on rank 0, when the next is asked for."""
    over = threading.Event()
    net, optimizer = new_training("ddp", seed=1)
    chosen = SaveOptions(when_busy="refuse", replicas_from=0)

    def on_save(record):
        if rank == 0:
            assert over.wait(SOON_S)

    with saver(folder, on_save=on_save) as ckpt:
        first = ckpt.save_async(net, optimizer, chosen)
        if rank != 0:
            first.result(SOON_S)
        dist.barrier()
        done = first.done()
        try:
            ckpt.save_async(net, optimizer, chosen)
        except SaveInProgressError as error:
            refused = str(error)
        else:
            refused = None
        over.set()
        first.result(SOON_S)
        ckpt.wait(SOON_S)
        dist.barrier()
        second = ckpt.save_async(net, optimizer, chosen).result(SOON_S)
        return done, refused, second != first.result()


def uneven_job(rank, folder):
    """Rank 1 leaves out a save that rank 0 makes."""
    net, optimizer = new_training("ddp", seed=1)
    ends = []
    with saver(folder) as ckpt:
        for number in range(2):
            if rank == 1 and number == 0:
                continue
            chosen = SaveOptions(replicas_from=0, step=number)
            ends.append(told(ckpt.save_async(net, optimizer, chosen)))
            if ends[-1].error is not None:
                break
    return ends
