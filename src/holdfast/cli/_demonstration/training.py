"""One rank of the demo's training, started by torchrun. Tells what happens, a line of JSON each.

Run as ``python -m torch.distributed.run ... -m holdfast.cli._demonstration.training JOB``.
"""

import contextlib
import hashlib
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import distributed as dist

import holdfast
from holdfast.cli._demonstration.jobs import (
    KILLED_RANK,
    PARTS,
    Began,
    Ended,
    Event,
    Job,
    Killed,
    Lost,
    Planned,
    Resumed,
    Saved,
    Stepped,
)
from holdfast.cli._demonstration.model import CharacterGPT, Text, loss_of
from holdfast.distributed import (
    CheckpointOptions,
    DistributedCheckpoint,
    Progress,
    SaveOptions,
    SaveRecord,
)
from holdfast.precision import MixedPrecisionOptimizer, MixedPrecisionOptions
from holdfast.storage import LocalStorage, limited


def tell(event: Event) -> None:
    """One write, so that lines of several ranks do not mix. For any thread."""
    os.write(sys.stdout.fileno(), msgspec.json.encode(event) + b"\n")


class Training:
    """What a run is made of. Every rank has all of it, as with DDP."""

    def __init__(self, job: Job) -> None:
        torch.manual_seed(1609)
        self.text = Text(job.course.size)
        self.model = CharacterGPT(job.course.size, len(self.text.letters))
        self.optimizer = MixedPrecisionOptimizer(
            torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), fused=True),
            MixedPrecisionOptions.for_bf16(max_grad_norm=1.0),
            model=self.model,
        )
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=3e-3, total_steps=job.course.steps + 1, cycle_momentum=False
        )
        self.weights = list(self.model.parameters())

    @property
    def extra(self) -> dict[str, object]:
        return {"scheduler": self.scheduler}

    def step(self, number: int) -> float:
        """Train on a batch of which this rank has some parts. The gradients of all parts are
        gathered and then added up, part by part, by every rank: DDP's sums would round otherwise on
        another number of ranks."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        mine = torch.stack([self._part(number, part) for part in range(rank, PARTS, ranks)])
        gathered = [torch.empty_like(mine) for _ in range(ranks)]
        dist.all_gather(gathered, mine)
        total = torch.zeros_like(mine[0])
        for part in range(PARTS):
            total += gathered[part % ranks][part // ranks]
        total /= PARTS
        gradients = total[:-1].split([weight.numel() for weight in self.weights])
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.grad = gradient.view_as(weight).to(weight.dtype)
        if self.optimizer.step():
            self.scheduler.step()
        self.optimizer.zero_grad()
        return float(total[-1])

    def _part(self, number: int, part: int) -> Any:
        """The gradient of one part, and after it the loss."""
        letters, wanted = self.text.part(number, part)
        loss = loss_of(self.model(letters), wanted)
        loss.backward()
        gradients = [weight.grad.float().flatten() for weight in self.weights]
        self.optimizer.zero_grad()
        return torch.cat([*gradients, loss.detach().reshape(1)])

    def digest(self) -> str:
        """Of every bit that training has made: weights, masters and the optimizer's moments."""
        found = hashlib.sha256()
        # In the order of parameters: a state that was loaded has an order of its own.
        masters = [each for group in self.optimizer.param_groups for each in group["params"]]
        moments = (
            value for each in masters for _, value in sorted(self.optimizer.state[each].items())
        )
        for tensor in (*self.weights, *masters, *moments):
            plain = tensor.detach().contiguous().reshape(-1)
            found.update(plain.view(torch.uint8).numpy().tobytes())
        return found.hexdigest()


