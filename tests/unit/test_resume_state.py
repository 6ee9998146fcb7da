"""What a training needs beside its model comes back by a resume, in one process: every scheduler of
torch, and data loaders in the middle of an epoch. Loaders with workers: test_resume_ranks.py."""

import gc
import weakref

import pytest
import torch
from test_values_torch import MAKERS, SCHEDULERS, advance
from torch import nn
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler, StatefulDistributedSampler

from holdfast.coordination import SoloCoordinator
from holdfast.distributed import CheckpointOptions, DistributedCheckpoint, SaveOptions


@pytest.fixture
def ckpt(tmp_path):
    options = CheckpointOptions(storage=tmp_path / "store")
    with DistributedCheckpoint.create(SoloCoordinator(), options) as made:
        yield made


# ------------------------------------------------------------------ schedulers


class Scheduled:
    """A net with dropout, two groups of parameters, and a scheduler of the given kind."""

    def __init__(self, kind, seed):
        torch.manual_seed(seed)
        self.kind = kind
        self.net = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.Linear(6, 2))
        groups = [
            {"params": [*self.net[0].parameters()], "lr": 0.2},
            {"params": [*self.net[2].parameters()], "lr": 0.1},
        ]
        self.optimizer = torch.optim.SGD(groups, momentum=0.9)
        self.scheduler = MAKERS[kind](self.optimizer)
        self.step = 0

    def train(self, steps):
        """The loss and the learning rates of each step, bit for bit."""
        told = []
        for _ in range(steps):
            rows = torch.full((3, 5), 1.0 + self.step)
            loss = self.net(rows).square().mean() / (1 + self.step)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            advance(self.kind, self.scheduler)
            self.step += 1
            rates = [float(group["lr"]).hex() for group in self.optimizer.param_groups]
            told.append((loss.item().hex(), *rates))
        return told


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, of chained schedulers
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_training_with_any_scheduler_goes_on_bit_for_bit(ckpt, kind):
    run = Scheduled(kind, seed=1)
    run.train(3)
    extra = {"scheduler": run.scheduler, "step": run.step}
    ckpt.save(run.net, run.optimizer, SaveOptions(step=run.step), extra=extra)
    steps = 6 if kind == "OneCycleLR" else 12  # which has no more
    expected = run.train(steps)
    assert len({told[1:] for told in expected}) > 1 or kind == "MultiStepLR"

    other = Scheduled(kind, seed=2)
    extra = {"scheduler": other.scheduler, "step": 0}
    result = ckpt.resume(other.net, other.optimizer, extra=extra)
    assert (result.step, extra["step"], result.loaded.not_restored) == (3, 3, ())
    other.step = extra["step"]
    assert other.train(steps) == expected


# ------------------------------------------------------------------ data loaders


class Numbers(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return index


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def random_sampler(numbers):
    return RandomSampler(numbers, generator=seeded(5))


def distributed_sampler(numbers):
    return StatefulDistributedSampler(numbers, num_replicas=2, rank=1, seed=3)


def new_loader(sampler):
    """With a generator of its own, from which it draws when an epoch begins."""
    numbers = Numbers()
    return StatefulDataLoader(numbers, batch_size=3, sampler=sampler(numbers), generator=seeded(6))


class Reading:
    """A loop over a loader that draws from the global generator at every batch, as dropout does."""

    def __init__(self, sampler):
        torch.manual_seed(0)
        self.model = nn.Linear(1, 1)
        self.loader = new_loader(sampler)
        self.epoch = 0
        self._batches = self._endless()

    def _endless(self):
        while True:
            if hasattr(self.loader.sampler, "set_epoch"):
                self.loader.sampler.set_epoch(self.epoch)
            yield from self.loader
            self.epoch += 1

    def read(self, count):
        return [(next(self._batches).tolist(), torch.rand(()).item()) for _ in range(count)]


def equal(one, other):
    """Deep, with types and tensors."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


@pytest.mark.parametrize("sampler", [random_sampler, distributed_sampler])
@pytest.mark.parametrize("position", range(9))
def test_a_loader_gives_the_batches_of_an_uninterrupted_run(ckpt, sampler, position):
    """From the middle of an epoch, its end, and the next one, into the ones after that."""
    expected = Reading(sampler).read(14)
    assert len({tuple(batch) for batch, _ in expected}) > 4  # or any loader would do
    run = Reading(sampler)
    assert run.read(position) == expected[:position]
    extra = {"loader": run.loader, "epoch": run.epoch}
    ckpt.save(run.model, options=SaveOptions(step=position), extra=extra)
    saved = run.loader.state_dict()

    other = Reading(sampler)
    extra = {"loader": other.loader, "epoch": 0}
    result = ckpt.resume(other.model, extra=extra)
    assert (result.step, result.loaded.not_restored) == (position, ())
    assert equal(other.loader.next_iter_state, saved)
    other.epoch = extra["epoch"]
    assert other.read(14 - position) == expected[position:]


def test_a_loader_that_was_saved_and_resumed_is_not_kept_alive(ckpt):
    """One with workers that only the collector finds would have it wait for them, in any thread."""
    gc.collect()
    gc.disable()
    try:
        loader = new_loader(random_sampler)
        batches = iter(loader)
        next(batches)
        ckpt.save(nn.Linear(1, 1), extra={"loader": loader})
        ckpt.resume(nn.Linear(1, 1), extra={"loader": loader})
        next(batches)
        known = weakref.ref(loader)
        del loader, batches
        assert known() is None
    finally:
        gc.enable()
