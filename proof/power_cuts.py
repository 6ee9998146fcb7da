"""Acknowledged means durable: the power of a real ext4 is cut at random moments of saves, and just
after them. Knows disks and moments; for holdfast also cuts all of a catalog's life.

A process overwrites the latest checkpoint, or saves each under a name of its own; the filesystem is
stopped by FS_IOC_SHUTDOWN, losing all that it had not written; it is mounted again, and what is
there must be what was last acknowledged, or a later one that is whole.
"""

import random
import shutil
import signal
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import _paths  # noqa: F401 -- the tests' machinery

# isort: split

import pytest
from cutting import JOURNALS, MIB, cut_again_and_again
from mounts import Ext4, cut_power

from _campaign import Campaign, Outcome
from _forked import Child, Found, forked, look, saves, scratch, settle, warm
from _subjects import HOLDFAST, LATEST, SUBJECTS, Subject, subject
from _subjects import unavailable as not_installed

CUTS = 50
SAVES = 2
SIZE_BYTES = 64 * MIB
MOST_TOLD = 5


@dataclass(slots=True)
class Tally:
    """What came of the cuts so far."""

    cuts: int = 0
    during: int = 0
    older: int = 0
    nothing: int = 0
    mixtures: int = 0
    refused: int = 0
    told: list[str] = field(default_factory=list)

    def judge(self, told: "Told", found: Found, when: str) -> None:
        self.cuts += 1
        self.during += told.during
        if told.refused:
            self.refused += 1
            self._tell(f"{when}: a save before the cut {told.refused[0]}")
        elif found.value is None or not told.acked <= found.value <= told.begun:
            self.mixtures += found.wrong
            self.nothing += found.value is None and not found.wrong
            self.older += found.value is not None
            self._tell(f"{when}: value {told.acked} was acknowledged; found {found}")

    def _tell(self, what: str) -> None:
        if len(self.told) < MOST_TOLD:
            self.told.append(what)

    def outcome(self) -> Outcome:
        return Outcome(
            cases=self.cuts,
            violated=self.older + self.nothing + self.mixtures + self.refused,
            violations=tuple(self.told),
            facts={
                "cuts during a save": self.during,
                "cuts after a save": self.cuts - self.during,
                "acknowledged lost, an older one loads": self.older,
                "acknowledged lost, nothing loads": self.nothing,
                "a mixture loads": self.mixtures,
                "saves refused after a cut": self.refused,
            },
        )


def run(name: str, seed: int) -> Outcome:
    if name == HOLDFAST and seed % 2:
        return _whole_life(seed)
    saver = subject(name)
    return cut_saves(saver, seed, CUTS // 5 if saver.is_slow else CUTS)


def cut_saves(saver: Subject, seed: int, cuts: int) -> Outcome:
    rng = random.Random(seed)
    warm(saver)
    tally = Tally()
    with scratch() as base:
        disk = _Disk(Ext4(base, SIZE_BYTES), saver, rng)
        for cut in range(cuts):
            journal, own_names = rng.choice(JOURNALS), rng.random() < 0.5
            when = f"seed {seed}, cut {cut}, data={journal}, {'new names' if own_names else LATEST}"
            told = disk.save_and_cut(f"loop,data={journal}", own_names=own_names)
            tally.judge(told, disk.look(told), when)
    return tally.outcome()


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a process had said when its disk stopped."""

    name: str
    acked: int
    begun: int
    during: bool
    refused: list[str]


class _Disk:
    """One disk over many cuts, on which a saver keeps what a cut has left to it."""

    def __init__(self, disk: Ext4, saver: Subject, rng: random.Random) -> None:
        self._disk, self._saver, self._rng = disk, saver, rng
        self._durations = [0.01]
        self._there: int | None = None
        self._next = 1

    def save_and_cut(self, options: str, *, own_names: bool) -> Told:
        with self._disk.mounted(options) as path:
            folder = path / "run"
            if self._there is None:
                self._afresh(folder)
            values = range(self._next, self._next + SAVES)
            self._next = values.stop
            name = "step_{}".format if own_names else str(LATEST).format
            with forked(saves(self._saver, folder, values, name)) as child:
                self._wait(child, values)
                child.read()
                acked = child.last("saved") or self._there or 0
                refused = [line for line in child.lines if line.startswith("failed")]
                cut_power(path)
                child.signal(signal.SIGKILL)
                child.end()
        durations = [float(line.split()[2]) for line in child.lines if line.startswith("saved")]
        self._durations = [*self._durations, *durations][-9:]
        first = own_names and acked == self._there
        return Told(
            name=LATEST if first else name(acked),
            acked=acked,
            begun=acked if own_names else child.last("begin") or acked,
            during=child.last("begin") != acked,
            refused=refused,
        )

    def _wait(self, child: Child, values: range) -> None:
        """Until some moment during a save, or just after one."""
        child.wait_for("begin")
        duration = statistics.median(self._durations)
        if self._rng.random() < 0.5:
            time.sleep(self._rng.uniform(0, SAVES * duration))
        else:
            child.wait_for(f"saved {self._rng.choice(values)} ")
            time.sleep(self._rng.uniform(0, duration / 2))

    def look(self, told: Told) -> Found:
        with self._disk.mounted() as path:
            found = look(self._saver, path / "run", told.name)
            latest = found if told.name == LATEST else look(self._saver, path / "run")
        self._there = latest.value
        return found

    def _afresh(self, folder: Path) -> None:
        """A first checkpoint that no cut can take away any more."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        value, self._next = self._next, self._next + 1
        with forked(saves(self._saver, folder, range(value, value + 1))) as child:
            child.end()
        if child.last("saved") != value:
            raise RuntimeError(f"{self._saver.name} cannot save at all: {child.lines}")
        settle(folder)
        self._there = value


def _whole_life(seed: int) -> Outcome:
    """Saves, overwrites, deletes and collects of one catalog, cut off at one of their calls."""
    with scratch() as base:
        cuts = cut_again_and_again(base, 2 * CUTS, seed)
    return Outcome(
        cases=2 * CUTS,
        violated=len(cuts.violations),
        violations=tuple(cuts.violations[:MOST_TOLD]),
        facts={"cuts within a call of an act": cuts.broken, "cuts after an act": cuts.promised},
    )


def unavailable(name: str) -> str | None:
    if (reason := not_installed(name)) is not None:
        return reason
    try:
        with scratch() as base, Ext4(base, 16 * MIB).mounted() as path:
            cut_power(path)
    except pytest.skip.Exception as reason:
        return str(reason)
    except OSError as error:
        return f"cuts the power by FS_IOC_SHUTDOWN, which is refused here: {error}"
    return None


CAMPAIGN = Campaign(
    name="power cuts",
    promise="acknowledged means durable: the last acknowledged checkpoint survives, or a later one",
    counted="power cuts of an ext4, in its three journal modes",
    cases=10_000,
    peer_cases=400,
    run=run,
    batch_timeout_s=1200,
    subjects=SUBJECTS,
    unavailable=unavailable,
)
