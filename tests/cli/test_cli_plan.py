"""``holdfast plan``: what it makes of a function of the user's, and of one that is wrong."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from cli_tools import Ran
from cli_tools import refused as refused_without_torch

from holdfast import ActivationPlan

pytestmark = pytest.mark.timeout(600)  # a busy machine takes its time over loading torch

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("\n## plan\n")[2].partition("\n## ")[0]

NO_TORCH = """
def nothing():
    return None


def four():
    return 1, 2, 3, 4


def fails():
    raise ZeroDivisionError("the loss is NaN")


def leaves():
    raise SystemExit(7)


number = 7
"""

WITH_TORCH = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 256), nn.Linear(256, 32)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def made():
    print("made by the user's code")
    return nn.Sequential(*(Block() for _ in range(6))), torch.randn(64, 32), torch.sum


def single():
    return nn.Linear(4, 4), torch.randn(2, 4), torch.sum


def misfit():
    return nn.Sequential(Block(), Block()), torch.randn(2, 4), torch.sum


def no_model():
    return "a model", torch.randn(2, 4)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plans")
    (folder / "bare.py").write_text(NO_TORCH)
    (folder / "heavy.py").write_text(WITH_TORCH)
    (folder / "broken.py").write_text("import not_to_be_found")
    (code,) = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
    (folder / "train.py").write_text(code)
    return folder


SERVER = """
import json, os, sys
import holdfast.activation  # with torch: to load it takes longer than to plan
import cli_server
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        cli_server.run(json.loads(line))
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


@pytest.fixture(scope="module")
def server():
    """Runs command lines, each in a process forked from one that has loaded torch."""
    beside = f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": beside},
    ) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def plan(server, folder, tmp_path):
    """``holdfast plan`` with these arguments, in the folder of the files."""
    out, err = tmp_path / "out", tmp_path / "err"

    def run(*arguments):
        out.write_text("")
        err.write_text("")
        wanted = {
            "arguments": ["plan", *arguments],
            "env": {},
            "cwd": str(folder),
            "out": str(out),
            "err": str(err),
            "powerless": False,
        }
        server.stdin.write(f"{json.dumps(wanted)}\n")
        server.stdin.flush()
        return Ran(int(server.stdout.readline()), out.read_text(), err.read_text())

    return run


def refused(ran, *, code, saying):
    assert ran.code == code, (ran.code, ran.err)
    told = [line for line in ran.err.splitlines() if line.startswith("holdfast: ")]
    assert len(told) == 1, ran.err
    assert "Traceback" not in ran.err
    assert ran.out == ""
    for words in [saying] if isinstance(saying, str) else saying:
        assert words in told[0], ran.err
    return told[0]


def test_the_lines_of_the_document(folder, plan):
    as_page, as_json = (
        shlex.split(line)[2:]
        for block in re.findall(r"```sh\n(.*?)```", SECTION, re.DOTALL)
        for line in block.splitlines()
    )
    shown = subprocess.run(
        [sys.executable, "-W", "error", "-m", "holdfast.cli", "plan", *as_page],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    assert "It fits" in shown.stdout
    assert "layers.3" in shown.stdout
    page = (folder / "plan.html").read_text("utf-8")
    assert page.startswith("<!doctype html>")
    assert "Activation plan of TransformerEncoder" in page
    printed = plan(*as_json)
    assert printed.code == 0, printed.err
    again = ActivationPlan.from_json(printed.out)
    assert again.peak_bytes <= again.budget_bytes < again.summary.save_all_peak_bytes


def test_too_small_a_budget_tells_the_smallest_which_then_fits(plan):
    ran = plan("heavy.py:made", "--budget", "16KiB")
    told = refused(ran, code=1, saying="no plan fits 16.0 KiB")
    (smallest,) = re.findall(r"--budget (\d+B)\)$", told)
    fits = plan("heavy.py:made", "--budget", smallest, "--json")
    assert fits.code == 0, fits.err
    assert json.loads(fits.out)["summary"]["budget_bytes"] == int(smallest[:-1])
    assert "made by the user's code" in fits.err  # and not in the document


@pytest.mark.parametrize(
    ("target", "code", "saying"),
    [
        ("bare.py", 2, "is not MODULE:FUNCTION"),
        (":made", 2, "is not MODULE:FUNCTION"),
        ("bare.py:1+1", 2, "is not MODULE:FUNCTION"),
        ("nowhere.py:made", 3, "there is no file nowhere.py"),
        ("./:made", 3, "there is no file"),
        ("nowhere:made", 3, "there is no module 'nowhere'"),
        ("bare.py:made", 3, "has no function 'made'"),
        ("bare.py:number", 2, "is a int and no function"),
        ("bare.py:nothing", 2, ["returned a NoneType", "(model, sample)"]),
        ("bare:four", 2, "returned a tuple of 4"),
        ("bare.py:fails", 2, "bare.py:fails failed: ZeroDivisionError: the loss is NaN"),
        ("bare.py:leaves", 2, "SystemExit: 7"),
        ("broken.py:made", 2, ["broken.py cannot be run", "not_to_be_found"]),
        ("broken:made", 2, ["broken cannot be imported", "not_to_be_found"]),
    ],
)
def test_what_cannot_be_meant(plan, target, code, saying):
    refused(plan(target, "--budget", "50%"), code=code, saying=saying)


@pytest.mark.parametrize(
    ("target", "budget", "saying"),
    [
        ("heavy.py:made", "much", "budget 'much' is no number with a unit"),
        ("heavy.py:single", "50%", "there is no plan for heavy.py:single"),
        ("heavy.py:misfit", "50%", "failed on its sample: RuntimeError"),
        ("heavy.py:no_model", "50%", "model must be"),
    ],
)
def test_what_no_plan_can_be_made_of(plan, target, budget, saying):
    refused(plan(target, "--budget", budget), code=2, saying=saying)


def test_the_traceback_of_the_users_code_is_for_those_who_ask(plan):
    ran = plan("bare.py:fails", "--budget", "50%", "--debug")
    assert ran.code == 2
    assert 'raise ZeroDivisionError("the loss is NaN")' in ran.err


def test_a_page_that_cannot_be_written_is_refused_before_anything_runs(plan):
    ran = plan("bare.py:fails", "--budget", "50%", "--html", "nowhere/plan.html")
    refused(ran, code=3, saying="there is no such folder")


def test_without_torch_it_says_what_to_install(tmp_path):
    refused_without_torch("plan", "a:b", "--budget", "50%", code=2, saying="holdfast[torch]")
