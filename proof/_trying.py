"""Runs tests against a changed copy of the library, many times and soon: ``Lane``.

A lane has a copy of its own in a folder of its own, and a process that has loaded all but the
library and is forked for each change, so that a change costs its tests and not the loading of
pytest. Run as a program it is that process. Knows files and tests, not where changes come from.
"""

import compileall
import contextlib
import gc
import json
import os
import py_compile
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from _covering import LIBRARY, QUIET, REPO, SameExamples, path_of

HANG_S: Final = 20.0
"""A test that takes this much longer than it did has hung."""

_NOT_THE_COPY: Final = 99
_NO_SUCH_TESTS: Final = 4  # pytest's


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What came of it: ``by`` is the test that failed, or ``None``. A hang is told in words."""

    failed: bool
    by: str | None


class Lane:
    """A copy of the library, changed in one file at a time. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._source = folder / "src"
        shutil.copytree(
            LIBRARY,
            self._source / LIBRARY.name,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        # By hash, unchecked: what is not changed is loaded at once, whatever the clock says.
        mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
        compileall.compile_dir(self._source, quiet=2, invalidation_mode=mode)
        environment = {
            **os.environ,
            **QUIET,
            "PYTHONPATH": path_of(self._source),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "TMPDIR": str(folder),
        }
        self._server = subprocess.Popen(
            [sys.executable, __file__, str(self._source), str(folder / "tmp")],
            cwd=REPO,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def try_tests(self, path: Path, data: bytes, tests: Sequence[str], seconds: float) -> Tried:
        """The tests with ``data`` in place of the library's file ``path``. ``seconds`` is what they
        take without a change."""
        changed = self._source / path.relative_to(LIBRARY.parent)
        tag = sys.implementation.cache_tag
        compiled = changed.parent / "__pycache__" / f"{path.stem}.{tag}.pyc"
        kept, kept_compiled = changed.read_bytes(), compiled.read_bytes()
        compiled.unlink()
        changed.write_bytes(data)
        try:
            return self._ask({"tests": [*tests], "limit_s": HANG_S + 6 * seconds})
        finally:
            changed.write_bytes(kept)
            compiled.write_bytes(kept_compiled)

    def close(self) -> None:
        with self._server:  # closes its pipes, which ends it, and waits for it
            pass

    def _ask(self, request: dict[str, Any]) -> Tried:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process that runs tests ended with {self._server.wait()}")
        return Tried(**json.loads(answer))


@contextlib.contextmanager
def lane() -> Iterator[Lane]:
    with tempfile.TemporaryDirectory(prefix="holdfast-mutants-") as folder:
        made = Lane(Path(folder))
        try:
            yield made
        finally:
            made.close()


class _FirstFailure:
    """A plugin of pytest: tells of the first test that fails, or file that cannot be loaded, and
    ends there: what comes after takes longer than the test."""

    def __init__(self, answer: int) -> None:
        self._answer = answer

    def _note(self, report: Any) -> None:
        if report.failed:
            os.write(self._answer, f"{report.nodeid}\n".encode())
            os._exit(1)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._note(report)

    def pytest_collectreport(self, report: Any) -> None:
        self._note(report)


def _serve(source: str, scratch: str) -> None:
    """Answer requests until there are no more. One at a time."""
    import hypothesis  # noqa: F401 -- loaded here, they need not be loaded for every change
    import ml_dtypes  # noqa: F401
    import msgspec  # noqa: F401
    import numpy as np  # noqa: F401
    import obstore  # noqa: F401
    import pytest  # noqa: F401
    import pytest_timeout  # type: ignore[import-untyped]  # noqa: F401
    import sybil.integration.pytest  # noqa: F401
    import tenacity  # noqa: F401
    import xxhash  # noqa: F401
    import zstandard  # noqa: F401

    if any(name.partition(".")[0] == "holdfast" for name in sys.modules):
        raise RuntimeError("the library was loaded before it was changed")
    gc.collect()
    gc.freeze()  # so that no collection in a child looks at what it shares with this process
    for line in sys.stdin:
        request = json.loads(line)
        found = _forked(source, scratch, request["tests"], request["limit_s"])
        print(json.dumps(found), flush=True)


def _forked(source: str, scratch: str, tests: list[str], limit_s: float) -> dict[str, object]:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os._exit(_in_child(source, scratch, tests, writing))
    os.close(writing)
    deadline = time.monotonic() + limit_s
    code = _waited(child, deadline)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if code is None:
        os.waitpid(child, 0)
    # Not to the end: something the tests started may have been left with the other end.
    told = b""
    while select.select([reading], [], [], 0)[0] and (more := os.read(reading, 65536)):
        told += more
    os.close(reading)
    by = told.decode().partition("\n")[0]
    if code == _NOT_THE_COPY:
        raise RuntimeError(f"the tests did not use the library in {source}")
    functions = [*dict.fromkeys(test.partition("[")[0] for test in tests)]
    if code == _NO_SUCH_TESTS and not by and functions != tests:
        # A changed constant gives a test other cases, of other names.
        return _forked(source, scratch, functions, limit_s)
    if code is not None and code > 0 and not by:
        raise RuntimeError(f"pytest could not run the tests: exit code {code}")
    if code is None or code < 0:
        return {"failed": True, "by": by or "it did not end, or crashed"}
    return {"failed": code != 0, "by": by or None}


def _waited(child: int, deadline: float) -> int | None:
    """The exit code, or ``None`` if it did not end in time."""
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    return None


def _in_child(source: str, scratch: str, tests: list[str], answer: int) -> int:
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(nowhere, fd)
    import pytest

    return pytest.main(
        [
            "-x",
            "-q",
            "--assert=plain",
            "-o",
            "addopts=",
            "-o",
            f"cache_dir={scratch}-cache",
            "-p",
            "pytest_timeout",
            f"--timeout={HANG_S}",
            f"--basetemp={scratch}",
            *tests,
        ],
        plugins=[SameExamples(), _FirstFailure(answer), _Used(source)],
    )


class _Used:
    """A plugin of pytest: makes sure that it is the copy that was tested."""

    def __init__(self, source: str) -> None:
        self._source = source

    def pytest_sessionfinish(self) -> None:
        used = sys.modules.get("holdfast")
        if used is not None and not str(used.__file__).startswith(self._source):
            os._exit(_NOT_THE_COPY)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
