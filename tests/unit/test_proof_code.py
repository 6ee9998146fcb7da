"""Batches are counted together only if the code is the same: what changes it, and what does not."""

import subprocess
import sys
import time
from pathlib import Path

import proof_tools
import pytest

from _campaign import Campaign, Outcome
from _code import code_of
from _ledger import Ledger, RunKey
from _running import CodeChangedError, Run, run
from _screen import screen


def git(folder, *arguments):
    who = ["-c", "user.name=a", "-c", "user.email=a@example.invalid"]
    subprocess.run(["git", "-C", folder, *who, *arguments], check=True, capture_output=True)


@pytest.fixture
def repo(tmp_path):
    for name in ("src/a.py", "tests/b.py", "proof/c.py", "proof/results/latest.md", "docs/d.md"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "one")
    return tmp_path


def test_results_and_documents_may_change(repo):
    clean = code_of(repo)
    (repo / "proof/results/latest.md").write_text("2\n")
    (repo / "docs/d.md").write_text("2\n")
    (repo / "docs/new.md").write_text("2\n")
    assert code_of(repo) == clean
    git(repo, "add", "-A")
    git(repo, "commit", "-q", "-m", "documents")
    assert code_of(repo).key == clean.key


@pytest.mark.parametrize("name", ["src/a.py", "tests/b.py", "proof/c.py", "src/new.py"])
def test_every_other_change_is_another_code(repo, name):
    clean = code_of(repo)
    (repo / name).write_text("2\n")
    changed = code_of(repo)
    assert changed.key != clean.key
    assert changed.shown.startswith(f"{clean.shown} with changes")
    assert code_of(repo) == changed
    git(repo, "add", "-A")
    git(repo, "commit", "-q", "-m", "two")
    assert code_of(repo).key == changed.key  # as it was tried before it was committed
    assert "with changes" not in code_of(repo).shown
    (repo / name).unlink()
    assert code_of(repo).key not in (changed.key, clean.key if name != "src/new.py" else "")


def test_without_git_no_two_processes_run_the_same(tmp_path):
    here = code_of(tmp_path)
    assert code_of(tmp_path) == here
    program = "import sys, pathlib, _code; print(_code.code_of(pathlib.Path(sys.argv[1])).key)"
    proof = Path(proof_tools.__file__).parents[2] / "proof"
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path],
        cwd=proof,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("no git, ")
    assert done.stdout.strip() != here.key


def test_a_run_ends_when_the_code_changes(tmp_path):
    (tmp_path / "sums.py").write_text(
        "from _campaign import Campaign, Outcome\n"
        "CAMPAIGN = Campaign(name='sums', promise='', counted='', cases=99,\n"
        "    run=lambda subject, seed: Outcome(cases=1))\n"
    )
    campaign = Campaign(
        name="sums", promise="", counted="", cases=99, run=lambda *_: Outcome(cases=0)
    )
    ledger = Ledger(tmp_path / "batches.jsonl", RunKey(seed=1, code="a"))
    asked = iter([True, True, False])
    plan = Run(
        folder=tmp_path,
        rows=[(campaign, "holdfast")],
        seed=1,
        jobs=1,
        ledger=ledger,
        screen=screen(),
        is_same_code=lambda: next(asked),
    )
    with pytest.raises(CodeChangedError, match="what it found until then is kept"):
        run(plan, until_s=time.monotonic() + 100)
    assert [batch.cases for batch in ledger.batches()] == [1, 1]
