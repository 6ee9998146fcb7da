"""How long people wait for the command line, in fresh processes, and how fast it verifies.

``verify`` is compared with the bare disk, read with direct I/O by 1, 2 and 4 threads; the best of
the three counts. Its time is the one that it reports, which leaves the start of Python out.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from _measure import Measurement, at_most, interleaved, median, spread
from holdfast.catalog import Catalog
from storage import LEAF_BYTES, STATE_BYTES, THREADS, best_raw, raw_read, raw_write

COMMAND = (sys.executable, "-m", "holdfast.cli")
CHECKPOINTS = 1000
TENSORS = 10_000
REPEATS = 11
LEAST_SPEED = 0.8

Calls = dict[str, Callable[[], object]]


def measure() -> list[Measurement]:
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=".") as folder:
        return [*_waiting(Path(folder)), _verifying(Path(folder))]


def _waiting(folder: Path) -> list[Measurement]:
    small = {f"layer{n}": {"weight": np.zeros((4, 4), np.float32)} for n in range(100)}
    Catalog(folder / "many").write("step_0", small, step=0, metrics={"loss": 1.0})
    for step in range(1, CHECKPOINTS):
        shutil.copytree(folder / "many" / "step_0", folder / "many" / f"step_{step}")
    wide = {f"model.layers.{n // 10}.p{n % 10}": np.zeros(4, np.float32) for n in range(TENSORS)}
    Catalog(folder / "wide").write("last", wide)
    lines: Calls = {
        "help": partial(run, "--help"),
        "ls": partial(run, "ls", folder / "many"),
        "show": partial(run, "show", folder / "wide" / "last"),
        "start": partial(bare, "import holdfast.cli._app, holdfast.cli._show"),
    }
    for call in lines.values():
        call()
    seconds = interleaved(lines, repeats=REPEATS)
    shown = [all_ - start for all_, start in zip(seconds["show"], seconds["start"], strict=True)]
    return [
        at_most("holdfast --help", seconds["help"], "s", 0.3),
        at_most(f"ls of {CHECKPOINTS} checkpoints, all of it", seconds["ls"], "s", 1.0),
        at_most(f"show of {TENSORS} tensors, after start-up", shown, "s", 0.5),
    ]


def _verifying(folder: Path) -> Measurement:
    random = np.random.default_rng(0)
    state = {f"t{n}": random.bytes(LEAF_BYTES) for n in range(STATE_BYTES // LEAF_BYTES)}
    arrays = {name: np.frombuffer(data, np.uint8) for name, data in state.items()}
    Catalog(folder / "large").write("last", arrays)
    raw_write(folder / "raw", 4)
    told: list[float] = []
    reads: Calls = {f"raw{n}": partial(raw_read, folder / "raw", n) for n in THREADS}
    reads["verify"] = lambda: told.append(verified(folder / "large" / "last"))
    seconds = interleaved(reads, repeats=REPEATS)
    fastest = seconds[best_raw(seconds)]
    ratios = [raw / ours for raw, ours in zip(fastest, told, strict=True)]
    return Measurement(
        name="verify, of the bare disk's speed",
        value=median(ratios),
        unit="",
        target=f">= {LEAST_SPEED}",
        met=median(ratios) >= LEAST_SPEED,
        spread=spread(ratios, digits=2),
    )


def verified(checkpoint: Path) -> float:
    """Seconds that verify says it took."""
    (found,) = json.loads(run("verify", checkpoint, "--json"))["checkpoints"]
    if not found["intact"] or found["checked_bytes"] != STATE_BYTES:
        raise AssertionError(f"{found['checked_bytes']} bytes verified, {found['damage']}")
    seconds: float = found["seconds"]
    return seconds


def run(*arguments: str | Path) -> bytes:
    return subprocess.run([*COMMAND, *arguments], check=True, stdout=subprocess.PIPE).stdout


def bare(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True)
