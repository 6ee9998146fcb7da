"""Two ranks save with ``torch.distributed.checkpoint``, and one of them comes to harm. Knows how
long it takes until the other one knows.

Its group has a timeout of ``TIMEOUT_S``, where torch's default is 30 minutes: who raises only then
has waited for the timeout, and would have waited for half an hour.
"""

import datetime as dt
import os
import signal
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from holdfast.errors import OperationTimeoutError
from holdfast.testing import RankGang

TIMEOUT_S = 10.0
WAITED_S = 0.9 * TIMEOUT_S
GIVE_UP_S = 3 * TIMEOUT_S
KINDS = ("raise", "kill", "stop")
MOMENTS = ("in its state_dict", "in its plan", "in its write")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    kind: str
    moment: str
    victim: int

    def __str__(self) -> str:
        done = {"raise": "raises", "kill": "is killed", "stop": "is stopped"}[self.kind]
        return f"rank {self.victim} {done} {self.moment}"


CASES = tuple(
    Case(kind=kind, moment=moment, victim=victim)
    for kind in KINDS
    for moment in MOMENTS
    for victim in (0, 1)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Noticed:
    """What the other rank saw: after how long, and what it was told, or ``None``."""

    seconds: float
    error: str | None

    def names(self, rank: int) -> bool:
        return self.error is not None and any(
            word in self.error.lower()
            for word in (f"rank {rank}", f"rank={rank}", f"ranks:{{{rank}")
        )


class Harmed:
    """A part of the state, with its own ``state_dict``."""

    def __init__(self, writer: "Writer") -> None:
        self._writer = writer

    def state_dict(self) -> dict[str, torch.Tensor]:
        self._writer.harm("in its state_dict")
        return {"moment": torch.ones(7)}

    def load_state_dict(self, _: dict[str, torch.Tensor]) -> None:
        """Which makes it one that DCP asks for its ``state_dict``."""


class Writer(dcp.FileSystemWriter):  # type: ignore[misc]
    """Comes to harm at its moment."""

    def __init__(self, folder: Path, case: Case, rank: int, told: Path) -> None:
        super().__init__(folder)
        self._case, self._rank, self._told = case, rank, told

    def harm(self, moment: str) -> None:
        if self._rank != self._case.victim or moment != self._case.moment:
            return
        self._told.write_text(str(time.monotonic()))
        if self._case.kind == "raise":
            raise ZeroDivisionError("on purpose")
        os.kill(os.getpid(), signal.SIGKILL if self._case.kind == "kill" else signal.SIGSTOP)

    def prepare_local_plan(self, plan: object) -> object:
        self.harm("in its plan")
        return super().prepare_local_plan(plan)

    def write_data(self, plan: object, planner: object) -> object:
        self.harm("in its write")
        return super().write_data(plan, planner)


def save(rank: int, folder: Path, case: Case, told: Path) -> tuple[float, str | None]:
    """On every rank. When it ended, on the machine's clock, and by what."""
    warnings.simplefilter("ignore")
    group = dist.new_group(backend="gloo", timeout=dt.timedelta(seconds=TIMEOUT_S))
    writer = Writer(folder, case, rank, told)
    state = {"weight": torch.arange(1000.0) + rank, "optimizer": Harmed(writer)}
    dist.barrier(group)
    error = None
    try:
        dcp.save(state, storage_writer=writer, process_group=group)
    except BaseException as caught:  # noqa: BLE001 -- torch's CheckpointException is no Exception
        error = f"{type(caught).__name__}: {caught}"
    return time.monotonic(), error


def notice(case: Case, folder: Path) -> Noticed:
    """Run one case."""
    told = folder / "harmed"
    other = 1 - case.victim
    with RankGang(2) as gang:
        gang.start(save, folder / "checkpoint", case, told)
        try:
            (outcome,) = gang.outcomes(GIVE_UP_S, ranks=[other])
        except OperationTimeoutError:
            return Noticed(seconds=GIVE_UP_S, error=None)
    if (failure := outcome.failure()) is not None:
        raise failure
    ended_s, error = outcome.value
    return Noticed(seconds=ended_s - float(told.read_text()), error=error)
