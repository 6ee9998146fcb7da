"""Loops with Accelerate that are cut off and go on: to the last bit as if nothing had been."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from accelerate_training import BATCH, ROWS, compared, prepared, train

from holdfast.catalog import Catalog
from holdfast.distributed import CheckpointOptions, SaveOptions, keep_last
from holdfast.errors import LoadError
from holdfast.integrations.huggingface import AcceleratorCheckpoint

pytestmark = pytest.mark.timeout(600)

JOB = Path(__file__).with_name("accelerate_training.py")
EPOCH = ROWS // BATCH


@pytest.mark.parametrize("seedable", [False, True])
@pytest.mark.parametrize("cut_at", [10, EPOCH, EPOCH + 5])
def test_one_process_goes_on_inside_of_an_epoch_and_after_one(tmp_path, cut_at, seedable):
    compared(tmp_path, cut_at, seedable=seedable)
    newest = Catalog(tmp_path / "a").list()[0]
    assert newest.prefix == "step_20"
    assert newest.metrics.keys() == {"loss"}
    assert Catalog(tmp_path / "a").verify("step_20").is_intact


def test_two_ranks_go_on(tmp_path):
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ran = subprocess.run(
        [*line, JOB, tmp_path, "9"],
        check=False,
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.split("\n")[:2] == ["the same", "the same"]
    assert Catalog(tmp_path / "a").open("step_20").info.world_size == 2


def test_a_damaged_one_is_passed_over_and_retention_is_kept_to(tmp_path):
    storage = CheckpointOptions(storage=str(tmp_path / "a"), retention=keep_last(2))
    train(storage, 12, seedable=False)
    catalog = Catalog(tmp_path / "a")
    assert [info.step for info in catalog.list()] == [12, 8]
    (shard,) = (tmp_path / "a" / "step_12").glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    losses, _, resumed, _ = train(storage, 16, seedable=False, seed=7)
    assert resumed.step == 8
    assert [each.prefix for each in resumed.passed_over] == ["step_12"]
    whole, *_ = train(tmp_path / "b", 16, seedable=False)
    assert losses == {step: whole[step] for step in range(9, 17)}


def test_a_step_that_is_there_is_replaced_whatever_the_options_say(tmp_path):
    accelerator, _ = prepared(seedable=False, seed=0)
    options = SaveOptions(overwrite=False)
    with AcceleratorCheckpoint(accelerator, tmp_path, options) as checkpoint:
        checkpoint.save(1, metrics={"loss": 2.0}).result()
        checkpoint.save(1, metrics={"loss": 1.0}).result()
    (only,) = Catalog(tmp_path).list()
    assert only.metrics == {"loss": 1.0}


def test_what_cannot_be_kept_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not None"):
        AcceleratorCheckpoint(None, tmp_path)
    with pytest.raises(ValueError, match="has no model yet"):
        AcceleratorCheckpoint(Accelerator(cpu=True), tmp_path)
    accelerator, (*_, loader) = prepared(seedable=False, seed=0)
    for step in (0, 3):
        with pytest.raises(ValueError, match="step is given to every save"):
            AcceleratorCheckpoint(accelerator, tmp_path, SaveOptions(step=step))
    with AcceleratorCheckpoint(accelerator, tmp_path) as checkpoint:
        with pytest.raises(ValueError, match=r"what accelerator\.prepare has returned"):
            checkpoint.batches([torch.ones(1)])
        assert len([*checkpoint.batches(loader)]) == EPOCH
        checkpoint.save(1).result()
    seedable, _ = prepared(seedable=True, seed=0)
    with (
        AcceleratorCheckpoint(seedable, tmp_path) as checkpoint,
        pytest.raises(LoadError, match="prepare it as the run was"),
    ):
        checkpoint.resume()
    stateful = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True)
    )
    stateful.prepare(torch.nn.Linear(1, 1), torch.utils.data.DataLoader([1, 2, 3]))
    with pytest.raises(ValueError, match="without use_stateful_dataloader"):
        AcceleratorCheckpoint(stateful, tmp_path)


class Unmeasured(torch.utils.data.IterableDataset):
    """Rows in an order from the generators of all; nobody knows how many."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows[torch.randperm(len(self.rows))])


