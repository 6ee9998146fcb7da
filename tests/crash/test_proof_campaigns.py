"""The campaigns of ``make proof`` in short: holdfast keeps its promises, and so does a saver that
is right; those that are broken on purpose are found out, each by the campaign made for it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from traced import unavailable

pytestmark = pytest.mark.timeout(300)  # one of them waits for all, beside whatever else runs

KILLS = 12
HERE = Path(__file__).parent
PROOF = HERE.parents[1] / "proof"


@pytest.fixture(scope="module")
def told():
    """All in one process: it imports torch once."""
    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    path = [str(PROOF), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(HERE / "short_campaigns.py")],
        capture_output=True, text=True, timeout=280, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def results(told):
    return told["results"]


@pytest.mark.parametrize("campaign", ["crash states", "kills", "failing calls"])
@pytest.mark.parametrize("saver", ["holdfast", "careful"])
def test_what_is_right_is_found_so(results, campaign, saver):
    outcome = results[f"{campaign}: {saver}"]
    assert outcome["violations"] == []
    assert outcome["cases"] > 2


@pytest.mark.parametrize(
    ("campaign", "saver"),
    [
        ("crash states", "unsynced"),
        ("crash states", "in place"),
        ("kills", "in place"),
        ("kills", "denying"),
        ("kills", "yielding"),
        ("failing calls", "swallowing"),
    ],
)
def test_what_is_broken_is_found_out(results, campaign, saver):
    outcome = results[f"{campaign}: {saver}"]
    assert outcome["violated"] > 0
    assert outcome["violations"]


def test_only_processes_that_came_to_harm_in_a_save_are_counted(results):
    fell_into_one = ("killed during", "stopped during", "stopped at")
    beside = ("killed after", "stopped after", "made no such call")
    for saver in ("holdfast", "careful"):
        outcome = results[f"kills: {saver}"]
        facts = outcome["facts"].items()
        assert outcome["cases"] == sum(n for name, n in facts if name.startswith(fell_into_one))
        assert KILLS - outcome["cases"] == sum(n for name, n in facts if name.startswith(beside))
    assert results["kills: careful"]["cases"] < KILLS  # it lacks some of the calls of a commit


@pytest.mark.parametrize("saver", ["in place", "denying", "yielding"])
def test_no_more_is_violated_than_was_tried(results, saver):
    outcome = results[f"kills: {saver}"]
    assert outcome["violated"] <= outcome["cases"] <= KILLS


def test_a_process_that_neither_stops_nor_ends_takes_no_more_than_its_time(results):
    assert results["never over"]["violations"] == ["neither stopped nor over within 0.2 s"]


@pytest.mark.parametrize(
    ("saver", "is_right"), [("holdfast", True), ("careful", True), ("unsynced", False)]
)
def test_power_cuts_tell_durable_from_acknowledged(told, saver, is_right):
    if told["no power cuts"] is not None:
        pytest.skip(told["no power cuts"])
    outcome = told["results"][f"power cuts: {saver}"]
    assert (outcome["violated"] == 0) == is_right, outcome["violations"]


def test_the_recorder_misses_no_call_that_reaches_the_disk(results):
    assert results["unseen calls"]["violations"] == []
