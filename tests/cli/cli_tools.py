"""Runs the command line as people do: in a process of its own, where torch cannot be imported."""

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from holdfast.cli import main; main()"
COMMAND = [sys.executable, "-W", "error", "-c", WITHOUT_TORCH]


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


@functools.cache
def _server():
    process = subprocess.Popen(
        [sys.executable, "-W", "error", Path(__file__).with_name("cli_server.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )

    def end():
        process.stdin.close()
        process.wait(timeout=30)
        process.stdout.close()

    atexit.register(end)
    return process


def holdfast(*arguments, env=None, cwd=None, powerless=False):
    """Run it in a pipe. Whatever happens there is no traceback, and trouble is one line each."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        wanted = {
            "arguments": [*map(str, arguments)],
            "env": env or {},
            "cwd": str(cwd or Path.cwd()),
            "out": str(out),
            "err": str(err),
            "powerless": powerless,
        }
        server = _server()
        server.stdin.write(f"{json.dumps(wanted)}\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        ran = Ran(code, out.read_text(), err.read_text())
    if "--debug" not in arguments:
        assert "Traceback" not in ran.err, ran.err
        assert all(line.startswith("holdfast: ") for line in ran.err.splitlines()), ran.err
    return ran


def refused(*arguments, code, saying, **how):
    """Run it and see that it fails with that code and one line that has these words."""
    ran = holdfast(*arguments, **how)
    assert ran.code == code, (ran.code, ran.err)
    assert len(ran.err.splitlines()) == 1, ran.err
    for words in [saying] if isinstance(saying, str) else saying:
        assert words in ran.err
    return ran