class Run:
    """A loop with two loaders: five batches to learn from, at times with gradients of two at
    once, and four to evaluate with. ``log`` has all that it computed, by step."""

    def __init__(self, store, upto, *, seed, is_unmeasured=False, is_dispatched=None):
        set_seed(seed)
        config = DataLoaderConfiguration(dispatch_batches=is_dispatched)
        self.accelerator = Accelerator(
            cpu=True, dataloader_config=config, gradient_accumulation_steps=2
        )
        net = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
        )
        rows = torch.arange(40.0).reshape(10, 4) / 40
        loaders = [
            torch.utils.data.DataLoader(Unmeasured(rows), batch_size=2)
            if is_unmeasured
            else torch.utils.data.DataLoader(rows, batch_size=2, shuffle=True),
            torch.utils.data.DataLoader(rows[:8] * 2, batch_size=2, shuffle=True),
        ]
        self.net, self.adam, self.training, self.evaluation = self.accelerator.prepare(
            net, torch.optim.AdamW(net.parameters(), lr=0.01), *loaders
        )
        self.log = {}
        self.upto = upto
        self.kept = AcceleratorCheckpoint(self.accelerator, store)
        resumed = self.kept.resume()
        self.step = self.began = resumed.step if resumed else 0

    @property
    def is_over(self):
        return self.step >= self.upto

    def learn(self, batch):
        with self.accelerator.accumulate(self.net):
            loss = self.net(batch).square().mean()
            self.accelerator.backward(loss)
            self.adam.step()
            self.adam.zero_grad()
        self.step += 1
        self.log[self.step] = [loss.item()]

    def evaluate(self):
        for nth, batch in enumerate(self.kept.batches(self.evaluation)):
            self.log[self.step].append(self.net(batch).sum().item())
            if nth == 1:
                break

    def save(self):
        if self.accelerator.sync_gradients:  # what is accumulated is not kept
            self.kept.save(self.step)


def saved_in_every_step(run):
    while not run.is_over:
        for batch in run.kept.batches(run.training):
            run.learn(batch)
            run.save()
            if run.is_over:
                break


def saved_after_break(run):
    while not run.is_over:
        for batch in run.kept.batches(run.training):
            run.learn(batch)
            if run.is_over:
                break
    run.save()


def evaluated_inside(run):
    while not run.is_over:
        for batch in run.kept.batches(run.training):
            run.learn(batch)
            if run.step % 3 == 0:
                run.evaluate()
            run.save()
            if run.is_over:
                break


def evaluated_inside_and_saved_after_break(run):
    while not run.is_over:
        for batch in run.kept.batches(run.training):
            run.learn(batch)
            run.evaluate()
            if run.is_over:
                break
    run.save()


def evaluated_after_every_epoch(run):
    while not run.is_over:
        for batch in run.kept.batches(run.training):
            run.learn(batch)
        run.evaluate()
        run.save()


def evaluated_before_and_inside(run):
    if run.step == 0:
        run.log[0] = []
        run.evaluate()
    while not run.is_over:
        for batch in run.kept.batches(run.training):
            run.learn(batch)
            if run.step == 8:
                run.evaluate()
            run.save()
            if run.is_over:
                break


def evaluated_before_it_goes_on(run):
    if run.step:
        run.log[run.step] = []
        run.evaluate()
        del run.log[run.step]  # in a run that is not cut off there is none
    saved_in_every_step(run)


def saved_at_once(run):
    if run.step:
        run.save()
        run.kept.resume()
    saved_in_every_step(run)


def side_by_side(run):
    return zip(run.kept.batches(run.training), run.kept.batches(run.evaluation), strict=False)


def side_by_side_and_saved_after_break(run):
    while not run.is_over:
        for batch, other in side_by_side(run):
            run.learn(batch + other)
            if run.is_over:
                break
    run.save()


def side_by_side_and_saved_in_every_step(run):
    while not run.is_over:
        for batch, other in side_by_side(run):
            run.learn(batch + other)
            run.save()
            if run.is_over:
                break


def ran(program, store, upto, **kind):
    run = Run(store, upto, **kind)
    with run.kept:
        program(run)
    return run


def assert_goes_on(program, folder, cut_at, upto=17, **kind):
    first = ran(program, folder / "a", cut_at, seed=0, **kind)
    then = ran(program, folder / "a", upto, seed=5, **kind)
    whole = ran(program, folder / "b", upto, seed=0, **kind)
    assert then.began == cut_at
    assert {**first.log, **then.log} == whole.log
    pairs = zip(then.net.parameters(), whole.net.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("is_dispatched", [False, True])
@pytest.mark.parametrize("cut_at", [2, 5, 7, 10])
def test_data_without_a_length_go_on_inside_of_an_epoch_and_after_its_last_batch(
    tmp_path, cut_at, is_dispatched
):
    kind = {"is_unmeasured": True, "is_dispatched": is_dispatched}
    assert_goes_on(saved_in_every_step, tmp_path, cut_at, **kind)


@pytest.mark.parametrize(
    ("program", "cut_at"),
    [
        (saved_after_break, 7),
        (evaluated_inside, 7),
        (evaluated_inside, 9),
        (evaluated_inside_and_saved_after_break, 7),
        (evaluated_after_every_epoch, 10),
        (evaluated_before_and_inside, 7),
        (evaluated_before_it_goes_on, 7),
        (saved_at_once, 7),
        (side_by_side_and_saved_after_break, 6),
        (side_by_side_and_saved_in_every_step, 6),
    ],
)
def test_several_loaders_go_on(tmp_path, program, cut_at):
    assert_goes_on(program, tmp_path, cut_at)
