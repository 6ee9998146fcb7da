"""The requirements of the seed's sketch of mixed-precision checkpoints, one by one and by name.
What each of them takes in the end is in the other tests."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from torch import nn

from holdfast.errors import CheckpointError, IncompatibleVersionError
from holdfast.precision import (
    MixedPrecisionCheckpoint,
    MixedPrecisionOptimizer,
    MixedPrecisionOptions,
    create_checkpoint,
    load_and_restore,
    load_checkpoint,
    restore_checkpoint,
    save_checkpoint,
    validate_checkpoint,
)

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "precision_v1"


def made(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2))
    inner = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    options = MixedPrecisionOptions.for_fp16(initial_scale=64.0, growth_interval=5)
    return MixedPrecisionOptimizer(inner, options, model=model)


def trained(optimizer, steps=4, *, overflow=2):
    for step in range(steps):
        for weight in optimizer.training_weights.values():
            weight.grad = torch.full_like(weight, torch.inf if step == overflow else 1 + step)
        optimizer.step()
    return optimizer


@pytest.fixture
def optimizer():
    return trained(made())


def test_checkpoint_creation_captures_all_optimizer_state(optimizer):
    checkpoint = create_checkpoint(optimizer)
    seed = """version timestamp master_weights training_weights current_loss_scale
        steps_since_last_overflow consecutive_overflows total_overflows step_count has_fallback
        skipped_steps options base_optimizer_state metadata"""
    assert all(hasattr(checkpoint, name) for name in seed.split())
    assert isinstance(checkpoint, MixedPrecisionCheckpoint)
    assert checkpoint.base_optimizer_state["state"].keys() == optimizer.master_weights.keys()


def test_save_to_file_serializes_a_checkpoint_to_disk(optimizer, tmp_path):
    save_checkpoint(create_checkpoint(optimizer), tmp_path / "mp.safetensors")
    assert (tmp_path / "mp.safetensors").stat().st_size > 0


def test_load_from_file_deserializes_it(optimizer, tmp_path):
    checkpoint = create_checkpoint(optimizer)
    save_checkpoint(checkpoint, tmp_path / "a")
    loaded = load_checkpoint(tmp_path / "a")
    assert loaded.timestamp == checkpoint.timestamp
    for name, master in checkpoint.master_weights.items():
        assert torch.equal(loaded.master_weights[name], master)


def test_restore_state_applies_a_checkpoint(optimizer, tmp_path):
    save_checkpoint(create_checkpoint(optimizer), tmp_path / "a")
    one, other = made(seed=1), made(seed=2)
    load_and_restore(one, tmp_path / "a")
    restore_checkpoint(other, create_checkpoint(optimizer))
    for restored in (one, other):
        assert restored.get_stats() == optimizer.get_stats()
        trained(restored, 1, overflow=None)
    trained(optimizer, 1, overflow=None)
    for name, master in optimizer.master_weights.items():
        assert torch.equal(one.master_weights[name], master)
        assert torch.equal(other.master_weights[name], master)


def test_weight_serialization_saves_master_and_training_weights(optimizer, tmp_path):
    save_checkpoint(create_checkpoint(optimizer), tmp_path / "a")
    loaded = load_checkpoint(tmp_path / "a")
    for name, weight in optimizer.training_weights.items():
        assert loaded.training_weights[name].dtype is weight.dtype
        assert torch.equal(loaded.training_weights[name], weight)
        assert loaded.master_weights[name].dtype is torch.float32


def test_state_preservation_saves_loss_scaler_and_step_counts(optimizer, tmp_path):
    save_checkpoint(create_checkpoint(optimizer), tmp_path / "a")
    loaded, stats = load_checkpoint(tmp_path / "a"), optimizer.get_stats()
    assert loaded.current_loss_scale == stats.loss_scaler.current_scale == 32.0
    assert loaded.steps_since_last_overflow == 1
    assert (loaded.consecutive_overflows, loaded.total_overflows) == (0, 1)
    assert (loaded.step_count, loaded.skipped_steps) == (4, 1)
    assert loaded.has_fallback is False
    assert loaded.scaler.growth_tracker == 1


def test_metadata_support_allows_custom_metadata(optimizer, tmp_path):
    given = {"run": "a", "seeds": [1, 2], "rate": 0.1}
    save_checkpoint(create_checkpoint(optimizer, given), tmp_path / "a")
    assert load_checkpoint(tmp_path / "a").metadata == given


def test_validation_verifies_a_checkpoint(optimizer):
    checkpoint = create_checkpoint(optimizer)
    assert validate_checkpoint(checkpoint)
    without = dataclasses.replace(checkpoint, training_weights={})
    assert validate_checkpoint(without)  # "optional but useful"
    for changes in ({"version": 0}, {"master_weights": {}}, {"options": None}):
        assert not validate_checkpoint(dataclasses.replace(checkpoint, **changes))
    assert not validate_checkpoint(None)


def test_backward_compatibility_has_a_version_number(optimizer, tmp_path):
    assert create_checkpoint(optimizer).version == 1
    assert load_checkpoint(GOLDEN / "adamw.safetensors").version == 1
    assert issubclass(IncompatibleVersionError, CheckpointError)


def test_efficiency_stores_little_more_than_the_tensors(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(300, 300)
    inner = torch.optim.AdamW(model.parameters())
    big = trained(MixedPrecisionOptimizer(inner, MixedPrecisionOptions(), model=model))
    save_checkpoint(create_checkpoint(big), tmp_path / "a")
    tensors = 300 * 301 * (4 + 2 + 8)
    assert tensors < (tmp_path / "a").stat().st_size < 1.02 * tensors


def test_portability_needs_nothing_of_the_machine_that_wrote_it(optimizer, tmp_path):
    """Another process, elsewhere, without the model: little-endian safetensors, and no pickle."""
    save_checkpoint(create_checkpoint(optimizer), tmp_path / "a")
    told = subprocess.run(
        [sys.executable, "-c", _SUM, tmp_path / "a"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PWD"},
        capture_output=True,
        text=True,
        check=True,
    )
    wanted = sum(float(each.detach().double().sum()) for each in optimizer.master_weights.values())
    assert float(told.stdout) == wanted


_SUM = """
import sys
from safetensors import safe_open
with safe_open(sys.argv[1], "pt") as file:
    names = [name for name in file.keys() if name.startswith("master_weights.")]
    tensors = {name: file.get_tensor(name) for name in names}
from holdfast.precision import load_checkpoint
masters = load_checkpoint(sys.argv[1]).master_weights
print(sum(float(tensors[f"master_weights.{name}"].double().sum()) for name in masters))
"""


def test_error_handling_of_corrupted_and_invalid_checkpoints(optimizer, tmp_path):
    save_checkpoint(create_checkpoint(optimizer), tmp_path / "a")
    data = bytearray((tmp_path / "a").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "a").write_bytes(data)
    other = made(seed=3)
    before = other.master_weights["0.weight"].detach().clone()
    with pytest.raises(CheckpointError):
        load_and_restore(other, tmp_path / "a")
    assert torch.equal(other.master_weights["0.weight"], before)
    assert other.step_count == 0
