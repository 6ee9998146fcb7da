"""Starts a run by torchrun and reads what its ranks tell. Knows processes, not what is told."""

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from holdfast.cli._demonstration.jobs import Event, Job

SILENCE_S: Final = 300.0
_END_S: Final = 40.0  # torchrun gives ranks 30 s
_PIPE_BYTES: Final = 65536
_TRAINING: Final = "holdfast.cli._demonstration.training"


class RunError(Exception):
    """A run did not come to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """The last of a run: torchrun's exit code."""

    code: int


def events_of(job: Job, *, ranks: int, log: Path) -> Generator[Event | Exited]:
    """Run a job, and yield what its ranks tell as they tell it. What they and torchrun write
    besides is in ``log``. A generator that is closed before its end ends the run.

    ``RunError`` if nothing was heard for five minutes.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    asked = ["--nproc-per-node", str(ranks), "-m", _TRAINING, msgspec.json.encode(job).decode()]
    with (
        log.open("wb") as noise,
        subprocess.Popen(  # noqa: S603 -- this Python, and a job of ours
            [*torchrun, *asked],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=noise,
            env=_environment(),
            start_new_session=True,  # Ctrl-C is for the demo, which ends the run
        ) as process,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(_end, process)
        for line in _lines(process, log):
            try:
                yield msgspec.json.decode(line, type=Event)
            except msgspec.DecodeError:
                noise.write(line + b"\n")
                noise.flush()
        yield Exited(code=process.wait())


def _environment() -> dict[str, str]:
    # torch's account of a rank that is gone, with stack traces of C++, would drown ours.
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **quiet}


def _lines(process: "subprocess.Popen[bytes]", log: Path) -> Iterator[bytes]:
    if process.stdout is None:  # it is a pipe
        return
    pipe, rest = process.stdout.fileno(), b""
    while True:
        ready, _, _ = select.select([pipe], [], [], SILENCE_S)
        if not ready:
            raise RunError(f"the ranks have told nothing for {SILENCE_S:.0f} s; their log is {log}")
        data = os.read(pipe, _PIPE_BYTES)
        *lines, rest = (rest + data).split(b"\n")
        yield from filter(None, lines)
        if not data:
            return


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is not None:
        return
    process.terminate()  # torchrun ends its ranks then
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    process.kill()
