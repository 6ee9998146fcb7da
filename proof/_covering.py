"""Which tests run which lines of the core, and how long each takes: ``python proof/_covering.py``.

Runs the quick tests once, file by file, each file in a process of its own, under coverage.py, and
says how much of the core's branches they run; the exit code is 1 if that is less than 95 %. What it
finds is kept in ``build/proof/covering``, a file's part for as long as neither that file nor the
library changes. Knows no mutants; they ask here for the tests that might notice them.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import coverage

REPO: Final = Path(__file__).resolve().parent.parent
LIBRARY: Final = REPO / "src" / "holdfast"
KEPT: Final = REPO / "build" / "proof" / "covering"

LEAST_PERCENT: Final = 95.0
TEST_S: Final = 30.0
"""A test that takes longer is told, and serves for the coverage it reached, not for mutants."""

_STORAGE = (
    "breaking deadlined disk_threads file_sink folders limited local memory new_file ordered "
    "pages ranges retrying root_lock streams system tree uncached wrapped"
)
_COMMIT = "attempt collect committed delete intents listing names needed survey"
CORE: Final[Mapping[str, tuple[Path, ...]]] = {
    "format": tuple(sorted((LIBRARY / "format").glob("_*.py"))),
    "reshard": tuple(sorted((LIBRARY / "reshard").glob("_*.py"))),
    "commit": tuple(LIBRARY / "catalog" / f"_{name}.py" for name in _COMMIT.split()),
    "storage": tuple(LIBRARY / "storage" / f"_{name}.py" for name in _STORAGE.split()),
}
"""What is measured: bytes on disk; geometry; what decides whether a checkpoint is there and what
may go; and storages on disk and in memory, with the wrappers around any."""

_BELOW: Final = ("catalog", "format", "reshard", "resilience", "storage", "testing")

_UNIT = (
    "boxes catalog_commit catalog_gc catalog_hostile catalog_limits catalog_verify "
    "catalog_write_read codecs coverage disk_threads dtypes entry_names fresh_memory grids "
    "hostile_records hostile_shards lanes local_storage memory_storage model_index "
    "ordered_writer per_rank plans prune ranges record retention shard_format storage_wrappers "
    "strict_json tables_beside values values_torch whole_boxes"
)
TESTS: Final[tuple[str, ...]] = (
    *(f"tests/unit/test_{name}.py" for name in _UNIT.split()),
    *(f"tests/conformance/test_{name}.py" for name in ("local", "memory", "wrapped")),
    "tests/crash/test_failing_calls.py",
    "tests/crash/test_forgotten_writers.py",
    "tests/crash/test_local_storage_security.py",
    "tests/crash/test_sync_order.py",
    "tests/golden/test_golden.py",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedTest:
    """A test that passed. ``with_torch``: its file loads torch, which takes seconds."""

    nodeid: str
    seconds: float
    with_torch: bool

    @property
    def file(self) -> str:
        return self.nodeid.partition("::")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """How much of a room is run: of its lines and branches together, and of its branches. What is
    not, by file."""

    percent: float
    branches_percent: float
    missing: Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Covering:
    """What the tests run. ``lines`` gives, by file and line, the tests that run it; ``unused`` are
    tests that did not pass in time, or were skipped, and why."""

    tests: Mapping[str, TimedTest]
    lines: Mapping[Path, Mapping[int, Sequence[TimedTest]]]
    rooms: Mapping[str, Measures]
    unused: Mapping[str, str]


def cover(lanes: int = 2) -> Covering:
    """Run what has changed since the last time, and put all of it together."""
    KEPT.mkdir(parents=True, exist_ok=True)
    below = [*LIBRARY.glob("*.py"), *(p for room in _BELOW for p in LIBRARY.glob(f"{room}/*.py"))]
    library = _digest(sorted(below))
    helpers = _digest(sorted(p for p in (REPO / "tests").rglob("*.py") if "test_" not in p.name))
    keys = {test: _digest([REPO / test], library + helpers) for test in TESTS}
    due = [test for test, key in keys.items() if not (KEPT / f"{key}.json").exists()]
    with ThreadPoolExecutor(lanes) as pool:
        for _ in pool.map(lambda test: _run_file(test, keys[test]), due):
            pass
    wanted = set(keys.values())
    for old in KEPT.iterdir():
        if old.name.split(".")[0] not in wanted:
            old.unlink()
    return _together([KEPT / key for key in keys.values()])


def _run_file(test: str, key: str) -> None:
    command = [sys.executable, __file__, "--file", test, "--into", str(KEPT / key)]
    environment = {**os.environ, **QUIET, "PYTHONPATH": path_of(LIBRARY.parent)}
    print(f"covering {test}", file=sys.stderr, flush=True)
    done = subprocess.run(
        command, cwd=REPO, env=environment, capture_output=True, text=True, check=False
    )
    if not (KEPT / f"{key}.json").exists():
        raise RuntimeError(f"{test} could not be run:\n{done.stdout}\n{done.stderr}")


QUIET: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def path_of(source: Path) -> str:
    """``PYTHONPATH`` for a process that is to use the library in ``source``."""
    rest = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([str(source), *(part for part in rest if part)])


class SameExamples:
    """A plugin of pytest: hypothesis does the same examples each time, and shrinks none."""

    def pytest_configure(self) -> None:
        import hypothesis

        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        hypothesis.settings.register_profile(
            "same", phases=phases, derandomize=True, database=None, max_examples=50, deadline=None
        )
        hypothesis.settings.load_profile("same")


class _Watching:
    """A plugin of pytest: tells coverage which test is running, and notes what came of it."""

    def __init__(self, measured: "coverage.Coverage") -> None:
        self._measured = measured
        self.with_torch = False
        self.seconds: dict[str, float] = {}
        self.failed: dict[str, str] = {}

    def pytest_collection_finish(self) -> None:
        self.with_torch = "torch" in sys.modules

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._measured.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if not report.passed:
            self.failed[report.nodeid] = (
                "skipped" if report.skipped else str(report.longrepr)[-200:]
            )
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_runtest_logfinish(self) -> None:
        self._measured.switch_context("")


def _measure(test: str, into: Path) -> None:
    import coverage
    import pytest

    files = [str(path) for paths in CORE.values() for path in paths]
    measured = coverage.Coverage(
        data_file=f"{into}.data", branch=True, include=files, config_file=False
    )
    watching = _Watching(measured)
    measured.start()
    pytest.main(
        ["-q", f"--timeout={TEST_S}", "--timeout-method=signal", "-p", "no:sybil", test],
        plugins=[SameExamples(), watching],
    )
    measured.stop()
    measured.save()
    passed = {
        nodeid: seconds
        for nodeid, seconds in watching.seconds.items()
        if nodeid not in watching.failed and seconds <= TEST_S
    }
    if not passed:
        raise SystemExit(f"no test of {test} passed")
    found = {"with_torch": watching.with_torch, "passed": passed, "failed": watching.failed}
    Path(f"{into}.json").write_text(json.dumps(found), encoding="utf-8")


def _together(parts: Sequence[Path]) -> Covering:
    import coverage

    tests: dict[str, TimedTest] = {}
    unused: dict[str, str] = {}
    for part in parts:
        found = json.loads(Path(f"{part}.json").read_text(encoding="utf-8"))
        unused |= found["failed"]
        for nodeid, seconds in found["passed"].items():
            tests[nodeid] = TimedTest(
                nodeid=nodeid, seconds=seconds, with_torch=found["with_torch"]
            )
    combined = coverage.Coverage(data_file=None, branch=True, config_file=False)
    combined.combine([f"{part}.data" for part in parts], keep=True)
    data = combined.get_data()
    lines = {
        path: {
            line: [tests[name] for name in names if name in tests]
            for line, names in data.contexts_by_lineno(str(path)).items()
        }
        for paths in CORE.values()
        for path in paths
    }
    rooms = {room: _measures(combined, room) for room in CORE}
    return Covering(tests=tests, lines=lines, rooms=rooms, unused=unused)


def _measures(measured: "coverage.Coverage", room: str) -> Measures:
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder, "report.json")
        measured.json_report([str(path) for path in CORE[room]], outfile=str(told))
        report = json.loads(told.read_text(encoding="utf-8"))
    totals = report["totals"]
    missing = {
        name: [
            *(str(line) for line in file["missing_lines"]),
            *(f"{start}->{end if end > 0 else 'end'}" for start, end in file["missing_branches"]),
        ]
        for name, file in report["files"].items()
    }
    return Measures(
        percent=totals["percent_covered"],
        branches_percent=100 * totals["covered_branches"] / totals["num_branches"],
        missing=missing,
    )


def _digest(paths: Iterable[Path], start: str = "") -> str:
    digest = hashlib.sha256(start.encode())
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:24]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--file", help=argparse.SUPPRESS)
    options.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.file:
        _measure(chosen.file, chosen.into)
        return
    covering = cover()
    for room, found in covering.rooms.items():
        for name, missing in found.missing.items():
            if missing:
                print(f"{name}: not run: {', '.join(missing)}")
        print(
            f"{room}: {found.branches_percent:.2f} % of branches, {found.percent:.2f} % with lines"
        )
    print(f"{len(covering.tests)} tests; {len(covering.unused)} were skipped or too slow")
    raise SystemExit(any(r.branches_percent < LEAST_PERCENT for r in covering.rooms.values()))


if __name__ == "__main__":
    main()
