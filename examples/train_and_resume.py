"""A training loses a rank while it saves, and goes on from what was saved, on more ranks.

Two ranks of FSDP2 train while they save, one of them is killed in its next save; then three ranks
resume from what is there. Runs alone: ``python examples/train_and_resume.py``.
"""

import os
import signal
import tempfile
import time
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import CosineAnnealingLR

from holdfast.distributed import (
    CheckpointOptions,
    DistributedCheckpoint,
    Progress,
    SaveHandle,
    SaveOptions,
)
from holdfast.errors import RankLostError
from holdfast.testing import RankGang
from telling import say, show

BATCH = 12  # rows of all ranks together, for 1, 2, 3 or 4 of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a training ended on one rank: the loss of each step, and what the checkpoint said."""

    losses: list[float]
    story: str
    seconds: float = 0.0
    waited: float = 0.0


class Training:
    """What a run is made of. Every rank makes one; FSDP2 splits the model among them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 250), nn.GELU(), nn.Linear(250, 8)]
        self.model = nn.Sequential(*layers)
        for layer in (*layers, self.model):
            if not isinstance(layer, nn.GELU):
                fully_shard(layer)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = CosineAnnealingLR(self.optimizer, T_max=30)

    def step(self, number: int, rank: int, ranks: int) -> float:
        """One step on this rank's rows of a batch, which depends on nothing but the number."""
        random = torch.Generator().manual_seed(number)
        rows = torch.randn(BATCH, 64, generator=random)[rank::ranks]
        loss = nn.functional.mse_loss(self.model(rows), rows[:, :8].sin())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        whole = loss.detach().clone()
        torch.distributed.all_reduce(whole)
        return float(whole) / ranks


def train_until_killed(rank: int, folder: str) -> Ended:
    """Train 30 steps and save after 20 and 30; in the second save rank 1 is killed."""

    def be_killed_when_written(progress: Progress) -> None:
        if progress.phase == "write" and progress.done_bytes == progress.total_bytes:
            os.kill(os.getpid(), signal.SIGKILL)

    training = Training()
    options = CheckpointOptions(storage=folder)
    checkpoint = DistributedCheckpoint.create(options=options)
    losses = [training.step(number, rank, 2) for number in range(20)]
    first = save(checkpoint, training, SaveOptions(checkpoint_prefix="step_20", step=20))
    losses += [training.step(number, rank, 2) for number in range(20, 30)]  # while it is saved
    first.result()
    waited = first.record.stall_s if first.record is not None else 0.0
    progress = be_killed_when_written if rank == 1 else None
    began = time.monotonic()
    second = save(checkpoint, training, SaveOptions(checkpoint_prefix="step_30", progress=progress))
    try:
        second.result()
    except RankLostError as error:
        seconds = time.monotonic() - began
        return Ended(losses=losses, story=str(error), seconds=seconds, waited=waited)
    return Ended(losses=losses, story="saved, though a rank was killed")


def save(checkpoint: DistributedCheckpoint, training: Training, options: SaveOptions) -> SaveHandle:
    extra = {"scheduler": training.scheduler}
    return checkpoint.save_async(training.model, training.optimizer, options, extra=extra)


def resume(rank: int, folder: str, ranks: int) -> Ended:
    """Go on from the newest checkpoint, whoever saved it, until step 30."""
    training = Training()
    with DistributedCheckpoint.create(options=CheckpointOptions(storage=folder)) as checkpoint:
        extra: dict[str, object] = {"scheduler": training.scheduler}
        done = checkpoint.resume(training.model, training.optimizer, extra=extra)
    if done is None:
        return Ended(losses=[], story="there is no checkpoint")
    story = f"{done.prefix}, saved by {done.metadata.world_size} ranks, loaded by {ranks}"
    steps = range(done.step or 0, 30)
    return Ended(losses=[training.step(number, rank, ranks) for number in steps], story=story)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as folder:
        with RankGang(2) as gang:
            gang.start(train_until_killed, folder)
            (outcome,) = gang.outcomes(60, ranks=[0])
        before = outcome.value
        if not isinstance(before, Ended):
            raise SystemExit(f"rank 0 did not end as expected: {outcome.error}")
        show("two ranks save while they train", f"the training waited {before.waited:.3f} s for it")
        show("rank 1 is killed in its second save", f"rank 0 knew within {before.seconds:.2f} s:")
        say(f"      {before.story}")
        with RankGang(3) as gang:
            after: Ended = gang.run(resume, folder, 3)[0]
        show("the training goes on with 3 ranks", after.story)
        lost, found = before.losses[-1], after.losses[-1]
        off = max(abs(a - b) / b for a, b in zip(after.losses, before.losses[20:], strict=True))
        show(
            "its loss at step 30",
            f"{found:.6f}; with 2 ranks it was {lost:.6f} (at most {off:.0e} off in 10 steps)",
        )


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    main()
