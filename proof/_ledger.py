"""The batches that have been run, one line of JSON each, so that a run that was broken off goes on.

Knows what a batch came to and of which run it is; decides nothing. A run is a seed and a state of
the code: batches of another are left in the file and never counted together.
"""

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from _campaign import BATCHES


def seed_of(run_seed: int, campaign: str, subject: str, number: int) -> int:
    """The seed of a batch; ``_campaign.batch_of`` tells its number from it."""
    if not 0 <= number < BATCHES:
        raise ValueError(f"batch {number} is not one of {BATCHES}")
    digest = hashlib.sha256(f"{run_seed}/{campaign}/{subject}".encode()).digest()
    return int.from_bytes(digest[:5], "big") * BATCHES + number


@dataclass(frozen=True, slots=True, kw_only=True)
class RunKey:
    """What must be the same for batches to be added up."""

    seed: int
    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What came of one batch. ``trouble`` says why there is no outcome: if ``is_subjects``, the
    batch had to be killed or died of a signal, which counts as one violation; else the campaign
    itself is broken."""

    campaign: str
    subject: str
    number: int
    seed: int
    seconds: float
    cases: int = 0
    violated: int = 0
    violations: tuple[str, ...] = ()
    facts: Mapping[str, int] = field(default_factory=dict)
    is_last: bool = False
    trouble: str | None = None
    is_subjects: bool = False


class LedgerInUseError(Exception):
    """Another run writes this ledger: the batches of both would be counted as those of one."""


class Ledger:
    """A file of batches. One process writes it at a time, who has it ``held``."""

    def __init__(self, path: Path, key: RunKey) -> None:
        self._path = path
        self._key = key

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """For as long as a run lasts. ``LedgerInUseError`` while another has it."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.with_suffix(".lock").open("wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LedgerInUseError(f"another run is at work on {self._path}") from None
            yield

    def batches(self) -> list[Batch]:
        """Those of this run, in the order in which they ended. A last line that was broken off is
        none."""
        return [_batch(line) for line in self._lines() if self._is_ours(line)]

    def others(self) -> int:
        """How many batches of other runs are in the file."""
        return sum(not self._is_ours(line) for line in self._lines())

    def append(self, batch: Batch) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"run": asdict(self._key), **asdict(batch)}, ensure_ascii=False)
        with self._path.open("a+b") as file:
            _end_last_line(file)
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def forget(self) -> None:
        """Drop the batches of this run, and only these."""
        others = [line for line in self._lines() if not self._is_ours(line)]
        if self._path.exists():
            kept = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in others)
            self._path.write_text(kept, encoding="utf-8")

    def _is_ours(self, line: Mapping[str, Any]) -> bool:
        return bool(line["run"] == asdict(self._key))

    def _lines(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        data = self._path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        return [line for line in map(_decoded, whole.splitlines()) if line is not None]


def _end_last_line(file: Any) -> None:
    """What a kill broke off becomes a line of its own, which no reader takes for a batch."""
    file.seek(0, os.SEEK_END)
    if file.tell():
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")


def _decoded(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "run" in found else None


def _batch(line: Mapping[str, Any]) -> Batch:
    fields = {name: value for name, value in line.items() if name != "run"}
    return Batch(**{**fields, "violations": tuple(fields["violations"])})
