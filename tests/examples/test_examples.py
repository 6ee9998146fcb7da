"""The examples, run as a reader runs them: as processes, and once more to see them go on."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from holdfast.catalog import Catalog

# Each test starts Python and torch a few times, which takes a loaded machine minutes.
pytestmark = pytest.mark.timeout(600)

FOLDER = Path(__file__).parents[2] / "examples"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def told_by(example, *arguments, ranks=None):
    """What an example has printed. It must end well, and without a warning."""
    launcher = (sys.executable,) if ranks is None else (*TORCHRUN, str(ranks))
    job = subprocess.run(
        [*launcher, FOLDER / example, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
    )
    assert job.returncode == 0, job.stderr
    assert "Warning" not in job.stderr, job.stderr
    return job.stdout


def steps_of(told):
    """The lines about steps, by step."""
    return {int(number): rest for number, rest in re.findall(r"(?m)^step (\d+): (.*)$", told)}


def loss_of(line):
    return float(re.match(r"loss ([\d.]+)", line)[1])


def saved_in(store):
    return [info.prefix for info in Catalog(store).list()]


def test_a_plain_loop_goes_on_with_the_losses_of_one_long_run(tmp_path):
    with ThreadPoolExecutor() as beside:
        one_run = beside.submit(told_by, "plain_loop.py", tmp_path / "once", 40)
        first, second = (told_by("plain_loop.py", tmp_path / "twice") for _ in range(2))
        whole = one_run.result()

    assert first.startswith("from the beginning\n")
    assert second.startswith(
        "resumed from step_20, step 20, saved by 1 rank and loaded by 1 rank\n"
    )
    assert list(steps_of(second)) == list(range(21, 41))
    assert steps_of(first) | steps_of(second) == steps_of(whole)
    assert loss_of(steps_of(whole)[40]) < loss_of(steps_of(whole)[1]) / 2
    assert saved_in(tmp_path / "twice") == ["step_40", "step_35", "step_30"]


def test_ddp_goes_on_with_another_number_of_ranks(tmp_path):
    of_two = told_by("ddp.py", tmp_path, ranks=2)
    alone = told_by("ddp.py", tmp_path)

    assert of_two.startswith("from the beginning\n")
    assert list(steps_of(of_two)) == list(range(1, 21))
    assert "resumed from step_20, step 20, saved by 2 ranks and loaded by 1 rank" in alone
    assert list(steps_of(alone)) == list(range(21, 41))
    assert loss_of(steps_of(alone)[40]) < loss_of(steps_of(of_two)[1])


def test_fsdp2_is_saved_split_loaded_whole_and_exported(tmp_path):
    of_two = told_by("fsdp2.py", tmp_path / "store", ranks=2)
    alone = told_by("fsdp2.py", tmp_path / "store")

    assert list(steps_of(of_two)) == list(range(1, 21))
    assert "resumed from step_20, step 20, saved by 2 ranks and loaded by 1 rank" in alone
    assert loss_of(steps_of(alone)[40]) < loss_of(steps_of(of_two)[1])
    for step, told in ((20, of_two), (40, alone)):
        folder = tmp_path / "store-export" / f"step_{step}"
        assert told.endswith(f"exported to {folder}\n")
        (file,) = folder.glob("model-*.safetensors")
        assert load_file(file)["2.weight"].shape == (250, 250)


def test_a_plan_fits_its_budget_and_is_used_again(tmp_path):
    first, second = (told_by("activation_plan.py", tmp_path) for _ in range(2))

    assert first.startswith("from the beginning\n")
    assert second.startswith("resumed from step_5, step 5")
    assert list(steps_of(first)) == [1, 2, 3, 4, 5]
    assert list(steps_of(second)) == [6, 7, 8, 9, 10]
    assert "budget" in first  # the report of the plan that was made
    assert "budget" not in second  # none was made
    for told in (first, second):
        found = re.search(r"took ([\d.]+) MiB of ([\d.]+) MiB, and ([\d.]+) MiB without", told)
        fitted, budget, whole = map(float, found.groups())
        assert fitted <= budget
        assert budget < whole * 0.6


def test_mixed_precision_goes_on_with_its_scale(tmp_path):
    first, second = (told_by("mixed_precision.py", tmp_path) for _ in range(2))

    assert "scale 1048576, skipped: it overflowed" in steps_of(first)[1]
    assert "skipped" not in steps_of(first)[20]
    scale = steps_of(first)[20].partition(", ")[2]
    assert second.startswith("resumed from step_20, step 20")
    assert steps_of(second)[21].endswith(f", {scale}")
    lines = [*steps_of(first).values(), *steps_of(second).values()]
    skipped = sum("skipped" in line for line in lines)
    assert second.endswith(f"40 steps, {skipped} skipped; weights are torch.float16\n")


def test_a_training_that_loses_a_rank_goes_on_with_more():
    told = told_by("train_and_resume.py")

    assert "rank 1 died (its process ended)" in told
    assert "step_20, saved by 2 ranks, loaded by 3" in told
    (off,) = re.findall(r"at most (\S+) off in 10 steps", told)
    assert float(off) < 1e-3  # sums are taken in another order
