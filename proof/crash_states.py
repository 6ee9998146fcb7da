"""Old or new, never a mixture: every state that a disk may be in after a crash, by the operations
that a save did. Knows which logs are explored; the model of a disk is the tests' explorer.

holdfast's operations are recorded by the calls it makes through its ``System``; the other savers'
by strace, from outside; holdfast's by strace too, which must have seen the same.

The states of a moment are tried evenly, as if all were likely: how many of them break a promise is
no probability.
"""

import pickle
import random
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import _paths  # noqa: F401 -- the tests' machinery

# isort: split

from campaign import ENDLESS, FINITE, ROOT, Run, Workload, explore
from explorer import Disk, Image
from recorder import Op, Recorded, RecordingSystem
from traced import CALLS, Trace, attached
from traced import unavailable as no_strace

from _campaign import Campaign, Outcome, batch_of
from _forked import Found, Tell, forked, gated, look_here, saves, scratch, silent, warm
from _subjects import HOLDFAST, SUBJECTS, Subject, subject
from _subjects import unavailable as not_installed

STATES = 20_000
PEER_STATES = 2_000
MOST_TOLD = 5
FROM_OUTSIDE = 8
"""Every so many batches holdfast is looked at as the others are."""


def run(name: str, seed: int) -> Outcome:
    if name != HOLDFAST:
        return explore_from_outside(subject(name), seed, PEER_STATES)
    if seed % FROM_OUTSIDE:
        return _explore_from_inside(seed)
    outcome = explore_from_outside(subject(name), seed, PEER_STATES)
    difference = unlike_what_the_kernel_saw(seed)
    if difference is None:
        return outcome
    return replace(
        outcome,
        violated=outcome.violated + 1,
        violations=(f"seed {seed}: {difference}", *outcome.violations),
    )


def _explore_from_inside(seed: int) -> Outcome:
    workload = workload_of(batch_of(seed))
    report = explore(workload, states=STATES, seed=seed)
    told = [f"seed {seed}, {workload.name}: {problem}" for problem in report.violations]
    return Outcome(
        cases=report.states,
        violated=report.violated,
        violations=tuple(told[:MOST_TOLD]),
        facts={"states that look different": report.looks},
    )


def workload_of(batch: int) -> Workload:
    """Each that runs out is run once, in the first batches, so that no state of it counts twice;
    then those that do not, in turn."""
    turn = batch - batch // FROM_OUTSIDE - 1  # without the batches from outside
    if turn < len(FINITE):
        return FINITE[turn]
    return ENDLESS[(turn - len(FINITE)) % len(ENDLESS)]


def explore_from_outside(saver: Subject, seed: int, states: int) -> Outcome:
    """Crash two saves, one over the other, the first over one from before or over nothing."""
    rng = random.Random(seed)
    warm(saver)
    before = 1 if rng.random() < 0.5 else None
    with scratch() as folder:
        log = record(saver, folder, before)
        explorer = _Explorer(saver, folder / "look", rng)
        with silent():
            return explorer.explore(log, before, states, f"seed {seed}")


def record(saver: Subject, folder: Path, before: int | None) -> Recorded:
    run = folder / "disk" / "run"
    run.mkdir(parents=True)
    if before is not None:
        with forked(saves(saver, run, range(before, before + 1))) as child:
            child.end()
    trace = Trace(folder / "disk")
    output = folder / "strace"
    with (
        gated(saves(saver, run, range(2, 4))) as (child, go),
        attached(child.pid, output, "-e", f"trace={','.join(CALLS)}"),
    ):
        go()
        child.end()
    if child.last("saved") != 3:
        raise RuntimeError(f"{saver.name} cannot save while strace looks on: {child.lines}")
    return trace.read(output)


