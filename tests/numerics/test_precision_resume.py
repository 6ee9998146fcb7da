"""The exact-resume matrix: every optimizer, precision and moment, saved in one process and loaded
in another, whose next 100 steps are those that this one takes, to the last bit."""

import json
import pathlib
import subprocess
import sys

import precision_resume as matrix
import pytest
import torch

from holdfast.precision import create_checkpoint, load_checkpoint

pytestmark = pytest.mark.timeout(600)  # half a minute's work, which a busy machine shares out


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What both processes saw. This one goes on while the other resumes."""
    folder = tmp_path_factory.mktemp("resume")
    before = torch._C._get_mkldnn_enabled(), torch.get_num_threads()
    torch._C._set_mkldnn_enabled(False)
    torch.set_num_threads(1)
    try:
        begun = {case.name: matrix.begin(case, folder) for case in matrix.CASES}
        command = [sys.executable, matrix.__file__, str(folder)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as other:
            here = {}
            for case in matrix.CASES:
                here[case.name] = matrix.go_on(case, *begun[case.name])
            _, said = other.communicate(timeout=500)
        assert other.returncode == 0, said
    finally:
        torch._C._set_mkldnn_enabled(before[0])
        torch.set_num_threads(before[1])
    there = json.loads((folder / "saw.json").read_text())
    return folder, begun, here, there


@pytest.mark.parametrize("case", matrix.CASES, ids=lambda case: case.name)
def test_the_next_hundred_steps_are_the_same(runs, case):
    folder, begun, here, there = runs
    _, optimizer = begun[case.name]
    assert len(here[case.name]) == matrix.FURTHER + 1
    assert here[case.name] == there[case.name]
    ours = dict(matrix.tensors_of(fields(create_checkpoint(optimizer))))
    after = load_checkpoint(pathlib.Path(folder) / f"{case.name}.after.safetensors")
    theirs = dict(matrix.tensors_of(fields(after)))
    assert ours.keys() == theirs.keys()
    for place, value in ours.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, theirs[place]), place
        else:
            assert value == theirs[place], place


@pytest.mark.parametrize("case", matrix.CASES, ids=lambda case: case.name)
def test_it_was_saved_at_that_moment(runs, case):
    saved = load_checkpoint(runs[0] / f"{case.name}.safetensors")
    fell_back = case.moment == "after fallback"
    moment = matrix.MOMENTS[case.moment]
    early = {number for number in moment.overflows if number < moment.steps}
    assert saved.step_count == moment.steps
    assert saved.skipped_steps == saved.total_overflows == len(early)
    assert saved.has_fallback is fell_back
    assert bool(saved.base_optimizer_state["state"]) == (moment.steps > 0)
    if case.moment == "mid overflow streak":
        assert saved.consecutive_overflows == 3
    if case.moment == "mid growth interval":
        assert 0 < saved.scaler.growth_tracker < saved.scaler.growth_interval
    dtype = torch.float32 if fell_back else {"fp16": torch.float16, "bf16": torch.bfloat16}
    weight = saved.training_weights.get("one.weight", saved.training_weights.get("table.weight"))
    assert weight.dtype == (dtype if fell_back else dtype[case.precision])


@pytest.mark.parametrize("case", matrix.CASES, ids=lambda case: case.name)
def test_the_steps_do_something(runs, case):
    """Or the rest would show nothing."""
    _, _, here, _ = runs
    assert len(set(here[case.name])) == matrix.FURTHER + 1


def fields(checkpoint):
    names = ("master_weights", "training_weights", "base_optimizer_state", "scaler", "options")
    counts = ("step_count", "skipped_steps", "has_fallback")
    return {name: getattr(checkpoint, name) for name in (*names, *counts)}
