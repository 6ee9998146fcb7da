"""Real ranks train on while they are saved: what is saved is of one moment on all of them, the
training is the same as without, and what happens to one rank is known to all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fault_jobs import LIVENESS_S, Harm
from save_async_jobs import (
    apart_job,
    cancel_job,
    harmed_job,
    load_job,
    refuse_job,
    train_job,
    uneven_job,
    wrong_job,
)

from holdfast.catalog import Catalog
from holdfast.testing import RankGang

NOTICED_S = 20.0  # promised is 1 s; see test_checkpoint_faults.py
DRIVER = Path(__file__).with_name("exit_ranks.py")


@pytest.fixture(scope="module")
def gangs():
    """Ranks by how many they are, for cases that all of them survive."""
    with RankGang(1) as one, RankGang(2) as two, RankGang(3) as three:
        yield {1: one, 2: two, 3: three}


@pytest.fixture(scope="module")
def two(gangs):
    return gangs[2]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("ddp", {}),
        ("fsdp", {}),
        ("fsdp", {"format": "consolidated"}),
        ("ddp", {"format": "single_file", "compression_level": "fast"}),
        ("fsdp", {"incremental": True, "snapshot": "copy"}),
    ],
)
def test_a_training_goes_on_as_if_nobody_saved(kind, options, tmp_path, gangs):
    two = gangs[2]
    plain = two.run(train_job, tmp_path / "none", kind)
    saving = two.run(train_job, tmp_path / "store", kind, every=3, **options)
    assert [each[:2] for each in saving] == [each[:2] for each in plain]
    saved = saving[0][2]
    assert saving[1][2] == saved
    assert len(set(saved.values())) == len(saved) == 4
    catalog = Catalog(tmp_path / "store")
    assert all(catalog.verify(name).is_intact for name in saved)
    for ranks, prefix in ((1, "step_1"), (2, "step_4"), (3, "step_7"), (2, "step_10")):
        for found in gangs[ranks].run(load_job, tmp_path / "store", kind, prefix):
            assert found == saved[prefix], prefix


def test_ranks_that_come_at_different_times(tmp_path, gangs):
    (expected, after), other = gangs[2].run(apart_job, tmp_path)
    assert other == (expected, after)
    assert expected != after
    assert gangs[3].run(load_job, tmp_path, "fsdp", "step_1") == [expected] * 3


WRONG = {
    "value": ("SaveError", "capture", "extra.x is an object"),
    "state_dict": ("SaveError", "capture", "the state_dict() of extra.x, a _Failing, failed"),
    "in_place": ("TornSnapshotError", "write", "model.up.weight changed while being saved"),
    "fsdp_data": ("TornSnapshotError", "write", "model.up.weight changed while being saved"),
    "fsdp_numpy": ("TornSnapshotError", "write", "model.up.weight changed while being saved"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_on_one_rank_is_raised_on_all(wrong, tmp_path, two):
    error, phase, text = WRONG[wrong]
    for end, took_s, goes_on in two.run(wrong_job, tmp_path, wrong):
        assert (end.error, end.rank, end.phase) == (error, 1, phase), end.text
        assert text in end.text
        assert took_s < NOTICED_S
        assert goes_on
    assert len(Catalog(tmp_path).list()) == 1  # that of the next save


def test_ranks_that_are_not_at_the_same_step(tmp_path, two):
    for end, took_s, goes_on in two.run(wrong_job, tmp_path, "step"):
        assert end.error == "SaveError"
        assert "step" in end.text
        assert "5" in end.text
        assert "6" in end.text
        assert took_s < NOTICED_S
        assert goes_on


def test_a_rank_that_leaves_a_save_out(tmp_path, two):
    ends = two.run(uneven_job, tmp_path)
    assert all(each[-1].error == "SaveError" for each in ends), ends
    assert Catalog(tmp_path).list() == []


LOST = [
    ("finish shard before", 1, "kill"),
    ("finish shard before", 0, "kill"),
    ("progress agree", 1, "kill"),
    ("finish shard before", 1, "stop"),
    ("finish shard before", 0, "stop"),
]


@pytest.mark.parametrize(("event", "victim", "kind"), LOST)
def test_a_rank_is_lost_while_the_others_train(event, victim, kind, tmp_path):
    log = tmp_path / "harmed"
    with RankGang(3) as gang:
        harm = Harm(kind=kind, event=event, rank=victim, log=log)
        gang.start(harmed_job, tmp_path / "store", harm)
        others = [rank for rank in range(3) if rank != victim]
        outcomes = gang.outcomes(60, ranks=others)
        harmed_s = float(log.read_text())
        patience_s = LIVENESS_S if kind == "stop" else 0.0
        for outcome in outcomes:
            assert outcome.error is None, outcome.error
            end = outcome.value
            assert (end.error, end.rank) == ("RankLostError", victim), end.text
            assert end.at_s - harmed_s < patience_s + NOTICED_S
    assert Catalog(tmp_path / "store").list() == []


CANCELS = ["agree all_gather before", "write_at shard before", "finish shard before"]


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("event", CANCELS)
def test_one_rank_gives_the_save_up(event, who, tmp_path, two):
    for rank, found in enumerate(two.run(cancel_job, tmp_path, event, who)):
        agreed, cancelled, text, left, recorded, goes_on = found
        assert agreed is (True if rank == who else None)
        assert (cancelled, recorded) == (True, True), text
        assert text.startswith("CancelledError: "), text
        assert left == []
        assert goes_on
    assert len(Catalog(tmp_path).list()) == 1


def test_a_save_is_refused_on_all_ranks_while_one_is_busy(tmp_path, two):
    for rank, (done, refused, goes_on) in enumerate(two.run(refuse_job, tmp_path)):
        assert done is (rank == 1)
        assert "still under way on rank 0" in refused
        assert goes_on


def test_ranks_that_leave_right_after_they_saved(tmp_path):
    """The process group is destroyed and the interpreters end, but not before the save."""
    done = subprocess.run(
        [sys.executable, DRIVER, tmp_path],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    for store in ("file", "tcp"):
        catalog = Catalog(tmp_path / store)
        (info,) = catalog.list()
        assert info.world_size == 2
        assert catalog.verify("a").is_intact
        assert (catalog.read("a")["model"]["weight"] == 3).all()
