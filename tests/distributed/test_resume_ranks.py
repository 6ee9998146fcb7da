"""Resuming on several ranks: all go on from the same checkpoint, and what one rank cannot read is
passed over by all. With data loaders that each have a state of their own, with and without workers.
"""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoint_jobs import checkpointer, new_net, new_optimizer, parallel, require_equal, train
from resume_training import Rows, Training, endless
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler, StatefulDistributedSampler

from holdfast.catalog import Catalog
from holdfast.distributed import DistributedCheckpoint, LoadOptions, SaveOptions, per_rank
from holdfast.errors import LoadError, RankLostError, TransientStorageError, ValidationError
from holdfast.storage import LocalStorage
from holdfast.storage._wrapped import WrappedStorage
from holdfast.testing import RankGang


@pytest.fixture(scope="module")
def two():
    with RankGang(2) as gang:
        yield gang


@pytest.fixture(scope="module")
def three():
    with RankGang(3) as gang:
        yield gang


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "store"


class Meddled(WrappedStorage):
    """A storage in which something happens before a call."""

    def __init__(self, storage, meddle):
        super().__init__(storage)
        self._meddle = meddle

    def _through(self, method, key, call):
        self._meddle(method, key)
        return call()


# ------------------------------------------------------------------ which checkpoint


def save_steps(rank, folder, *steps, kind="fsdp"):
    """Checkpoints of a net after each of these numbers of steps."""
    world = dist.get_world_size()
    with checkpointer(folder) as ckpt:
        for step in steps:
            net = parallel(new_net(1), kind, world)
            optimizer = new_optimizer(net)
            train(net, optimizer, step)
            options = SaveOptions(checkpoint_prefix=f"step_{step}", step=step)
            ckpt.save(net, optimizer, options, extra={"step": step})


def resume_job(rank, folder, *, kind="fsdp", **options):
    """Resume, and see that the state is that of the step: its number and what was passed over."""
    world = dist.get_world_size()
    net = parallel(new_net(9), kind, world)
    optimizer = new_optimizer(net)
    extra = {"step": 0}
    with checkpointer(folder) as ckpt:
        result = ckpt.resume(net, optimizer, LoadOptions(**options), extra=extra)
    if result is None:
        return None
    require_equal(net, optimizer, 1, result.step)
    assert extra["step"] == result.step
    passed = [(each.prefix, each.step, each.reason) for each in result.passed_over]
    return result.step, passed, result.loaded.not_restored


def shard_of(folder, step, rank):
    (shard,) = Path(folder, f"step_{step}").glob(f"shard-{rank}-*.safetensors")
    return shard


def of_one_rank(shard):
    """Where in a file the first part of a tensor is that only the rank that wrote it reads."""
    data = shard.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:begin])
    return begin + min(each["data_offsets"][0] for name, each in entries.items() if "[" in name)


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_nobody_has_anything_to_resume_from(two, folder):
    assert two.run(resume_job, folder) == [None, None]


@pytest.mark.parametrize("strategy", ["parallel", "broadcast"])
@pytest.mark.parametrize("damage", ["flipped", "gone", "record"])
def test_what_one_rank_cannot_read_is_passed_over_by_all(two, folder, damage, strategy):
    two.run(save_steps, folder, 1, 2, 3)
    if damage == "record":
        flip(Path(folder, "step_3", "metadata.json"), -20)
    elif damage == "gone":
        shard_of(folder, 3, rank=1).unlink()
    else:
        shard = shard_of(folder, 3, rank=1)
        flip(shard, of_one_rank(shard))
    skip = damage == "gone"  # or rank 0 would see it in the validation
    options = {"resharding_strategy": strategy, "skip_validation": skip}
    first, second = two.run(resume_job, folder, **options)
    assert first == second
    step, ((prefix, passed_step, reason),), not_restored = first
    assert (step, prefix, not_restored) == (2, "step_3", ())
    assert passed_step == (None if damage == "record" else 3)
    assert damage != "flipped" or "rank 1" in reason


def test_it_goes_on_from_the_same_on_other_numbers_of_ranks(two, three, folder):
    two.run(save_steps, folder, 1, 2)
    flip(shard_of(folder, 2, rank=1), 4096)
    for kind in ("ddp", "fsdp", "tp"):
        found = three.run(resume_job, folder, kind=kind)
        assert [(each[0], each[2]) for each in found] == [(1, ("rng",))] * 3
        assert found[0] == found[1] == found[2]


def test_if_none_is_whole_all_ranks_raise_the_same(two, folder):
    two.run(save_steps, folder, 1, 2)
    for step in (1, 2):
        flip(shard_of(folder, step, rank=1), 4096)
    two.start(resume_job, folder)
    messages = set()
    for outcome in two.outcomes():
        error = outcome.failure()
        assert type(error) is LoadError
        messages.add(error.message)
    (message,) = messages
    assert "none of them can be loaded" in message
    assert all(f"step_{step} (step {step})" in message for step in (1, 2))


