"""No false success: the Nth system call of a save fails, for every N until none is left. Knows
calls and errors; what a failing disk does to all of a catalog's life is the tests' own campaign.

From outside strace makes the call fail, in every saver alike; and a limit on the size of files cuts
writes short. From inside, for holdfast only, its disk fails, and is then crashed as well.
"""

import contextlib
import errno
import os
import random
import re
import resource
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import _paths  # noqa: F401 -- the tests' machinery

# isort: split

from failing import AFTER, BEFORE, FROM_THEN_ON, NOTHING, SHORT
from injections import ACTS, Injections, prepare
from traced import attached
from traced import unavailable as no_strace

from _campaign import Campaign, Outcome, batch_of
from _forked import Found, Stuck, Tell, forked, gated, look, saves, scratch, silent, warm
from _subjects import HOLDFAST, SUBJECTS, THREADED_DCP, Subject, subject
from _subjects import unavailable as not_installed

CALLS = (
    "openat", "open", "mkdir", "mkdirat", "write", "writev", "pwrite64", "pwritev", "fsync",
    "fdatasync", "rename", "renameat", "renameat2", "link", "linkat", "unlink", "unlinkat",
    "ftruncate", "fallocate", "lseek", "fcntl", "newfstatat", "statx", "getdents64", "utimensat",
    "access", "faccessat2", "read", "pread64", "preadv", "close", "rmdir", "flock",
)  # fmt: skip

ERRORS = ("EIO", "ENOSPC", "EDQUOT", "EINTR", "ESTALE")

INSIDE_CODES = (
    errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EINTR, errno.ESTALE, errno.EROFS, errno.EACCES,
    errno.ETIMEDOUT, errno.EMFILE, errno.EAGAIN, errno.EBUSY, errno.EINVAL, errno.EPERM,
)  # fmt: skip
"""The likely ones first, for a run that is short."""

OLD, NEW = 1, 2
REFUSED = 3
"""The exit code of a process whose save raised."""

MOST = 400
"""Calls of one kind that are failed; no saver here makes so many."""

LIMITS = 24
SLICES = 8
"""Of the calls, for a saver that is slow: one slice is a batch."""

MOST_TOLD = 5
FROM_OUTSIDE = 4
"""Every so many batches holdfast is looked at as the others are."""


