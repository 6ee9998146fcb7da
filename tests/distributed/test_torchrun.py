"""The faults of test_rank_faults.py in jobs that torchrun started.

The store lives in torchrun's agent, so it outlives every rank, and the agent sends SIGTERM to
the others once a worker has died. A launch takes seconds, because every rank imports torch.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from torchrun_job import LIVENESS_S, TIMEOUT_S

from holdfast.errors import ErrorRecord, RankFailedError, RankLostError, StorageError

# Far below the timeout and far above the bounds: see test_rank_faults.py.
NOTICED_S = 10.0
START_S = 60.0
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
MARK = "HOLDFAST_TORCHRUN_TEST"

RANKS = range(4)


class Outcome(msgspec.Struct):
    error: ErrorRecord | None
    at: float


class Fault(msgspec.Struct):
    at: float


class Worker(msgspec.Struct):
    pid: int
    agent_store: str


class Job:
    """A torchrun job that goes through ``cases``; every process of it carries a mark."""

    def __init__(self, folder, *cases):
        self._folder = folder
        self._mark = f"{MARK}={folder}".encode()
        script = Path(__file__).with_name("torchrun_job.py")
        # A file, not a pipe: a helper that outlived its rank would keep a pipe open.
        with (folder / "output.txt").open("wb") as output:
            self._agent = subprocess.Popen(
                [*TORCHRUN, "--standalone", "--nproc-per-node", "4", script, folder, *cases],
                env={**os.environ, MARK: str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._agent.kill()
        self._agent.wait()

    def processes(self):
        """Ids of all processes of this job, liveness helpers and stopped ones included."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has just ended, or is another user's
                if self._mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return found

    def outcome(self, case, rank):
        return self._read(f"{case}.{rank}.json", Outcome)

    def fault_at(self, case):
        return self._read(f"{case}.fault.json", Fault).at

    def worker(self, rank):
        return self._read(f"worker.{rank}.json", Worker)

    def exit_code(self):
        return self._agent.wait(START_S)

    def output(self):
        return (self._folder / "output.txt").read_text()

    def is_gone(self):
        """Whether every process of the job ends, helpers included, without being killed."""
        until = time.monotonic() + NOTICED_S
        while self.processes() and time.monotonic() < until:
            time.sleep(0.05)
        return not self.processes()

    def _read(self, name, kind):
        path = self._folder / name
        until = time.monotonic() + START_S
        while not path.exists():
            if self._agent.poll() is not None and not path.exists():
                pytest.fail(f"the job ended without writing {name}:\n{self.output()}")
            assert time.monotonic() < until, f"no {name}:\n{self.output()}"
            time.sleep(0.05)
        return msgspec.json.decode(path.read_bytes(), type=kind)


def assert_survivors_name(job, case, victim, *, how, within_s):
    fault_at = job.fault_at(case)
    for rank in RANKS:
        if rank == victim:
            continue
        outcome = job.outcome(case, rank)
        assert outcome.error is not None
        error = outcome.error.rebuild()
        assert type(error) is RankLostError
        assert error.ranks == (victim,)
        assert (error.rank, error.phase) == (victim, "write")
        assert f"rank {victim} {how}" in error.message
        assert outcome.at - fault_at < within_s < TIMEOUT_S


def test_errors_reach_every_rank_and_a_late_one_is_waited_for(tmp_path):
    with Job(tmp_path, "raise_foreign:2", "raise_ours:0", "come_late:0") as job:
        for rank in RANKS:
            assert job.worker(rank).agent_store == "True"  # or this shows nothing new

        for rank in RANKS:
            outcome = job.outcome("raise_foreign:2", rank)
            assert outcome.error is not None
            error = outcome.error.rebuild()
            assert type(error) is RankFailedError
            assert (error.rank, error.phase) == (2, "write")
            assert error.error_type == "ZeroDivisionError"
            assert error.message == "ZeroDivisionError: the loss is NaN"
            assert "in raise_foreign" in outcome.error.traceback
            assert outcome.at - job.fault_at("raise_foreign:2") < NOTICED_S

        for rank in RANKS:
            outcome = job.outcome("raise_ours:0", rank)
            assert outcome.error is not None
            error = outcome.error.rebuild()
            assert type(error) is StorageError
            assert (error.rank, error.phase, error.path) == (0, "write", "step_7/shard-1")
            assert error.message == "the disk is full"
            assert outcome.at - job.fault_at("raise_ours:0") < NOTICED_S

        for rank in RANKS:
            outcome = job.outcome("come_late:0", rank)
            assert outcome.error is None
            assert outcome.at - job.fault_at("come_late:0") > LIVENESS_S  # it was waited for

        assert job.exit_code() == 0, job.output()
        assert job.is_gone()


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_is_killed_is_named_by_every_survivor(tmp_path, victim):
    case = f"kill_self:{victim}"
    with Job(tmp_path, case) as job:
        assert_survivors_name(job, case, victim, how="died (its process ended)", within_s=NOTICED_S)
        assert job.exit_code() != 0
        assert f"exitcode  : -9 (pid: {job.worker(victim).pid})" in job.output()
        assert job.is_gone()


def test_a_stopped_rank_0_is_named_by_every_survivor(tmp_path):
    case = "stop_self:0"
    with Job(tmp_path, case) as job:
        assert_survivors_name(job, case, 0, how="fell silent", within_s=LIVENESS_S + NOTICED_S)
        os.kill(job.worker(0).pid, signal.SIGKILL)
        assert job.exit_code() != 0
        assert job.is_gone()
