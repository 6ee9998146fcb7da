"""Jobs of torchrun that are killed and go on by themselves: launched again, on as many ranks or
others, and restarted by torchrun. A launch takes seconds, because every rank imports torch."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from resume_training import EVERY, Told, live, undisturbed

from holdfast.testing import RankGang

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
SCRIPT = Path(__file__).with_name("resume_job.py")
MARK = "HOLDFAST_RESUME_TEST"
LIMIT_S = 90.0
STEPS = 24

pytestmark = pytest.mark.timeout(600)  # a test may take the limit more than once


class Launch:
    """One launch of the job, with every process that it has started."""

    def __init__(self, folder, name, ranks, *more, steps=STEPS, restarts=0):
        self._folder = folder
        self._name = name
        self._ranks = ranks
        self._mark = f"{MARK}={folder}/{name}".encode()
        command = [*TORCHRUN, "--standalone", "--nproc-per-node", str(ranks)]
        environment = {**os.environ, MARK: f"{folder}/{name}", "OMP_NUM_THREADS": "1"}
        if restarts:
            command += ["--max-restarts", str(restarts)]
            environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # see docs/coordination.md
        with (folder / f"{name}.output").open("wb") as output:
            self._agent = subprocess.Popen(
                [*command, SCRIPT, folder, name, str(steps), *map(str, more)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()

    def kill(self):
        """SIGKILL to the launcher and all that it started, as when the machine goes down."""
        while self._agent.poll() is None or self._processes():
            self._agent.kill()
            for pid in self._processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._agent.wait()

    def _processes(self):
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has just ended, or is another user's
                if self._mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return found

    def wait_for_saving(self, step):
        """Until that step is being saved, and not yet saved."""
        until = time.monotonic() + LIMIT_S
        while f"phase {step} " not in self._diary(0).read_text():
            assert self._agent.poll() is None, self.output()
            assert time.monotonic() < until, self.output()
            time.sleep(0.005)

    def wait(self):
        assert self._agent.wait(LIMIT_S) == 0, self.output()

    def told(self, restart=0):
        return [Told.read(self._diary(rank, restart)) for rank in range(self._ranks)]

    def output(self):
        return (self._folder / f"{self._name}.output").read_text()

    def _diary(self, rank, restart=0):
        path = self._folder / f"{self._name}-{restart}-rank-{rank}"
        path.touch()
        return path


@pytest.fixture(scope="module")
def expected():
    """What each of two ranks does in every step, if nobody disturbs it."""
    with RankGang(2) as gang:
        return gang.run(undisturbed, STEPS)


def rows_of(told, step):
    """Those of all ranks together, which do not depend on how many there are."""
    return sorted(row for each in told for row in each.steps[step][0])


def require_exact(told, expected, *, start, end):
    for rank, each in enumerate(told):
        assert (each.resumed, each.passed_over) == (start, 0)
        assert [*each.steps] == [*range(start, end)]
        for step, what in each.steps.items():
            assert what == expected[rank][step], (rank, step)


def test_a_job_that_is_killed_goes_on_when_it_is_launched_again(tmp_path, expected):
    kill_at = 4 * EVERY
    with Launch(tmp_path, "first", 2, "wait", kill_at) as first:
        first.wait_for_saving(kill_at)
        first.kill()
    killed = first.told()
    assert not any(each.is_done for each in killed)
    assert {each.resumed for each in killed} == {0}

    with Launch(tmp_path, "second", 2) as second:
        second.wait()
    resumed = second.told()
    start = resumed[0].resumed
    assert start >= max(each.saved for each in killed) > 0
    require_exact(resumed, expected, start=start, end=STEPS)
    assert all(each.is_done and each.saved == STEPS for each in resumed)


def test_it_goes_on_with_another_number_of_ranks(tmp_path, expected):
    """Three after two: the rows of all ranks together go on where they were left."""
    with RankGang(2) as gang:
        gang.run(live, tmp_path, "two", 2 * EVERY)

    with Launch(tmp_path, "three", 3) as three:
        three.wait()
    told = three.told()
    for each in told:
        assert [*each.steps] == [*range(2 * EVERY, STEPS)]
        assert (each.is_done, each.saved, each.failed) == (True, STEPS, [])
    for step in range(2 * EVERY, STEPS):
        assert rows_of(told, step) == sorted(expected[0][step][0] + expected[1][step][0])


def test_a_rank_that_dies_is_restarted_by_torchrun_and_all_go_on(tmp_path, expected):
    died_at = 4 * EVERY
    with Launch(tmp_path, "job", 2, "die", died_at, restarts=1) as job:
        job.wait()
    before, after = job.told(0), job.told(1)
    assert not any(each.is_done for each in before)
    start = after[0].resumed
    assert max(each.saved for each in before) <= start <= died_at
    assert start > 0
    require_exact(after, expected, start=start, end=STEPS)
    assert all(each.is_done and each.saved == STEPS for each in after)
