"""Processes forked from one that has imported everything: savers to be killed, stopped or cut off,
and looks at what they left. Knows processes and pipes; knows no faults.

A fork costs milliseconds where a new Python with torch costs seconds, so a batch is hundreds of
cases.
"""

import contextlib
import ctypes
import importlib
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from _found import without_folders
from _subjects import LATEST, ORBAX, Subject, Wrong

SOON_S = 30.0
"""In which everything that is asked of a small saver has happened, on a busy machine too."""

MEMORY = Path("/dev/shm")

_libc = ctypes.CDLL(None, use_errno=True)

Tell = Callable[[str], None]


class Stuck(Exception):  # noqa: N818 -- says it all
    """A process did not come to its end in time."""


@dataclass(slots=True)
class Child:
    """A forked process and what it has told."""

    pid: int
    fd: int
    lines: list[str]
    _rest: bytes = b""
    _ended: bool = False

    def read(self, timeout_s: float = 0.0) -> list[str]:
        """All it has told until now; waits so long for the next word. Says nothing new once it is
        over."""
        while not self._ended and select.select([self.fd], [], [], timeout_s)[0]:
            some = os.read(self.fd, 65536)
            self._ended = not some
            *whole, self._rest = (self._rest + some).split(b"\n")
            self.lines += [line.decode() for line in whole]
            timeout_s = 0.0
        return self.lines

    def wait_for(self, word: str, timeout_s: float = SOON_S) -> bool:
        """Whether it said a line that begins so, before its end."""
        deadline = time.monotonic() + timeout_s
        while not any(line.startswith(word) for line in self.lines):
            left = deadline - time.monotonic()
            if self._ended:
                return False
            if left <= 0:
                raise Stuck(f"no {word!r} within {timeout_s} s")
            self.read(left)
        return True

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def last(self, word: str) -> int | None:
        """The last value of which it said this."""
        values = [int(line.split()[1]) for line in self.lines if line.split()[0] == word]
        return values[-1] if values else None

    def end(self, timeout_s: float = SOON_S) -> int:
        """Wait until it is over; its exit code, negative for a signal."""
        deadline = time.monotonic() + timeout_s
        while not self._ended:
            left = deadline - time.monotonic()
            if left <= 0:
                raise Stuck(f"not over within {timeout_s} s; it said {self.lines[-3:]}")
            self.read(left)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@contextlib.contextmanager
def forked(act: Callable[[Tell], None]) -> Iterator[Child]:
    """``act`` in a process of its own, which is killed at the latest when this is left."""
    readable, writable = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.close(readable)
        _be(act, writable)
    os.close(writable)
    child = Child(pid, readable, [])
    try:
        yield child
    finally:
        os.close(readable)
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            if os.waitpid(pid, os.WNOHANG)[0] == 0:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Savers tell at length of files that are broken, and threads of theirs do so too."""
    kept = os.dup(2)
    quiet = os.open(os.devnull, os.O_RDWR)
    try:
        os.dup2(quiet, 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
        os.close(quiet)


def _be(act: Callable[[Tell], None], writable: int) -> NoReturn:
    code = 1
    try:
        quiet = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(quiet, fd)

        def tell(line: str) -> None:
            os.write(writable, f"{line}\n".encode())

        act(tell)
        code = 0
    finally:
        os._exit(code)


def saves(
    subject: Subject, folder: Path, values: range, name: Callable[[int], str] = lambda _: LATEST
) -> Callable[[Tell], None]:
    """Save these one after the other, saying ``begin``, then ``saved`` or ``failed``."""

    def act(tell: Tell) -> None:
        for value in values:
            tell(f"begin {value}")
            began = time.monotonic()
            try:
                subject.save(folder, value, name(value))
            except BaseException as error:  # noqa: BLE001 -- whatever it is, it is no success
                tell(f"failed {value} {_line(error)}")
            else:
                tell(f"saved {value} {time.monotonic() - began:.6f}")

    return act


@contextlib.contextmanager
def gated(act: Callable[[Tell], None]) -> Iterator[tuple[Child, Callable[[], None]]]:
    """As ``forked``, but it says ``ready`` and begins when the second thing is called. By a signal:
    whoever watches its calls sees none of this."""

    def wait(tell: Tell) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        tell("ready")
        signal.sigwait({signal.SIGUSR1})
        act(tell)

    with forked(wait) as child:
        child.wait_for("ready")
        yield child, lambda: child.signal(signal.SIGUSR1)


@dataclass(frozen=True, slots=True)
class Found:
    """What can be loaded: a value, or nothing and why. ``wrong`` if it loaded and is no state."""

    value: int | None
    problem: str = ""
    wrong: bool = False

    def __str__(self) -> str:
        return f"value {self.value}" if self.value is not None else self.problem


def look(subject: Subject, folder: Path, name: str = LATEST) -> Found:
    """What is there, looked at by a process of its own: some savers die of what they read."""

    def act(tell: Tell) -> None:
        found = look_here(subject, folder, name)
        tell(f"{found.value} {int(found.wrong)} {found.problem}")

    with forked(act) as child:
        code = child.end()
    if not child.lines:
        return Found(None, f"nothing: the load died with code {code}")
    value, wrong, problem = child.lines[0].split(" ", 2)
    return Found(None if value == "None" else int(value), problem, wrong=wrong == "1")


def look_here(subject: Subject, folder: Path, name: str = LATEST) -> Found:
    """The same in this process, for thousands of looks."""
    try:
        return Found(subject.load(folder, name))
    except Wrong as error:
        return Found(None, f"wrong: {_line(error)}", wrong=True)
    except BaseException as error:  # noqa: BLE001 -- as the library raises it; DCP's are no Exception
        return Found(None, f"nothing: {_line(error)}")


def _line(error: BaseException) -> str:
    return without_folders(repr(error).replace("\n", " "))[:200]


def warm(subject: Subject) -> None:
    """Have everything imported before the forks, by using it once."""
    if subject.name == ORBAX:  # its threads would not survive a fork, so it is only imported
        importlib.import_module("orbax.checkpoint")
        return
    with scratch() as folder:
        subject.save(folder, 1)
        subject.save(folder, 2)
        if subject.load(folder) != 2:
            raise RuntimeError(f"{subject.name} does not load what it saved")


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """An empty folder in memory, where there is such a disk."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        yield Path(folder)


def settle(folder: Path) -> None:
    """Have all that was written to its disk on it, and wait for no other disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        if _libc.syncfs(fd) != 0:
            raise OSError(ctypes.get_errno(), "syncfs failed", str(folder))
    finally:
        os.close(fd)
