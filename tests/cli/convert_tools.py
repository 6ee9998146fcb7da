"""Runs conversions as processes of their own with torch, kills them, and makes what they read."""

import atexit
import contextlib
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from cli_tools import Ran

MIB = 1024 * 1024


@functools.cache
def _server():
    process = subprocess.Popen(
        # A signal may come between the opening of a file and the block that closes it.
        [
            *(sys.executable, "-W", "error", "-W", "ignore::ResourceWarning"),
            Path(__file__).with_name("convert_server.py"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
    )

    def end():
        process.stdin.close()
        process.wait(timeout=30)
        process.stdout.close()

    atexit.register(end)
    return process


@dataclass(frozen=True)
class Converted(Ran):
    """``memory`` is how much more of it the process took than it began with."""

    memory: int | None


def with_torch(*arguments, cwd=None, largest=0, watch=None, sign=signal.SIGKILL):
    """Run a command line. With ``watch``, a function that says whether it is in the middle, it is
    sent a signal then."""
    with tempfile.TemporaryDirectory() as folder:
        files = {name: str(Path(folder, name)) for name in ("out", "err", "memory")}
        wanted = {
            "arguments": [*map(str, arguments)],
            "env": {},
            "cwd": str(cwd or Path.cwd()),
            "powerless": False,
            "largest": largest,
            **files,
        }
        server = _server()
        server.stdin.write(f"{json.dumps(wanted)}\n")
        server.stdin.flush()
        pid = int(server.stdout.readline())
        if watch is not None:
            _interrupt(pid, watch, sign)
        code = int(server.stdout.readline())
        out, err, memory = (Path(files[name]) for name in ("out", "err", "memory"))
        taken = int(memory.read_text()) if memory.exists() else None
        ran = Converted(code, out.read_text(), err.read_text(), taken)
    assert "Traceback" not in ran.err, ran.err
    assert all(line.startswith("holdfast: ") for line in ran.err.splitlines()), ran.err
    return ran


def _interrupt(pid, watch, sign):
    """The server has not waited for the process yet or still does, so that the number is its own
    for as long as it runs; one that has ended in the meantime is a zombie, or gone."""
    while Path(f"/proc/{pid}/status").exists():
        if watch():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sign)
            return
        time.sleep(0.0005)


def refused(*arguments, code, saying, run=with_torch, **how):
    """Run it and see that it fails with that code and one line that has these words."""
    ran = run(*arguments, **how)
    assert ran.code == code, (ran.code, ran.out, ran.err)
    assert len(ran.err.splitlines()) == 1, ran.err
    for words in [saying] if isinstance(saying, str) else saying:
        assert words in ran.err, ran.err
    return ran


def done(*arguments, run=with_torch, **how):
    ran = run(*arguments, **how)
    assert (ran.code, ran.err) == (0, ""), ran
    return ran


def left_by_ctrl_c(folder, shards):
    """The files that are left, but for those that are meant to be: the lock of a store; and if the
    signal came in the very moment of the commit, all shards and the intent, for gc to judge."""
    left = sorted(each.name for each in folder.rglob("*") if each.is_file())
    left = [name for name in left if name != ".holdfast.lock"]
    kinds = [name.split("-")[0] for name in left]
    return [] if shards and kinds == ["intent", *["shard"] * shards] else left


def large_safetensors(path, sizes):
    """A file of tensors of so many bytes that takes no room: all zero, and never written."""
    ends = [*itertools.accumulate(sizes)]
    listed = {
        f"t{nth}": {"dtype": "F32", "shape": [size // 4], "data_offsets": [end - size, end]}
        for nth, (size, end) in enumerate(zip(sizes, ends, strict=True))
    }
    header = json.dumps(listed).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + ends[-1])
    return path
