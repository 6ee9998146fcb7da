"""The campaigns of ``proof/`` in short, on holdfast and on savers that are broken on purpose. A
program: prints what each came to, as JSON. Not in the tests' own process, whose threads a fork
would lose.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from _campaign import Outcome
from _forked import Stuck, forked
from _subjects import LATEST, Subject, Wrong, subject
from crash_states import explore_from_outside, unlike_what_the_kernel_saw
from failing_calls import fail_from_outside
from kills import end_savers, stops
from power_cuts import cut_saves
from power_cuts import unavailable as no_power_cuts

SIZE_BYTES = 6000
KILLS = 12


class Careful(Subject):
    """One file, written aside, synced, renamed, and the name synced: right, as it must be found.
    Slow enough to be caught at it."""

    name = "careful"
    module = "os"

    def save(self, folder: Path, value: int, name: str = LATEST) -> None:
        aside = folder / f".{name}-{os.getpid()}"
        with aside.open("wb", buffering=0) as file:
            self.write(file.fileno(), value)
            os.fsync(file.fileno())
        aside.rename(folder / name)
        self.sync(folder)

    def write(self, fd: int, value: int) -> None:
        left = self.data(value)
        while left:
            left = left[os.write(fd, left[:1000]) :]
            time.sleep(0.003)

    def sync(self, folder: Path) -> None:
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def data(self, value: int) -> bytes:
        return b"%010d" % value * (SIZE_BYTES // 10)

    def load(self, folder: Path, name: str = LATEST) -> int:
        data = (folder / name).read_bytes()
        if not data:
            raise ValueError("empty")
        value = int(data[:10].strip(b"\0") or b"0")
        if data != self.data(value):
            raise Wrong(f"{len(data)} bytes of several values")
        return value


class Unsynced(Careful):
    """Renames what may not be on the disk yet."""

    name = "unsynced"

    def save(self, folder: Path, value: int, name: str = LATEST) -> None:
        aside = folder / f".{name}-{os.getpid()}"
        aside.write_bytes(self.data(value))
        aside.rename(folder / name)


class InPlace(Careful):
    """Syncs all it does, and writes over what was there."""

    name = "in place"

    def save(self, folder: Path, value: int, name: str = LATEST) -> None:
        with (folder / name).open("wb", buffering=0) as file:
            self.write(file.fileno(), value)
            os.fsync(file.fileno())
        self.sync(folder)


class Swallowing(Careful):
    """Takes an error for the end of the matter."""

    name = "swallowing"

    def write(self, fd: int, value: int) -> None:
        try:
            super().write(fd, value)
        except OSError:
            return


class Denying(Careful):
    """Sees that another saved meanwhile, says so, and has replaced it all the same."""

    name = "denying"

    def save(self, folder: Path, value: int, name: str = LATEST) -> None:
        aside, target = folder / f".{name}-{os.getpid()}", folder / name
        seen = target.read_bytes() if target.exists() else b""
        aside.write_bytes(self.data(value))
        time.sleep(0.02)  # to be caught here
        is_another = target.exists() and target.read_bytes() != seen
        aside.rename(target)
        if is_another:
            raise OSError("somebody else has saved")


class Yielding(Careful):
    """Takes it for saved if one that saved before still lives."""

    name = "yielding"

    def save(self, folder: Path, value: int, name: str = LATEST) -> None:
        last = folder / ".last"
        pid = int(last.read_text() or 0) if last.exists() else 0
        if pid in {0, os.getpid()} or not Path(f"/proc/{pid}").exists():
            super().save(folder, value, name)
            last.write_text(str(os.getpid()))


CALLS = ("write", "pwrite64", "fsync", "renameat")
SHORT: dict[str, Callable[[Subject], Outcome]] = {
    "crash states": lambda saver: explore_from_outside(saver, 1, 100),
    "kills": lambda saver: end_savers(saver, 1, KILLS),
    "failing calls": lambda saver: fail_from_outside(saver, "EDQUOT", 1, calls=CALLS, limits=3),
    "power cuts": lambda saver: cut_saves(saver, 1, 6),
}


def _never_over() -> str:
    """What is said of a process that strace is to stop, and that neither stops nor ends."""
    with forked(lambda _: time.sleep(60)) as child:
        try:
            return f"it stops: {stops(child, Path(os.devnull), timeout_s=0.2)}"
        except Stuck as stuck:
            return str(stuck)


def main() -> None:
    results: dict[str, dict[str, object]] = {}

    def note(campaign: str, saver: Subject, outcome: Outcome) -> None:
        results[f"{campaign}: {saver.name}"] = {
            "cases": outcome.cases,
            "violated": outcome.violated,
            "violations": outcome.violations,
            "facts": dict(outcome.facts),
        }

    no_cuts = no_power_cuts("holdfast")
    for saver, campaigns in (
        (Careful(), ("crash states", "kills", "failing calls", "power cuts")),
        (Unsynced(), ("crash states", "power cuts")),
        (InPlace(), ("crash states", "kills")),
        (Swallowing(), ("failing calls",)),
        (Denying(), ("kills",)),
        (Yielding(), ("kills",)),
        # The last, for a fork is slower once torch is there.
        (subject("holdfast"), ("crash states", "kills", "failing calls", "power cuts")),
    ):
        for campaign in campaigns:
            if campaign != "power cuts" or no_cuts is None:
                note(campaign, saver, SHORT[campaign](saver))
    results["never over"] = {"violations": [_never_over()]}
    difference = unlike_what_the_kernel_saw(1)
    results["unseen calls"] = {"violations": [difference] if difference else []}
    json.dump({"no power cuts": no_cuts, "results": results}, sys.stdout)


if __name__ == "__main__":
    main()