def deleting_job(rank, folder):
    """Resume, while the newest is pruned as soon as rank 0 has read its record."""
    asked = []

    def meddle(method, key):
        if (method, key) == ("read", "step_2/metadata.json"):
            asked.append(key)
            if rank == 0 and len(asked) == 2:  # first it was listed
                Catalog(folder).delete("step_2")

    net = parallel(new_net(9), "fsdp", dist.get_world_size())
    with DistributedCheckpoint(storage=Meddled(LocalStorage(folder), meddle)) as ckpt:
        result = ckpt.resume(net)
    return result.prefix, result.passed_over, len(asked)


def test_one_that_is_deleted_meanwhile_is_not_spoken_of(two, folder):
    two.run(save_steps, folder, 1, 2)
    assert two.run(deleting_job, folder) == [("step_1", (), 2), ("step_1", (), 0)]


# ------------------------------------------------------------------ not the checkpoint's fault


class BusyError(TransientStorageError):
    """One that other ranks know nothing of."""


def busy_job(rank, folder):
    def meddle(method, key):
        if rank == 1 and method == "read_into" and key.startswith("step_2/"):
            raise BusyError("this rank's storage is busy")

    net = parallel(new_net(9), "fsdp", dist.get_world_size())
    with DistributedCheckpoint(storage=Meddled(LocalStorage(folder), meddle)) as ckpt:
        ckpt.resume(net)


def test_a_storage_that_is_busy_on_one_rank_is_an_error_on_all(two, folder):
    """Also if only that rank can know that it may pass."""
    two.run(save_steps, folder, 1, 2)
    two.start(busy_job, folder)
    for outcome in two.outcomes():
        assert outcome.error is not None
        assert outcome.error.message == "this rank's storage is busy"
        assert outcome.error.rank == 1


def interrupted_job(rank, folder):
    def interrupt(progress):
        if rank == 1 and progress.phase == "read":
            raise KeyboardInterrupt

    resume_job(rank, folder, progress=interrupt)


def test_an_interrupt_on_one_rank_ends_it_on_all(two, folder):
    two.run(save_steps, folder, 1, 2)
    two.start(interrupted_job, folder)
    for outcome in two.outcomes():
        assert outcome.error is not None
        assert "KeyboardInterrupt" in outcome.error.message


def test_options_that_differ_are_an_error_and_not_damage(two, folder):
    two.run(save_steps, folder, 1, 2)
    two.start(differing_job, folder)
    for outcome in two.outcomes():
        error = outcome.failure()
        assert type(error) is LoadError
        assert "strict is" in error.message


def differing_job(rank, folder):
    resume_job(rank, folder, strict=rank == 0)


def dying_job(rank, folder):
    def die(progress):
        if rank == 1 and progress.phase == "read":
            os.kill(os.getpid(), signal.SIGKILL)

    resume_job(rank, folder, progress=die)


def test_a_rank_that_dies_ends_it_and_nothing_older_is_loaded(folder):
    with RankGang(2) as gang:
        gang.run(save_steps, folder, 1, 2)
        gang.start(dying_job, folder)
        (outcome,) = gang.outcomes(30, ranks=[0])
        error = outcome.failure()
        assert type(error) is RankLostError
        assert error.ranks == (1,)


# ------------------------------------------------------------------ whole trainings


def train_job(rank, folder, steps, *, save_at=None, workers=0, remap=None, dropout=0.3):
    """Resume if there is anything, and train up to a step: the step it began at, what every step
    had, and what was not restored."""
    training = Training(rank, dist.get_world_size(), workers=workers, dropout=dropout)
    with checkpointer(folder) as ckpt:
        options = LoadOptions(remap=remap)
        result = ckpt.resume(training.model, training.optimizer, options, extra=training.extra())
        began = 0 if result is None else result.step
        told = []
        for step in range(began, steps):
            told.append(training.step())
            if step + 1 == save_at:
                ckpt.save(
                    training.model,
                    training.optimizer,
                    SaveOptions(step=save_at),
                    extra=training.extra(),
                )
    return began, told, () if result is None else result.loaded.not_restored


@pytest.mark.parametrize(("workers", "save_at"), [(0, 3), (0, 5), (2, 3), (2, 7)])
def test_a_training_goes_on_bit_for_bit(two, folder, workers, save_at):
    """From the middle of an epoch of five steps, its end, and the middle of the next."""
    whole = two.run(train_job, folder, 13, save_at=save_at, workers=workers)
    after = two.run(train_job, folder, 13, workers=workers)
    for rank in range(2):
        assert after[rank] == (save_at, whole[rank][1][save_at:], ())
    assert whole[0][1] != whole[1][1]


