"""A torchrun job is told to end in the ways in which schedulers do it, and saves once."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from holdfast.coordination import SoloCoordinator
from holdfast.distributed import DistributedCheckpoint, LoadOptions

RANKS = 2
START_S = 60.0
END_S = 60.0
MARK = "HOLDFAST_PREEMPTION_TEST"
JOB = Path(__file__).with_name("preemption_job.py")


@contextlib.contextmanager
def job(folder):
    """torchrun, and in the end nothing of it, whatever happened."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    with (folder / "output.txt").open("wb") as output:
        agent = subprocess.Popen(
            [*torchrun, "--nproc-per-node", str(RANKS), JOB, folder],
            env={**os.environ, MARK: str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield agent
    finally:
        for pid in processes(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait()


def processes(folder):
    """Ids of all processes of the job, liveness helpers included."""
    mark = f"{MARK}={folder}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return found


def begun(folder, agent):
    """The process ids of the ranks, once all of them train."""
    until = time.monotonic() + START_S
    while len(list(folder.glob("begun.*"))) < RANKS:
        assert agent.poll() is None, (folder / "output.txt").read_text()
        assert time.monotonic() < until
        time.sleep(0.05)
    return [int((folder / f"begun.{rank}").read_text()) for rank in range(RANKS)]


def tell_torchrun(agent, folder, ranks):
    """As Kubernetes does to the first process of a container, and ``scancel --batch`` to a script
    that hands it on: torchrun forwards it to the ranks."""
    os.kill(agent.pid, signal.SIGTERM)


def tell_everybody(agent, folder, ranks):
    """As systemd and a SLURM step do: the ranks, their helpers and torchrun, which forwards it."""
    for pid in processes(folder):
        os.kill(pid, signal.SIGTERM)


def tell_one_rank(agent, folder, ranks):
    os.kill(ranks[1], signal.SIGTERM)


@pytest.mark.parametrize(
    "tell", [tell_torchrun, tell_everybody, pytest.param(tell_one_rank, marks=pytest.mark.proof)]
)
def test_a_torchrun_job_that_is_told_to_end_saves_once_at_the_agreed_step(tmp_path, tell):
    with job(tmp_path) as agent:
        tell(agent, tmp_path, begun(tmp_path, agent))
        agent.wait(END_S)
        output = (tmp_path / "output.txt").read_text()
        ended = [path.read_text() for path in sorted(tmp_path.glob("ended.*"))]
    assert len(ended) == RANKS, output
    assert len(set(ended)) == 1
    assert "SIGKILL" not in output

    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    with DistributedCheckpoint(coordinator=SoloCoordinator(), storage=tmp_path / "store") as ckpt:
        (info,) = ckpt.list_checkpoints()
        assert info.step == int(ended[0])
        assert ckpt.catalog.verify(info.prefix).is_intact
        options = LoadOptions(checkpoint_prefix=info.prefix, load_rng_state=False)
        result = ckpt.load(model, optimizer, options)
    assert result.extra["step"] == info.step
    assert optimizer.state[model.weight]["step"] == info.step
