"""Runs a call in a child that has little memory, little time and no network, and watches what it
does beside returning. Knows processes and limits, nothing of checkpoints.

The child is a fork of this process, so that what is imported already costs nothing. It must have
no other threads then.
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from holdfast.errors import CheckpointError

MIB: Final = 1024 * 1024

_NEW_NETWORK: Final = 0x40000000
_NEW_USER: Final = 0x10000000
_ARENA_MAX: Final = -8
_STACK_BYTES: Final = MIB
_RUNS: Final = {
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
    "pty.spawn",
    "subprocess.Popen",
}
_CONNECTS: Final = {"socket.bind", "socket.connect", "socket.getaddrinfo", "socket.sendto"}
_CHANGES: Final = {
    "os.chmod",
    "os.link",
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.symlink",
    "os.truncate",
}
_WRITING: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a child may use: address space beyond what it starts with, seconds on the processor,
    and seconds in all, which is only there to end those that wait for ever."""

    more_bytes: int
    cpu_s: int = 20
    wall_s: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """How a call ended. ``end`` is ``returned``, ``refused`` (with a ``CheckpointError``),
    ``raised`` (anything else), ``signal`` or ``hung``; ``words`` say more. ``deeds`` are what it
    should not have done. ``peak_bytes`` is the most address space it had beyond what it began
    with."""

    end: str
    error: str = ""
    words: str = ""
    deeds: tuple[str, ...] = ()
    peak_bytes: int = 0
    cpu_s: float = 0.0
    has_network: bool = False


def confined(call: Callable[[], object], *, within: Path, limits: Limits) -> Ran:
    """Run ``call`` in a child. A path outside of ``within`` that it writes to is a deed."""
    if threading.active_count() > 1:
        raise RuntimeError(f"a process of several threads is not forked: {threading.enumerate()}")
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        _in_child(call, within, limits, writer)
    os.close(writer)
    try:
        said, is_late = _said(reader, limits.wall_s)
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if said:
        return _ran(json.loads(said))
    if is_late:
        return Ran(end="hung", words=f"no end in {limits.wall_s:g} s")
    name = signal.Signals(-status).name if status < 0 else f"exit code {status}"
    return Ran(end="signal", words=name)


def _ran(told: dict[str, Any]) -> Ran:
    return Ran(**told | {"deeds": tuple(told["deeds"])})


def _said(reader: int, wall_s: float) -> tuple[bytes, bool]:
    """What the child wrote before it ended, which is one line, and whether it was too slow."""
    said = b""
    deadline = time.monotonic() + wall_s
    while not said.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([reader], [], [], left)[0]:
            return b"", True
        piece = os.read(reader, 65536)
        if not piece:
            return b"", False
        said += piece
    return said, False


def _in_child(call: Callable[[], object], within: Path, limits: Limits, writer: int) -> None:
    """Does not return, whatever happens."""
    status = 70
    try:
        # A copy of the parent must not run what the parent has open: no handlers, no atexit.
        has_network = not _leave_network()
        deeds: list[str] = []
        before = _size()
        _limit(limits, before)
        _watch(within, deeds)
        told = _told(call)
        told["deeds"] = deeds[:20]
        told["peak_bytes"] = max(0, _size("VmPeak") - before)
        told["cpu_s"] = time.process_time()
        told["has_network"] = has_network
        _lift()
        os.write(writer, json.dumps(told).encode() + b"\n")
        status = 0
    except BaseException:  # noqa: BLE001 -- or the child would go on as if it were its parent
        with contextlib.suppress(BaseException):
            _lift()
            os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)


def _told(call: Callable[[], object]) -> dict[str, Any]:
    try:
        value = call()
    except CheckpointError as error:
        return {"end": "refused", "error": type(error).__name__, "words": _short(error)}
    except BaseException as error:  # noqa: BLE001 -- whatever it is, it is told
        _lift()
        return {"end": "raised", "error": type(error).__name__, "words": _short(error)}
    return {"end": "returned", "words": f"{value!r:.300}"}


def _short(error: BaseException) -> str:
    where = traceback.extract_tb(error.__traceback__)
    last = f"{Path(where[-1].filename).name}:{where[-1].lineno}" if where else "nowhere"
    return f"{str(error)[:400]!r} at {last}".encode("utf-8", "backslashreplace").decode()


def _leave_network() -> bool:
    """Into a network that has nothing in it, if this user may."""
    libc = ctypes.CDLL(None)
    return not libc.unshare(_NEW_NETWORK) or not libc.unshare(_NEW_NETWORK | _NEW_USER)


def _limit(limits: Limits, before: int) -> None:
    sys.dont_write_bytecode = True
    threading.stack_size(_STACK_BYTES)  # or a few threads are more than what they read
    ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (before + limits.more_bytes, hard))
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s, limits.cpu_s + 5))


def _lift() -> None:
    """Room to tell what happened, where all memory was taken."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def _size(field: str = "VmSize") -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


_ATTACKING: list[bool] = []


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """What the attacker does meanwhile, who is in the same process only to be in time."""
    _ATTACKING.append(True)
    try:
        yield
    finally:
        _ATTACKING.pop()


def _watch(within: Path, deeds: list[str]) -> None:
    inside = os.fspath(within.resolve()) + os.sep

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if _ATTACKING:
            return
        if event in _RUNS:
            deeds.append(f"ran a program: {event}{args!r:.200}")
        elif event in _CONNECTS:
            deeds.append(f"used the network: {event}{args[1:]!r:.100}")
        elif event == "open" and isinstance(args[2], int) and args[2] & _WRITING:
            deeds.extend(_outside(args[:1], inside, "wrote to"))
        elif event in _CHANGES:
            deeds.extend(_outside(args, inside, f"{event} of"))

    sys.addaudithook(hook)


def _outside(args: tuple[Any, ...], inside: str, what: str) -> Iterator[str]:
    """Those of the paths that leave a folder. What is relative is so to an open folder, which the
    comparison of all that is around it judges."""
    for each in args:
        if isinstance(each, str | bytes | os.PathLike):
            path = os.fsdecode(each)
            real = os.path.realpath(path)
            if path.startswith("/") and not real.startswith((inside, "/dev/", "/proc/")):
                yield f"{what} {path[:200]!r}"