def follow_plan(training: Training, job: Job) -> None:
    """Have the model follow the plan of the job, if that has one."""
    if job.plan is None:
        return
    path = Path(job.plan)
    if path.exists():
        holdfast.ActivationPlan.from_json(path.read_bytes()).apply(training.model)
        return
    letters, wanted = training.text.part(0, 0)
    plan = holdfast.plan(
        training.model, letters, job.course.budget, loss=lambda logits: loss_of(logits, wanted)
    )
    plan.apply(training.model)
    if dist.get_rank() == 0:
        path.write_text(plan.to_json(), "utf-8")
        told = plan.summary
        tell(
            Planned(
                before_bytes=told.save_all_peak_bytes,
                after_bytes=plan.peak_bytes,
                budget_bytes=plan.budget_bytes,
                planning_s=told.planning_s,
            )
        )


class Saving:
    """The saves of one run."""

    def __init__(self, training: Training, job: Job, store: str) -> None:
        self._training = training
        self._job = job
        storage = limited(LocalStorage(store), write_bytes_per_s=job.course.write_bytes_per_s)
        options = CheckpointOptions(storage=storage, on_save=_tell_of_save)
        self.checkpoint = DistributedCheckpoint.create(options=options)

    def resume(self) -> int:
        """The step that the training is at, then."""
        training = self._training
        found = self.checkpoint.resume(training.model, training.optimizer, extra=training.extra)
        if found is None:
            return 0
        if dist.get_rank() == 0:
            tell(
                Resumed(
                    prefix=found.prefix,
                    step=found.step or 0,
                    saved_by=found.metadata.world_size,
                    ranks=dist.get_world_size(),
                    passed_over=tuple((each.prefix, each.reason) for each in found.passed_over),
                )
            )
        return found.step or 0

    def save(self, step: int, loss: float) -> None:
        """Begin to save. The training goes on meanwhile."""
        is_last = self._job.is_killed and step == self._job.course.killed_in
        if is_last:
            # torchrun ends all ranks as soon as one has died: here they say first how they knew.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        options = SaveOptions(
            checkpoint_prefix=f"step_{step}",
            step=step,
            metrics={"loss": loss},
            overwrite=True,
            progress=_killer(step) if is_last and dist.get_rank() == KILLED_RANK else None,
        )
        training = self._training
        self.checkpoint.save_async(
            training.model, training.optimizer, options, extra=training.extra
        )


def _killer(step: int) -> Any:
    def be_killed(progress: Progress) -> None:
        """End this process as soon as half of its bytes, and not all of them, are written."""
        if progress.phase == "write" and progress.done_bytes * 2 > progress.total_bytes:
            tell(
                Killed(
                    rank=progress.rank,
                    step=step,
                    done_bytes=progress.done_bytes,
                    total_bytes=progress.total_bytes,
                    at_s=time.monotonic(),
                )
            )
            os.kill(os.getpid(), signal.SIGKILL)

    return be_killed


def _tell_of_save(record: SaveRecord) -> None:
    step = record.step or 0
    if record.error is not None:
        tell(Lost(rank=record.rank, step=step, story=record.error, at_s=time.monotonic()))
        return
    tell(
        Saved(
            step=step,
            rank=record.rank,
            ranks=record.world_size,
            stall_s=record.stall_s,
            total_s=record.total_s,
            written_bytes=record.written_bytes,
        )
    )


def main() -> None:
    job = msgspec.json.decode(sys.argv[1], type=Job)
    torch.set_num_threads(1)  # or kernels would share their sums out among threads, and round anew
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    training = Training(job)
    is_first = dist.get_rank() == 0
    if is_first:
        count = sum(weight.numel() for weight in training.weights)
        ranks = dist.get_world_size()
        tell(Began(ranks=ranks, parameters=count, characters=training.text.length))
    follow_plan(training, job)
    with contextlib.ExitStack() as stack:
        saving = None if job.store is None else Saving(training, job, job.store)
        if saving is not None:
            stack.enter_context(saving.checkpoint)
        done = 0 if saving is None else saving.resume()
        for step in range(done + 1, job.course.steps + 1):
            loss = training.step(step)
            if is_first:
                tell(Stepped(step=step, loss=loss))
            if saving is not None and step % job.course.every == 0:
                saving.save(step, loss)
    if is_first:
        tell(Ended(digest=training.digest()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
