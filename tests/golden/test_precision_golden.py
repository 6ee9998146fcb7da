"""Mixed-precision checkpoints of version 1, as they were written once."""

import dataclasses
import pathlib
import subprocess
import sys

import make_precision_golden as golden
import pytest
import torch
from torch import nn

from holdfast.precision import (
    MixedPrecisionOptimizer,
    load_and_restore,
    load_checkpoint,
    validate_checkpoint,
)

FOLDER = pathlib.Path(__file__).parent / "precision_v1"


def same(found, wanted):
    if isinstance(wanted, torch.Tensor):
        return found.dtype == wanted.dtype and torch.equal(found, wanted)
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[k], wanted[k]) for k in wanted)
    if isinstance(wanted, list | tuple):
        return (
            type(found) is type(wanted)
            and len(found) == len(wanted)
            and all(map(same, found, wanted))
        )
    return type(found) is type(wanted) and found == wanted


@pytest.mark.parametrize("name", golden.FILES)
def test_what_was_written_once_is_read_as_it_was(name):
    found, wanted = load_checkpoint(FOLDER / name), golden.FILES[name]()
    assert validate_checkpoint(found)
    for field in dataclasses.fields(wanted):
        assert same(getattr(found, field.name), getattr(wanted, field.name)), field.name


@pytest.mark.parametrize("name", golden.FILES)
def test_todays_writer_makes_the_same_bytes(tmp_path, name):
    golden.make(tmp_path)
    assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes()


@pytest.mark.parametrize("name", golden.FILES)
def test_it_is_restored(name):
    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2, bias=False))
    named = dict(model.named_parameters())
    wanted = golden.FILES[name]()
    if name.startswith("adamw"):
        inner = torch.optim.AdamW(named.values(), fused=True)
    else:
        groups = [
            {"params": [named[n] for n in named if n.endswith(e)]} for e in ("weight", "bias")
        ]
        inner = torch.optim.SGD(groups, lr=1.0)
    optimizer = MixedPrecisionOptimizer(inner, wanted.options, model=model)
    load_and_restore(optimizer, FOLDER / name)
    assert optimizer.scaler.state == wanted.scaler
    assert (optimizer.step_count, optimizer.has_fallback) == (
        wanted.step_count,
        wanted.has_fallback,
    )
    state = optimizer.state_dict()
    assert same(state["masters"], wanted.master_weights)
    assert same(state["inner"], wanted.base_optimizer_state)
    dtype = torch.float32 if wanted.has_fallback else wanted.options.precision.dtype
    assert torch.equal(model[0].weight, wanted.master_weights["0.weight"].to(dtype))


def test_they_are_small_and_never_made_again():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 64 * 1024
    done = subprocess.run(
        [sys.executable, golden.__file__, FOLDER], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "never made again" in done.stderr
