"""Campaign: whatever bytes a parser is given, it reads or refuses them with a ``CheckpointError``.

A batch is one parser and so many inputs. The input that it did not take is saved in
``build/proof/fuzzing``, and ``python proof/fuzzing.py replay NAME FILE`` gives it again.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import _paths
from _campaign import HOLDFAST, Campaign, Outcome
from _fuzz import HAS_ATHERIS, limited, tried

FOUND: Final = _paths.REPO / "build" / "proof" / "fuzzing"
TIMEOUT_S: Final = 500
TIMES: Final = 1
"""How often the executions of a parser's batch. For a longer look, make it more."""

# Quick parsers are given a turn more often, so that all get about as much time.
NAMES: Final = (
    "commit record", "compressed chunk", "chunk table", "shard file", "intent", "typed values",
    "commit record", "compressed chunk", "chunk table", "shard header", "record's body",
    "commit record", "compressed chunk", "chunk table", "model index", "mixed-precision file",
    "commit record", "compressed chunk", "chunk table", "mixed-precision values", "intent",
    "safetensors file, converted", "torch.save file, converted", "torch.save pickle, converted",
    "DCP metadata, converted",
)  # fmt: skip


def run(subject: str, seed: int) -> Outcome:  # noqa: ARG001 -- there is only holdfast
    from _parsers import PARSERS

    name = NAMES[seed % len(NAMES)]
    return fuzzed(name, seed, PARSERS[name].runs * TIMES)


def fuzzed(name: str, seed: int, runs: int) -> Outcome:
    """Give a parser so many inputs, in a child."""
    folder = Path(tempfile.mkdtemp(prefix="fuzzing-"))
    command = [
        sys.executable,
        str(_paths.PROOF / "_fuzz.py"),
        name,
        str(seed),
        str(runs),
        str(folder),
    ]
    result: dict[str, Any] = {"executions": 0, "seconds": 0, "why": None}
    try:
        try:
            ended = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False)
            if (folder / "told.json").exists():
                result = json.loads((folder / "told.json").read_text())
            why = result["why"]
            if why is None and ended.returncode:
                said = ended.stderr.decode(errors="replace")[-300:]
                why = f"the process ended with {ended.returncode}: {said!r}"
        except subprocess.TimeoutExpired:
            why = f"the process did not end in {TIMEOUT_S} s"
        facts = {
            f"{name}: executions": int(result["executions"]),
            f"{name}: milliseconds": int(result["seconds"] * 1000),
        }
        if why is None and not result["executions"]:
            raise RuntimeError(f"{name} was given nothing, and said nothing of it")
        if why is None:
            return Outcome(cases=int(result["executions"]), facts=facts)
        saved = _saved(name, folder)
        return Outcome(
            cases=max(1, int(result["executions"])),
            violated=1,
            violations=(f"{name}, seed {seed}: {why}; given {saved}",),
            facts=facts,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _saved(name: str, folder: Path) -> str:
    """Keep the input that ended a process: what it told, or what libFuzzer wrote down."""
    inputs = [
        folder / "input",
        *folder.glob("crash-*"),
        *folder.glob("timeout-*"),
        *folder.glob("oom-*"),
    ]
    for path in inputs:
        if path.exists():
            data = path.read_bytes()
            kept = FOUND / f"{name.replace(' ', '-')}-{hashlib.sha256(data).hexdigest()[:16]}"
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_bytes(data)
            return str(kept.relative_to(_paths.REPO))
    return "an input that it took along"


def replayed(name: str, path: Path) -> str | None:
    """What is wrong with how a parser takes a saved input."""
    from _parsers import PARSERS

    with limited():
        return tried(PARSERS[name].parse, path.read_bytes())


CAMPAIGN: Final = Campaign(
    name="fuzzing",
    promise="whatever bytes a parser is given, it reads or refuses them with a CheckpointError",
    counted="inputs parsed" + ("" if HAS_ATHERIS else " (at random: atheris is not installed)"),
    cases=10_000_000,
    run=run,
    subjects=(HOLDFAST,),
)


if __name__ == "__main__":
    if sys.argv[1] == "replay":
        print(replayed(sys.argv[2], Path(sys.argv[3])) or "read, or refused as it should")
    else:
        print(fuzzed(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
