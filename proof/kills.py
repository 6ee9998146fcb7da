"""A process that is killed, or stopped and continued, while it overwrites the latest checkpoint.
Knows signals and moments; nothing here touches the disk's own doings.

Killed: what was acknowledged is there, or a later one that is whole. Stopped, at a random moment or
right at one of the calls that a commit is made of: another process takes over, as a job that is
started again beside the zombie of the old one; then the first wakes up and goes on with what it was
at. In the end the state of one of the two is there, whole, and not that of one who raised if the
other was acknowledged.
"""

import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import _paths  # noqa: F401 -- the tests' machinery

# isort: split

from traced import attached
from traced import unavailable as no_strace

from _campaign import Campaign, Outcome
from _forked import SOON_S, Child, Found, Stuck, forked, gated, look, saves, scratch, warm
from _subjects import SUBJECTS, Subject, subject, unavailable

COMMIT_CALLS = ("rename", "link", "unlink", "fsync", "openat")

CASES = 90
SAVES = 3
STOPPED_S = 0.3
"""For so long the second process has the place to itself; longer if it has finished sooner."""

MOST_TOLD = 5


def run(name: str, seed: int) -> Outcome:
    saver = subject(name)
    return end_savers(saver, seed, CASES // 5 if saver.is_slow else CASES)


def end_savers(saver: Subject, seed: int, cases: int) -> Outcome:
    warm(saver)
    with scratch() as folder:
        return _Place(saver, folder, random.Random(seed), f"seed {seed}").run(cases)


@dataclass(slots=True)
class Tally:
    """Attempts, of which those are cases that fell into a save, or did harm all the same."""

    cases: int = 0
    violated: int = 0
    told: list[str] = field(default_factory=list)

    def add(self, problems: Sequence[str], *, during: bool) -> None:
        self.cases += during or bool(problems)
        self.violated += bool(problems)
        self.told += problems[: MOST_TOLD - len(self.told)]


class _Place:
    """One folder that is overwritten again and again, by processes that come to harm."""

    def __init__(self, saver: Subject, folder: Path, rng: random.Random, when: str) -> None:
        self._saver, self._folder, self._rng, self._when = saver, folder, rng, when
        self._harms = [self._kill, self._stop]
        if no_strace() is None:
            self._harms.append(self._stop_at_a_call)
        self._durations = [0.01]
        self._next = 1
        self._there: int | None = None
        self._facts: Counter[str] = Counter()
        self._problems: list[str] = []

    def run(self, attempts: int) -> Outcome:
        tally = Tally()
        for attempt in range(attempts):
            if self._there is None:
                self._there = self._saved_by_one_that_is_left_alone()
            harm = self._harms[attempt % len(self._harms)]  # by chance, a few would miss one
            self._problems = []
            during = harm(f"{self._when}, case {attempt}")
            tally.add(self._problems, during=during)
        return Outcome(
            cases=tally.cases,
            violated=tally.violated,
            violations=tuple(tally.told),
            facts=dict(self._facts),
        )

    def _kill(self, when: str) -> bool:
        """This and the next two: whether it fell into a save."""
        first = self._next
        with forked(saves(self._saver, self._folder, self._values(SAVES))) as child:
            self._wait(child, SAVES)
            child.signal(signal.SIGKILL)
            child.end()
        self._learn(child)
        during = child.lines[-1].startswith("begin")
        self._facts["killed during a save" if during else "killed after a save"] += 1
        refused = [line for line in child.lines if line.startswith("failed")]
        acked = child.last("saved") or self._there or 0
        allowed = {acked, *range(max(first, acked), (child.last("begin") or acked) + 1)}
        self._judge(allowed, refused, f"{when}, killed")
        return during

    def _stop(self, when: str) -> bool:
        ours, theirs = self._values(1), self._values(1)
        with forked(saves(self._saver, self._folder, ours)) as first:
            self._wait(first, 1)
            first.signal(signal.SIGSTOP)
            first.read()
            over = _is_over(first)
            self._facts["stopped after a save" if over else "stopped during a save"] += 1
            self._take_over(first, ours, theirs, f"{when}, stopped and continued")
        return not over

    def _stop_at_a_call(self, when: str) -> bool:
        """As strace can: the process is stopped as it comes out of the call."""
        ours, theirs = self._values(1), self._values(1)
        call, nth = self._rng.choice(COMMIT_CALLS), self._rng.randint(1, 4)
        where = f"{call} {nth}"
        stop = f"inject=/^{call}:signal=SIGSTOP:when={nth}"
        with scratch() as folder, gated(saves(self._saver, self._folder, ours)) as (first, go):
            output = folder / "strace"
            with attached(first.pid, output, "-s", "0", "-e", f"trace=/^{call}", "-e", stop):
                go()
                try:
                    stopped = stops(first, output)
                except Stuck as stuck:
                    first.signal(signal.SIGKILL)
                    first.end()
                    self._problems.append(f"{when}, to be stopped at {where}: {stuck}")
                    self._judge({ours[0], self._there or 0}, [], when)
                    return True
                self._facts[f"stopped at a {call}" if stopped else "made no such call"] += 1
                self._take_over(first, ours, theirs, f"{when}, stopped at {where} and continued")
        return stopped

    def _take_over(self, first: Child, ours: range, theirs: range, when: str) -> None:
        """The second begins while the first is stopped, and ends whenever it can: one may have to
        wait for what the other holds."""
        over = _is_over(first)
        with forked(saves(self._saver, self._folder, theirs)) as second:
            waited = not self._ends(second, STOPPED_S)
            self._facts["the other had to wait"] += waited
            try:
                self._wake(first)
                if waited:
                    second.end()
            except Stuck as stuck:
                first.signal(signal.SIGKILL)
                self._problems.append(f"{when}: {stuck}")
        acked = {value for child in (first, second) if (value := child.last("saved"))}
        self._facts["both were acknowledged"] += len(acked) > 1
        self._facts["one was refused"] += len(acked) == 1
        refused = {value for child in (first, second) if (value := child.last("failed"))}
        # No call fails here, so that one who raised knows that its state is not there; what the
        # other acknowledged must not be lost to it. One who was killed has said neither.
        both = {ours[0], theirs[0]}
        if over and theirs[0] in acked:
            allowed = {theirs[0]}  # it came after the other in every order that there is
        else:
            allowed = both - refused if acked else {*both, self._there or 0}
        self._judge(allowed, [], when)

    def _wake(self, child: Child) -> None:
        """Again and again: another of its threads may be stopped at its own Nth call."""
        deadline = time.monotonic() + SOON_S
        while True:
            child.signal(signal.SIGCONT)
            if self._ends(child, 0.05):
                return
            if time.monotonic() > deadline:
                raise Stuck(f"woken up, it does not end; it said {child.lines[-2:]}")

    def _judge(self, allowed: set[int], refused: list[str], when: str) -> None:
        found = look(self._saver, self._folder)
        self._there = found.value
        if refused:
            self._problems.append(f"{when}: a save before that {refused[0]}")
        elif found.value not in allowed:
            self._facts[_name_of(found)] += 1
            wanted = ", ".join(map(str, sorted(allowed)))
            self._problems.append(f"{when}: found {found}, not one of {wanted}")

    def _wait(self, child: Child, saves: int) -> None:
        """Until a random moment of so many saves, or right after one."""
        child.wait_for("begin")
        duration = statistics.median(self._durations)
        time.sleep(self._rng.uniform(0, (saves + 0.1) * duration))

    def _learn(self, child: Child) -> None:
        """How long a save takes that nobody stopped."""
        durations = [float(line.split()[2]) for line in child.lines if line.startswith("saved")]
        if len(durations) > 1:
            self._durations = [*self._durations, *durations][-15:]

    def _values(self, count: int) -> range:
        self._next += count
        return range(self._next - count, self._next)

    def _ends(self, child: Child, timeout_s: float) -> bool:
        try:
            child.end(timeout_s)
        except Stuck:
            return False
        return True

    def _saved_by_one_that_is_left_alone(self) -> int:
        for path in self._saver.files(self._folder):
            path.unlink()
        values = self._values(3)
        with forked(saves(self._saver, self._folder, values)) as child:
            child.end(SOON_S)
        self._learn(child)
        if child.last("saved") != values[-1]:
            raise RuntimeError(f"{self._saver.name} cannot save at all: {child.lines}")
        return values[-1]


def _is_over(child: Child) -> bool:
    return any(line.startswith(("saved", "failed")) for line in child.read())


def stops(child: Child, output: Path, timeout_s: float = SOON_S) -> bool:
    """Whether strace stops it before it is over; ``Stuck`` if neither happens."""
    deadline = time.monotonic() + timeout_s
    while not _is_over(child):
        if _is_stopped(output):
            return True
        if time.monotonic() > deadline:
            raise Stuck(f"neither stopped nor over within {timeout_s:g} s")
        time.sleep(0.002)
    return False


def _is_stopped(output: Path) -> bool:
    return output.exists() and "--- stopped by SIGSTOP ---" in output.read_text()


def _name_of(found: Found) -> str:
    if found.wrong:
        return "a mixture loads"
    return "nothing loads" if found.value is None else "an older one than acknowledged loads"


CAMPAIGN = Campaign(
    name="kills",
    promise="a process killed, or stopped and continued, at any moment leaves the old or the new",
    counted="processes killed in a save, or stopped in one while another took over",
    cases=5_000,
    peer_cases=600,
    run=run,
    subjects=SUBJECTS,
    batch_timeout_s=1200,
    unavailable=unavailable,
)