class _Explorer:
    """Images of one log, each looked at once."""

    def __init__(self, saver: Subject, look_at: Path, rng: random.Random) -> None:
        self._saver, self._look_at, self._rng = saver, look_at, rng
        self._found: dict[frozenset[tuple[str, bytes]], Found] = {}
        self._seen: set[int] = set()
        self._facts: Counter[str] = Counter()
        self._told: list[str] = []

    def explore(self, log: Recorded, before: int | None, states: int, when: str) -> Outcome:
        most, found = 16, -1
        while found < len(self._seen) < states:
            found = len(self._seen)
            self._crash_everywhere(log, before, most, when)
            most *= 2
        return Outcome(
            cases=len(self._seen),
            violated=self._facts.total(),
            violations=tuple(self._told),
            facts=dict(self._facts) | {"states that look different": len(self._found)},
        )

    def _crash_everywhere(self, log: Recorded, before: int | None, most: int, when: str) -> None:
        disk = Disk(log)
        allowed: set[int | None] = {before}
        for number, op in enumerate(log.log):
            if op.kind == "begin":
                allowed = allowed | {op.value}
            elif op.kind == "promised":
                allowed = {op.value}
            else:
                disk.apply(op)
            for image in disk.images(self._rng, most):
                key = hash((frozenset(allowed), frozenset(image.items())))
                if key not in self._seen:
                    self._seen.add(key)
                    self._judge(image, allowed, f"{when}, after operation {number} ({op.kind})")

    def _judge(self, image: Image, allowed: set[int | None], when: str) -> None:
        found = self._look(image)
        if found.value in allowed and not found.wrong:
            return
        if found.wrong:
            self._facts["a mixture loads"] += 1
        elif found.value is None:
            self._facts["nothing loads"] += 1
        else:
            self._facts["an older one than acknowledged loads"] += 1
        if len(self._told) < MOST_TOLD:
            wanted = sorted(map(str, allowed))
            self._told.append(f"{when}: found {found}, not one of {', '.join(wanted)}")

    def _look(self, image: Image) -> Found:
        key = frozenset(image.items())
        if key not in self._found:
            shutil.rmtree(self._look_at, ignore_errors=True)
            (self._look_at / "run").mkdir(parents=True)
            for path, data in image.items():
                (self._look_at / path).parent.mkdir(parents=True, exist_ok=True)
                (self._look_at / path).write_bytes(data)
            self._found[key] = look_here(self._saver, self._look_at / "run")
        return self._found[key]


def unlike_what_the_kernel_saw(seed: int) -> str | None:
    """Whether the calls that holdfast's recorder logs are all that reach the disk, with the same
    bytes in the same order: else what it explores would be another program."""
    first = seed * 10 + 1

    def act(tell: Tell) -> None:
        recorder = RecordingSystem(base)
        run = Run(base, recorder)
        run.save("step_1", first)
        run.save("step_1", first + 1, overwrite=True)
        run.save("step_2", first + 2, compression="balanced")
        run.delete("step_1")
        run.catalog.gc()
        (folder / "recorded").write_bytes(pickle.dumps(recorder.log))
        tell("done")

    with scratch() as folder:
        base = folder / "disk"
        (base / ROOT).mkdir(parents=True)
        trace, output = Trace(base), folder / "strace"
        with (
            gated(act) as (child, go),
            attached(child.pid, output, "-e", f"trace={','.join(CALLS)}"),
        ):
            go()
            child.end()
        recorded = pickle.loads((folder / "recorded").read_bytes())
        return _difference(_plain(recorded), _plain(trace.read(output).log))


def _plain(log: list[Op]) -> list[Op]:
    """Without marks, and with nodes numbered in the order in which they appear."""
    numbers: dict[int, int] = {-1: -1}
    return [
        replace(
            op,
            at=numbers.setdefault(op.at, len(numbers)),
            node=numbers.setdefault(op.node, len(numbers)),
        )
        for op in log
        if op.kind not in {"begin", "promised", "start"}
    ]


def _difference(recorded: list[Op], seen: list[Op]) -> str | None:
    for number, (ours, kernels) in enumerate(zip(recorded, seen, strict=False)):
        if ours != kernels:
            return (
                f"operation {number} was recorded as {ours!r:.200}, and strace saw {kernels!r:.200}"
            )
    if len(recorded) != len(seen):
        return f"{len(recorded)} operations were recorded, and strace saw {len(seen)}"
    return None


def unavailable(name: str) -> str | None:
    return not_installed(name) or no_strace()


CAMPAIGN = Campaign(
    name="crash states",
    promise="old or new, never a mixture or nothing, whatever a crash keeps of what is not synced",
    counted="states that a disk may be in after a crash",
    cases=1_000_000,
    peer_cases=10_000,
    run=run,
    batch_timeout_s=1200,
    subjects=SUBJECTS,
    unavailable=unavailable,
)
