"""A small training of which every part must come back for it to go on as if nothing had happened:
dropout, AdamW, a schedule, and a loader in the middle of an epoch. On any number of ranks.

Run by the ranks of test_resume_ranks.py and test_exact_resume.py, and by resume_job.py. What a rank
has to say it writes down at once, step by step, so that it is known though the rank is killed.
"""

import os
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from checkpoint_jobs import parallel
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LinearLR, SequentialLR
from torch.utils.data import Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast.distributed import CheckpointOptions, DistributedCheckpoint, SaveOptions

ROWS = 66
BATCH = 12  # rows of a step, of all ranks together: for 1, 2, 3 or 4 of them
WIDTH = 16
EVERY = 3  # steps between two saves


class Rows(Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        made = torch.Generator().manual_seed(index)
        return index, torch.randn(WIDTH, generator=made)


class Dealt(Sampler):
    """One order of all rows for the whole job, dealt out to its ranks like cards. What it saves is
    how many rows the job has had, so that any number of ranks can go on from there."""

    def __init__(self, rank, ranks):
        self._rank = rank
        self._ranks = ranks
        self._epoch = 0
        self._had = 0

    def __iter__(self):
        seed = torch.Generator().manual_seed(self._epoch)
        order = torch.randperm(ROWS - ROWS % BATCH, generator=seed).tolist()
        for row in order[self._had + self._rank :: self._ranks]:
            self._had += self._ranks
            yield row
        self._epoch += 1
        self._had = 0

    def state_dict(self):
        return {"epoch": self._epoch, "had": self._had}

    def load_state_dict(self, state):
        self._epoch, self._had = state["epoch"], state["had"]


class Training:
    """``hidden`` makes the state larger: it is then written for a while.

    With more than two ranks ``kind="ddp"`` is not exact, checkpoints or not: DDP arranges its
    gradients anew after its first step, and with that the order in which it adds them.
    """

    def __init__(self, rank, ranks, *, kind="ddp", hidden=32, workers=0, dropout=0.3):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(WIDTH, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, 4)
        )
        self.model = parallel(net, kind, ranks)
        torch.manual_seed(100 + rank)  # every rank drops out others
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        warm = LinearLR(self.optimizer, total_iters=3)
        waves = CosineAnnealingWarmRestarts(self.optimizer, T_0=7)
        self.scheduler = SequentialLR(self.optimizer, [warm, waves], milestones=[3])
        self.loader = StatefulDataLoader(
            Rows(),
            batch_size=BATCH // ranks,
            sampler=Dealt(rank, ranks),
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,  # as everywhere but in a RankGang
            generator=torch.Generator(),  # so that an epoch's begin leaves the global one alone
        )
        self._batches = endless(self.loader)

    def extra(self):
        """What to save and resume beside model and optimizer."""
        return {"scheduler": self.scheduler, "loader": self.loader}

    def step(self):
        """The rows of this rank in a step, and its loss, bit for bit."""
        which, rows = next(self._batches)
        loss = (self.model(rows) - rows[:, :4].sin()).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return which.tolist(), loss.item().hex()


def endless(loader):
    """Its batches, epoch after epoch."""
    while True:
        yield from loader


def undisturbed(rank, steps, **kind):
    """The rows and losses of a run that is never killed and saves nothing."""
    training = Training(rank, dist.get_world_size(), **kind)
    return [training.step() for _ in range(steps)]


class Diary:
    """What a rank has to say, line by line."""

    def __init__(self, path):
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(self, *words):
        os.write(self._file, (" ".join(map(str, words)) + "\n").encode())


def live(rank, folder, name, steps, *, saving=lambda _: None, **kind):
    """One life of a training: resume, train, and save in the background, until the end or until
    it is killed. ``saving`` is told of every save that has begun."""
    diary = Diary(folder / f"{name}-rank-{rank}")
    training = Training(rank, dist.get_world_size(), **kind)
    options = CheckpointOptions(storage=folder / "store")
    with DistributedCheckpoint.create(options=options) as ckpt:
        result = ckpt.resume(training.model, training.optimizer, extra=training.extra())
        start = 0 if result is None else result.step
        diary.note("resumed", start, 0 if result is None else len(result.passed_over))
        for step in range(start, steps):
            rows, loss = training.step()
            diary.note("step", step, loss, *rows)
            if (step + 1) % EVERY == 0:
                _save(ckpt, training, step + 1, diary)
                saving(step + 1)
    diary.note("done")


def _save(ckpt, training, step, diary):
    def tell(progress):
        diary.note("phase", step, progress.phase)

    options = SaveOptions(checkpoint_prefix=f"step_{step}", step=step, progress=tell)
    handle = ckpt.save_async(training.model, training.optimizer, options, extra=training.extra())

    def end(ended):
        error = ended.exception()
        diary.note(*(("phase", step, "saved") if error is None else ("failed", step, repr(error))))

    handle.add_done_callback(end)


@dataclass(slots=True)
class Told:
    """What the diary of one life on one rank says."""

    resumed: int | None = None  # the step it began with
    passed_over: int = 0
    steps: dict[int, tuple[list[int], str]] = field(default_factory=dict)  # rows and loss
    saved: int = 0  # the last step that was said to be durable
    phase: str = "none"  # where the last save was when all ended
    failed: list[str] = field(default_factory=list)  # saves, by their errors
    is_done: bool = False

    @classmethod
    def read(cls, path):
        told = cls()
        for line in path.read_text().splitlines() if path.exists() else ():
            match line.split():
                case ["resumed", step, passed]:
                    told.resumed, told.passed_over = int(step), int(passed)
                case ["step", step, loss, *rows]:
                    told.steps[int(step)] = [*map(int, rows)], loss
                case ["phase", step, phase]:
                    told.phase = phase
                    told.saved = int(step) if phase == "saved" else told.saved
                case ["failed", *error]:
                    told.failed.append(" ".join(error))
                case ["done"]:
                    told.is_done = True
        return told