def run(name: str, seed: int) -> Outcome:
    if name == HOLDFAST and seed % FROM_OUTSIDE:
        return _fail_inside(seed)
    saver = subject(name)
    turn = seed // FROM_OUTSIDE if name == HOLDFAST else seed
    error = ERRORS[turn % len(ERRORS)]
    if saver.is_slow:
        some = CALLS[turn // len(ERRORS) % SLICES :: SLICES]
        return fail_from_outside(saver, error, seed, calls=some, limits=2)
    return fail_from_outside(saver, error, seed)


def _fail_inside(seed: int) -> Outcome:
    """All of one act's calls, in every way that they can fail, by two of the errors."""
    act, codes = turn_of(batch_of(seed))
    with scratch() as folder:
        prepare(folder / "before")
        with silent():
            done = Injections(folder / "before", act, seed)
            for code in codes:
                for how in (BEFORE, AFTER, FROM_THEN_ON):
                    done.fail_all(how, code)
            done.fail_all(SHORT).fail_all(NOTHING)
    return Outcome(
        cases=done.injections,
        violated=done.violated,
        violations=tuple(f"seed {seed}, {what}" for what in done.violations[:MOST_TOLD]),
        facts={"calls failed inside": done.injections},
    )


def turn_of(batch: int) -> tuple[str, tuple[int, int]]:
    """The act and the errors of a batch from inside. One act after the other meets with the first
    two errors, then with the next two, until each has met with every one."""
    turn = batch - batch // FROM_OUTSIDE - 1  # without the batches from outside
    nth, act = divmod(turn, len(ACTS))
    first, second = (INSIDE_CODES[(2 * nth + more) % len(INSIDE_CODES)] for more in (0, 1))
    return [*ACTS][act], (first, second)


@dataclass(slots=True)
class Tally:
    name: str
    injected: int = 0
    facts: Counter[str] = field(default_factory=Counter)
    violated: int = 0
    told: list[str] = field(default_factory=list)

    def judge(self, code: int | None, found: Found, what: str) -> None:
        self.injected += 1
        problem = None
        if code is None:
            self.facts["hung"] += 1
            problem = "never came to an end"
        elif code == 0:
            self.facts["succeeded all the same"] += 1
            if found.value != NEW:
                self.facts["false success"] += 1
                problem = f"returned as if it had saved; found {found}"
        else:
            self.facts["told of the failure" if code > 0 else "died of a signal"] += 1
            if code < 0 and self.name == HOLDFAST:  # who dies has told nobody
                problem = f"died of {signal.Signals(-code).name}"
            if found.value not in {OLD, NEW}:
                self.facts["a failed save took the old one along"] += 1
                problem = f"failed, and the old one is gone: found {found}"
        if problem is not None:
            self.violated += 1
            if len(self.told) < MOST_TOLD:
                self.told.append(f"{what}: the save {problem}")


def fail_from_outside(
    saver: Subject,
    error: str,
    seed: int,
    *,
    calls: Collection[str] = CALLS,
    limits: int = LIMITS,
) -> Outcome:
    warm(saver)
    with scratch() as folder:
        (folder / "before").mkdir()
        with forked(saves(saver, folder / "before", range(OLD, OLD + 1))) as child:
            child.end()
        one = _Fault(saver, folder)
        tally = Tally(saver.name)
        for call in one.calls(calls):
            for nth, again in _turns(error):
                code, found, fired = one.fail(call, error, f"{nth}{again}")
                if not fired:
                    break
                tally.judge(code, found, f"seed {seed}, {call} {nth}{again} with {error}")
        for limit in one.limits(limits, random.Random(seed)):
            code, found = one.limit(limit)
            tally.judge(code, found, f"seed {seed}, no file may have more than {limit} bytes")
    return Outcome(
        cases=tally.injected,
        violated=tally.violated,
        violations=tuple(tally.told),
        facts=dict(tally.facts),
    )


def _turns(error: str) -> Iterator[tuple[int, str]]:
    """The Nth call alone; for a disk that is broken for good, that and all that follow, first."""
    if error in {"EIO", "ENOSPC"}:
        yield 1, "+"
    yield from ((nth, "") for nth in range(1, MOST))


class _Fault:
    """One save over an old one, again and again, with one fault each."""

    def __init__(self, saver: Subject, folder: Path) -> None:
        self._saver, self._folder = saver, folder
        self._now = folder / "now"
        self._output = folder / "strace"

    def calls(self, calls: Collection[str]) -> list[str]:
        """Which of the calls a save makes at all."""
        if self._save(f"trace={','.join(calls)}") != 0:
            raise RuntimeError(f"{self._saver.name} cannot save while strace looks on")
        seen = set(re.findall(r"(?m)^\d+ +(\w+)\(", self._output.read_text()))
        return [call for call in calls if call in seen]

    def fail(self, call: str, error: str, when: str) -> tuple[int | None, Found, bool]:
        code = self._save(f"trace={call}", f"inject={call}:error={error}:when={when}")
        fired = "(INJECTED)" in self._output.read_text()
        return code, look(self._saver, self._now), fired

    def limits(self, most: int, rng: random.Random) -> list[int]:
        largest = max(path.stat().st_size for path in self._saver.files(self._folder / "before"))
        return sorted({rng.randrange(largest) for _ in range(most)})

    def limit(self, limit: int) -> tuple[int | None, Found]:
        """Python ignores the signal that goes with it, so the write that crosses it is short and
        the next one fails."""
        limits = (limit, resource.RLIM_INFINITY)
        code = self._save(first=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits))
        return code, look(self._saver, self._now)

    def _save(self, *options: str, first: Callable[[], None] = lambda: None) -> int | None:
        """The exit code of a process that saves, ``None`` if it does not come to an end. It says
        nothing itself: a write of ours would be one of the calls that fail."""
        shutil.rmtree(self._now, ignore_errors=True)
        shutil.copytree(self._folder / "before", self._now)

        def act(_: Tell) -> None:
            first()
            try:
                self._saver.save(self._now, NEW)
            except BaseException:  # noqa: BLE001 -- whatever it is, it tells of the failure
                os._exit(REFUSED)

        more = [part for option in options for part in ("-e", option)]
        with gated(act) as (child, go), contextlib.suppress(Stuck):
            if not options:
                go()
                return child.end()
            with attached(child.pid, self._output, "-s", "0", *more):
                go()
                return child.end()
        return None


def unavailable(name: str) -> str | None:
    return not_installed(name) or no_strace()


CAMPAIGN = Campaign(
    name="failing calls",
    promise="no false success: a save that returns has saved, one that raises leaves the old one",
    counted="system calls made to fail",
    cases=10_000,
    peer_cases=400,
    run=run,
    batch_timeout_s=1200,
    subjects=(*SUBJECTS, THREADED_DCP),
    unavailable=unavailable,
)