def test_on_another_number_of_ranks_it_goes_on_with_the_rows_that_come_next(two, three, folder):
    """The same rows of all ranks together, though each rank has others; the losses are not those,
    because other ranks drop out others."""
    whole = two.run(train_job, folder, 13, save_at=7)
    after = three.run(train_job, folder, 13)
    assert {began for began, _, _ in after} == {7}
    assert {left for _, _, left in after} == {("rng",)}
    for step in range(7, 13):
        expected = sorted(row for _, told, _ in whole for row in told[step][0])
        assert sorted(row for _, told, _ in after for row in told[step - 7][0]) == expected


def test_without_chance_another_number_of_ranks_has_the_same_losses(two, three, folder):
    """The mean of all ranks' losses, but for the order in which floats are added."""
    whole = two.run(train_job, folder, 13, save_at=7, dropout=0.0)
    after = three.run(train_job, folder, 13, dropout=0.0)
    for step in range(7, 13):
        expected = sum(float.fromhex(told[step][1]) for _, told, _ in whole) / 2
        found = sum(float.fromhex(told[step - 7][1]) for _, told, _ in after) / 3
        assert found == pytest.approx(expected, rel=1e-4)


# ------------------------------------------------------------------ loaders of each rank's own


def own_loader(rank, workers=0):
    """Every rank shuffles all rows in an order of its own."""
    rows = Rows()
    sampler = RandomSampler(rows, generator=torch.Generator().manual_seed(rank))
    return StatefulDataLoader(
        rows,
        batch_size=7,
        sampler=sampler,
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
        generator=torch.Generator(),
    )


def own_loader_job(rank, folder, *, read, save=False, workers=0, **options):
    """Read a different number of batches on every rank, save, and read on."""
    net, loader = nn.Linear(2, 2), own_loader(rank, workers)
    batches = endless(loader)
    with checkpointer(folder) as ckpt:
        if save:
            for _ in range(2 + 3 * rank):
                next(batches)
            ckpt.save(new_linear(), options=SaveOptions(step=1), extra={"loader": loader})
            not_restored = ()
        else:
            chosen = LoadOptions(**options)
            result = ckpt.resume(net, None, chosen, extra={"loader": loader})
            not_restored = result.loaded.not_restored
        return [next(batches)[0].tolist() for _ in range(read)], not_restored


def new_linear():
    torch.manual_seed(0)
    return nn.Linear(2, 2)


def first_of(rank, world_size, saved_world_size):
    return 0


@pytest.mark.parametrize("workers", [0, 2])
def test_each_rank_gets_its_own_loader_back(two, folder, workers):
    expected = two.run(own_loader_job, folder, read=12, save=True, workers=workers)
    found = two.run(own_loader_job, folder, read=12, workers=workers)
    assert found == expected
    assert found[0] != found[1]


def test_on_another_number_of_ranks_such_a_loader_needs_a_word(two, three, folder):
    expected = two.run(own_loader_job, folder, read=12, save=True)
    three.start(own_loader_job, folder, read=12)
    for outcome in three.outcomes():
        error = outcome.failure()
        assert type(error) is ValidationError
        assert "extra.loader" in error.message
        assert "remap" in error.message
    remapped = three.run(own_loader_job, folder, read=12, remap=first_of)
    assert remapped == [(expected[0][0], ())] * 3
    fresh = three.run(own_loader_job, folder, read=12, strict=False)
    assert all("rng" in left and any("loader" in each for each in left) for _, left in fresh)
    assert len({str(batches) for batches, _ in fresh}) == 3  # each began anew


def sharing_job(rank, folder, *, save=False, own=False):
    """A loader whose state is the same on all ranks, though it speaks of one rank of so many."""
    rows, world = Rows(), dist.get_world_size()
    sampler = StatefulDistributedSampler(rows, num_replicas=world, rank=rank)
    loader = StatefulDataLoader(rows, batch_size=6, sampler=sampler, generator=torch.Generator())
    batches = endless(loader)
    extra = {"loader": per_rank(loader) if own else loader}
    with checkpointer(folder) as ckpt:
        if save:
            next(batches)
            ckpt.save(new_linear(), extra=extra)
        else:
            ckpt.resume(new_linear(), extra=extra)
        return next(batches)[0].tolist()


def test_a_loader_that_is_marked_as_each_ranks_own_is_not_taken_for_the_jobs(two, three, folder):
    expected = two.run(sharing_job, folder / "own", save=True, own=True)
    assert two.run(sharing_job, folder / "own", own=True) == expected
    three.start(sharing_job, folder / "own", own=True)
    for outcome in three.outcomes():
        error = outcome.failure()
        assert type(error) is ValidationError
        assert "extra.loader" in error.message
    two.run(sharing_job, folder / "shared", save=True)
    three.run(sharing_job, folder / "shared")  # loads, and is elsewhere in the data
