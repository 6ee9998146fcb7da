"""Tests as batches: a list of test files, each in so many parts, is gone through part by part.

Knows pytest's reports. A test that fails is a violation. A test is one case, unless it says by
``record_property("cases", n)`` how many it has been through.
"""

import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

import _paths
from _campaign import Outcome

MOST_TOLD = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A file of tests, or one test of it with all its parameters, and in how many batches it is
    run: each is to take a minute or so. ``only`` is a marker's expression."""

    tests: str
    batches: int
    only: str = "proof or not proof"


def batches_of(pieces: Sequence[Piece]) -> int:
    return sum(piece.batches for piece in pieces)


def run_batch(pieces: Sequence[Piece], number: int) -> Outcome:
    """Batch ``number`` of all that ``pieces`` have; raises ``IndexError`` if they have no such."""
    last = batches_of(pieces) - 1
    if not 0 <= number <= last:
        raise IndexError(f"batch {number} of {last + 1}")
    left = number
    for piece in pieces:
        if left < piece.batches:
            return run_tests(piece, left, is_last=number == last)
        left -= piece.batches
    raise AssertionError("unreachable")


def run_tests(piece: Piece, part: int, *, is_last: bool = False) -> Outcome:
    """One part of a piece, by pytest in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-o", f"cache_dir={folder}"]
        command += ["-p", "_slicing", "-m", piece.only]
        command += ["-o", "junit_family=xunit1"]  # the one that has the properties of a test
        command += ["--proof-slice", f"{part}/{piece.batches}", "--junitxml", str(report)]
        command += ["--rootdir", str(_paths.REPO), "-c", str(_paths.REPO / "pyproject.toml")]
        done = subprocess.run(
            [*command, piece.tests], cwd=_paths.REPO, env=_paths.for_children(), check=False
        )
        if done.returncode not in (0, 1):
            raise RuntimeError(f"pytest ended with exit code {done.returncode}: {piece.tests}")
        return read_report(report.read_text("utf-8"), is_last=is_last)


def read_report(xml: str, *, is_last: bool = False) -> Outcome:
    """What the JUnit report of a run says."""
    cases = violated = 0
    told: list[str] = []
    facts: Counter[str] = Counter()
    for test in ET.fromstring(xml).iter("testcase"):
        said = {each.get("name"): each.get("value", "") for each in test.iter("property")}
        skipped = test.find("skipped")
        wrong = [each for kind in ("failure", "error") for each in test.findall(kind)]
        if skipped is not None and not wrong:
            facts[f"skipped: {skipped.get('message', '')}"] += 1
            continue
        cases += int(said.pop("cases", 1))
        facts.update({str(name): int(value) for name, value in said.items()})
        if wrong:
            violated += 1
            told.append(f"{_name(test)}: {_message(wrong[0])}")
    return Outcome(
        cases=cases,
        violated=violated,
        violations=tuple(told[:MOST_TOLD]),
        facts=facts,
        is_last=is_last,
    )


def _name(test: ET.Element) -> str:
    return f"{test.get('classname', '')}::{test.get('name', '')}"


def _message(wrong: ET.Element) -> str:
    return " ".join((wrong.get("message") or wrong.text or "").split())[:500]
