"""Campaign: files that somebody made to do harm do nothing but be refused.

Every case has a folder and a child of its own, which may use twice the memory that reading it may
take and has no network; see ``_confined``. What happens beside the refusal is what counts.
"""

import contextlib
import functools
import importlib.util
import random
import shutil
import stat
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import _paths  # noqa: F401 -- before what it makes importable
from _campaign import HOLDFAST, Campaign, Outcome, batch_of
from _confined import MIB, Limits, Ran, confined
from _hostile import Case, catalog_cases, entries, shards, snapshot

CAP_BYTES: Final = 64 * MIB
CAP_TIMES: Final = 8
"""What a reader declares to need: so much, and so often the bytes that it reads, since JSON becomes
objects. Twice both is what it gets."""

BATCH: Final = 100
_SHOWN: Final = 20
TORCH, SAFETENSORS, DCP = "torch.save", "safetensors", "DCP"


def run(subject: str, seed: int) -> Outcome:
    """Some of all cases: batches that follow each other go through all of them, once."""
    cases = cases_of(subject)
    random.Random(0).shuffle(cases)  # so that batches are alike
    first = batch_of(seed) * BATCH % (-(-len(cases) // BATCH) * BATCH)
    outcome = judged(cases[first : first + BATCH], is_ours=subject == HOLDFAST)
    return replace(outcome, is_last=first + BATCH >= len(cases))


def cases_of(subject: str) -> list[Case]:
    if subject == SAFETENSORS:
        return [_read_by(case, _by_safetensors) for case in shards()]
    from _hostile_torch import dcp_cases, planted_file, torch_cases, torch_files

    if subject == TORCH:
        return [
            Case(
                name=f"{how} {what}",
                plant=functools.partial(planted_file, name, make),
                read=read,
            )
            for how, read in (("default", _by_torch), ("weights_only=False", _by_torch_unsafe))
            for what, name, make in torch_files()
        ]
    if subject == DCP:
        return [Case(name=what, plant=plant, read=_by_dcp) for what, plant in dcp_cases()]
    return [*catalog_cases(), *torch_cases()]


def judged(cases: Sequence[Case], *, is_ours: bool) -> Outcome:
    facts: Counter[str] = Counter()
    violations = []
    for case in cases:
        ran, problems = tried(case, is_ours=is_ours)
        facts[_fact(case, ran)] += 1
        facts["ran without a network"] += not ran.has_network and ran.end not in {"hung", "signal"}
        if any("ran code" in problem or "ran a program" in problem for problem in problems):
            facts["ran code of the file"] += 1
        if problems and not _is_asked_for(case):
            violations.append(f"{case.name}: {'; '.join(problems)}")
    return Outcome(
        cases=len(cases),
        violated=len(violations),
        violations=tuple(violations[:_SHOWN]),
        facts=dict(facts),
    )


def _is_asked_for(case: Case) -> bool:
    """Whoever says so runs the pickle. What that does is a fact, no broken promise."""
    return case.name.startswith("weights_only=False")


def _fact(case: Case, ran: Ran) -> str:
    kind = "asked to unpickle, " if _is_asked_for(case) else ""
    return kind + {"refused": f"refused: {ran.error}"}.get(ran.end, ran.end)


def tried(case: Case, *, is_ours: bool = True) -> tuple[Ran, list[str]]:
    """How reading the case ended, and what of it breaks the promise."""
    place = Path(tempfile.mkdtemp(prefix="hostile-"))
    try:
        (place / "outside").mkdir()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some of them are odd already where they are made
            case.plant(place)
        size = sum(
            min(info.st_size, info.st_blocks * 512)
            for _, info, _ in entries(place)
            if stat.S_ISREG(info.st_mode)
        )
        limits = Limits(more_bytes=2 * (CAP_BYTES + CAP_TIMES * size))
        before = snapshot(place / "outside")

        def read() -> object:
            with contextlib.chdir(place / "outside"):
                return case.read(place)

        ran = confined(read, within=place / "root", limits=limits)
        problems = [*ran.deeds]
        after = snapshot(place / "outside")
        if after != before:
            changed = sorted(after.keys() ^ before.keys())[:3] or "contents"
            problems.append(f"it ran code of the file or wrote outside of the root: {changed}")
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return ran, [*problems, *_ending(case, ran, is_ours=is_ours)]


def _ending(case: Case, ran: Ran, *, is_ours: bool) -> list[str]:
    if ran.end in {"signal", "hung"}:
        return [f"the process ended by {ran.words}"]
    if is_ours and ran.end == "raised":
        return [f"{ran.error} instead of a CheckpointError: {ran.words}"]
    if is_ours and ran.end == "returned" and not case.may_read:
        return [f"it was taken for good: {ran.words}"]
    if ran.error == "MemoryError":
        return [f"it took all memory there was, {ran.peak_bytes / MIB:.0f} MiB"]
    return []


# --- how the others read the same files


def _read_by(case: Case, read: Callable[[Path], object]) -> Case:
    return Case(name=case.name, plant=case.plant, read=read)


def _by_safetensors(place: Path) -> object:
    from safetensors.numpy import load_file

    return load_file(place / "root" / "a.safetensors").keys()


def _by_torch(place: Path) -> object:
    import torch

    return torch.load(place / "root" / "a.pt").keys()


def _by_torch_unsafe(place: Path) -> object:
    import torch

    return type(torch.load(place / "root" / "a.pt", weights_only=False))


def _by_dcp(place: Path) -> object:
    import torch
    from torch.distributed import checkpoint

    state = {"w": torch.zeros(4)}
    checkpoint.load(state, checkpoint_id=place / "root" / "a", no_dist=True)
    return state


def _unavailable(subject: str) -> str | None:
    module = {SAFETENSORS: "safetensors"}.get(subject, "torch")
    return None if importlib.util.find_spec(module) else f"{module} is not installed"


CAMPAIGN: Final = Campaign(
    name="hostile files",
    promise="a file made to do harm is refused, in bounded memory, and nothing of it is run",
    counted="hostile files read",
    cases=1000,
    run=run,
    subjects=(HOLDFAST, TORCH, DCP, SAFETENSORS),
    peer_cases=400,
    ends=True,
    unavailable=_unavailable,
)


if __name__ == "__main__":
    import sys

    started = time.monotonic()
    subject = sys.argv[1] if len(sys.argv) > 1 else HOLDFAST
    wanted = sys.argv[2] if len(sys.argv) > 2 else ""
    outcome = judged(
        [case for case in cases_of(subject) if wanted in case.name], is_ours=subject == HOLDFAST
    )
    sys.stdout.write("\n".join(outcome.violations) + "\n")
    sys.stdout.write(f"{outcome.cases} cases, {outcome.violated} violated, {outcome.facts}, ")
    sys.stdout.write(f"{time.monotonic() - started:.0f} s\n")
