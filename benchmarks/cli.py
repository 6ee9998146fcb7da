"""How long people wait for the command line, in fresh processes, and how fast it verifies.

``verify`` is compared with the bare disk, read with direct I/O by 1, 2 and 4 threads; the best of
the three counts. Its time is the one that it reports, which leaves the start of Python out.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from _disk import RAW, in_folder, raw_read, raw_write
from _measure import FULL, Extent, Measurement, at_least, at_most, fastest, interleaved, ratios
from holdfast.catalog import Catalog
from storage import LEAF_BYTES, STATE_BYTES, random_state

COMMAND = (sys.executable, "-m", "holdfast.cli")
CHECKPOINTS = 1000
TENSORS = 10_000
REPEATS = 11
LEAST_SPEED = 0.8

Calls = dict[str, Callable[[], object]]


def measure(extent: Extent = FULL) -> list[Measurement]:
    return [*in_folder(partial(_waiting, extent)), in_folder(partial(_verifying, extent))]


def _waiting(extent: Extent, folder: Path) -> list[Measurement]:
    checkpoints, tensors = extent.of(CHECKPOINTS), extent.of(TENSORS)
    small = {f"layer{n}": {"weight": np.zeros((4, 4), np.float32)} for n in range(100)}
    Catalog(folder / "many").write("step_0", small, step=0, metrics={"loss": 1.0})
    for step in range(1, checkpoints):
        shutil.copytree(folder / "many" / "step_0", folder / "many" / f"step_{step}")
    wide = {f"model.layers.{n // 10}.p{n % 10}": np.zeros(4, np.float32) for n in range(tensors)}
    Catalog(folder / "wide").write("last", wide)
    lines: Calls = {
        "help": partial(run, "--help"),
        "ls": partial(run, "ls", folder / "many"),
        "show": partial(run, "show", folder / "wide" / "last"),
        "start": partial(bare, "import holdfast.cli._app, holdfast.cli._show"),
    }
    for call in lines.values():
        call()
    seconds = interleaved(lines, repeats=extent.repeats(REPEATS))
    shown = [all_ - start for all_, start in zip(seconds["show"], seconds["start"], strict=True)]
    return [
        at_most("holdfast --help", seconds["help"], "s", 0.3),
        at_most(f"ls of {checkpoints} checkpoints, all of it", seconds["ls"], "s", 1.0),
        at_most(f"show of {tensors} tensors, after start-up", shown, "s", 0.5),
    ]


def _verifying(extent: Extent, folder: Path) -> Measurement:
    state = random_state(extent.of(STATE_BYTES), extent.of(LEAF_BYTES))
    size = sum(array.nbytes for array in state.values())
    Catalog(folder / "large").write("last", state)
    raw_write(folder / "raw", size, 4)
    told: list[float] = []
    reads: Calls = {name: partial(raw_read, folder / "raw", n) for name, n in RAW.items()}
    reads["verify"] = lambda: told.append(verified(folder / "large" / "last", size))
    seconds = interleaved(reads, repeats=extent.repeats(REPEATS))
    speeds = ratios(seconds[fastest(seconds, tuple(RAW))], told)
    return at_least("verify, of the bare disk's speed", speeds, "x", LEAST_SPEED)


def verified(checkpoint: Path, size_bytes: int) -> float:
    """Seconds that verify says it took."""
    (found,) = json.loads(run("verify", checkpoint, "--json"))["checkpoints"]
    if not found["intact"] or found["checked_bytes"] != size_bytes:
        raise AssertionError(f"{found['checked_bytes']} bytes verified, {found['damage']}")
    seconds: float = found["seconds"]
    return seconds


def run(*arguments: str | Path) -> bytes:
    return subprocess.run([*COMMAND, *arguments], check=True, stdout=subprocess.PIPE).stdout


def bare(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True)
