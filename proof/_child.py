"""One batch in a process of its own: started, waited for, and killed whole if it takes too long.

Knows processes, and nothing of what a campaign does. Everything that a batch starts carries a mark
in its environment, so that also what has left the process group is found and ended.
"""

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import _paths
from _campaign import Campaign, batch_of
from _ledger import Batch

BATCH = Path(__file__).with_name("_batch.py")
MARK = "HOLDFAST_PROOF_BATCH"
MOST_OF_A_LOG = 1500


class Child:
    """A batch that is running. ``poll`` it until it returns a ``Batch``; ``close`` ends it."""

    def __init__(self, folder: Path, campaign: Campaign, subject: str, seed: int) -> None:
        self.campaign = campaign
        self.subject = subject
        self.seed = seed
        self._since = time.monotonic()
        self._mark = secrets.token_hex(8)
        self._place = Path(tempfile.mkdtemp(prefix="holdfast-proof-"))
        self._outcome = self._place / "outcome.json"
        self._log = self._place / "log"
        scratch = self._place / "tmp"
        scratch.mkdir()
        environment = _paths.for_children() | {
            MARK: self._mark,
            "TMPDIR": str(scratch),
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
        }
        command = [sys.executable, str(BATCH), str(folder), campaign.name, subject, str(seed)]
        with self._log.open("wb") as log:
            # It watches its stdin: when this process is no more, neither is the batch.
            self._process = subprocess.Popen(
                [*command, str(self._outcome)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._since

    def poll(self) -> Batch | None:
        """What came of it, or ``None`` while it runs."""
        code = self._process.poll()
        limit_s = self.campaign.batch_timeout_s
        if code is None and self.elapsed_s < limit_s:
            return None
        seconds = round(self.elapsed_s, 3)
        if code is None:
            said = self._end()
            return self._troubled(f"took longer than {limit_s:g} s and was killed\n{said}", seconds)
        said = self._end()
        if code < 0:
            name = signal.Signals(-code).name
            return self._troubled(f"died of {name} after {seconds:.1f} s\n{said}", seconds)
        if code != 0 or not self._outcome.exists():
            last = said.rsplit("\n", 1)[-1] or "it said nothing"
            trouble = f"the campaign is broken: exit code {code}: {last}\n{said}"
            return self._troubled(trouble, seconds, is_subjects=False)
        found = json.loads(self._outcome.read_text("utf-8"))
        return Batch(
            campaign=self.campaign.name,
            subject=self.subject,
            number=batch_of(self.seed),
            seed=self.seed,
            seconds=seconds,
            **{**found, "violations": tuple(found["violations"])},
        )

    def log(self) -> str:
        """What the batch has printed."""
        return self._log.read_text("utf-8", errors="replace")

    def close(self) -> None:
        """End what still runs of it and remove its files. What cannot be removed, such as a disk
        that a killed batch had mounted, is told and left."""
        self._end()
        if self._process.stdin is not None:
            self._process.stdin.close()
        shutil.rmtree(self._place, onerror=_tell)

    def _troubled(self, trouble: str, seconds: float, *, is_subjects: bool = True) -> Batch:
        return Batch(
            campaign=self.campaign.name,
            subject=self.subject,
            number=batch_of(self.seed),
            seed=self.seed,
            seconds=seconds,
            violated=int(is_subjects),
            trouble=trouble,
            is_subjects=is_subjects,
        )

    def _end(self) -> str:
        """Kill all that runs of it, and return the end of what it said."""
        with contextlib.suppress(ProcessLookupError):
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
        for pid in _marked(self._mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        return self.log().strip()[-MOST_OF_A_LOG:]


def _marked(mark: str) -> Iterator[int]:
    """The processes that have the mark in their environment, wherever they have gone."""
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                environment = (folder / "environ").read_bytes()
            except OSError:
                continue  # ended meanwhile, or somebody else's
            if wanted in environment.split(b"\0"):
                yield int(folder.name)


def _tell(_: object, path: str, error: tuple[object, BaseException, object]) -> None:
    print(f"proof: {path} is left behind: {error[1]}", file=sys.stderr)
