"""A small training of which every part must come back for it to go on as if nothing had happened:
dropout, AdamW, a schedule, and a loader in the middle of an epoch. On any number of ranks.

Run by the ranks of test_resume_ranks.py and test_exact_resume.py, and by resume_job.py.
"""

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LinearLR, SequentialLR
from torch.utils.data import Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

ROWS = 66
BATCH = 12  # rows of a step, of all ranks together: for 1, 2, 3 or 4 of them
WIDTH = 16


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
    """``hidden`` makes the state larger: it is then written for a while."""

    def __init__(self, rank, ranks, *, hidden=32, workers=0, dropout=0.3):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(WIDTH, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, 4)
        )
        self.model = nn.parallel.DistributedDataParallel(net) if ranks > 1 else net
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
