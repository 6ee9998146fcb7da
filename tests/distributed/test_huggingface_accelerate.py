"""Loops with Accelerate that are cut off and go on: to the last bit as if nothing had been."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
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


def test_what_cannot_be_kept_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not None"):
        AcceleratorCheckpoint(None, tmp_path)
    with pytest.raises(ValueError, match="has no model yet"):
        AcceleratorCheckpoint(Accelerator(cpu=True), tmp_path)
    accelerator, (*_, loader) = prepared(seedable=False, seed=0)
    with pytest.raises(ValueError, match="step is given to every save"):
        AcceleratorCheckpoint(accelerator, tmp_path, SaveOptions(step=3))
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
