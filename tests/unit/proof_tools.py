"""Lets tests import the harness of ``make proof``, and run it as a command on campaigns of their
own."""

import os
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
PROOF = REPO / "proof"
for folder in (PROOF, *(REPO / "tests" / name for name in ("crash", "distributed"))):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

DRIVER = """
import sys
from pathlib import Path
sys.path.insert(0, {proof!r})
from _command import Places, main
place = Path({place!r})
places = Places(
    campaigns=place / "campaigns", ledger=place / "batches.jsonl", results=place / "results"
)
sys.exit(main(sys.argv[1:], places))
"""

CAMPAIGN = """
import contextlib, os, signal, subprocess, sys, threading, time
from pathlib import Path
from _campaign import Campaign, Outcome, batch_of

HERE = Path(__file__).parent

{code}

CAMPAIGN = Campaign(
    name={name!r}, promise="two and two are four", counted="sums", run=run, **dict({options})
)
"""


class Harness:
    """A folder with campaigns, and the command that runs them."""

    def __init__(self, place):
        self.place = place
        self.campaigns = place / "campaigns"
        self.campaigns.mkdir()
        self.ledger = place / "batches.jsonl"
        self._driver = place / "drive.py"
        self._driver.write_text(DRIVER.format(proof=str(PROOF), place=str(place)))

    def add(self, name, code, options):
        text = CAMPAIGN.format(name=name, code=code, options=options)
        (self.campaigns / f"{name}.py").write_text(text)

    def start(self, *arguments):
        command = [sys.executable, str(self._driver), *map(str, arguments)]
        scratch = self.place / "tmp"  # of which a run that is killed leaves some behind
        scratch.mkdir(exist_ok=True)
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.place,
            env=os.environ | {"TMPDIR": str(scratch)},
        )

    def run(self, *arguments, timeout_s=100):
        """The exit code, and what was printed to stdout and to stderr."""
        process = self.start(*arguments)
        try:
            said, progress = process.communicate(timeout=timeout_s)
        finally:
            process.kill()
        return process.returncode, said, progress

    def read(self, name):
        return (self.place / "results" / name).read_text("utf-8")
