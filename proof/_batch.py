"""A process that runs one batch: ``_batch.py folder campaign subject seed outcome.json``.

Started by ``_child.py``. It ends by itself when the process that started it is gone.
"""

import importlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import _paths  # noqa: F401 -- lets campaigns import what the tests have

if TYPE_CHECKING:
    from _campaign import Outcome


def main(arguments: Sequence[str]) -> None:
    folder, name, subject, seed, outcome = arguments
    _end_with_the_starter()
    sys.path.insert(0, folder)
    found: Outcome = importlib.import_module(name).CAMPAIGN.run(subject, int(seed))
    facts = dict(found.facts)  # a Counter, maybe, which asdict would take for something else
    words = json.dumps(asdict(replace(found, facts=facts)))
    Path(outcome).write_text(words, encoding="utf-8")


def _end_with_the_starter() -> None:
    """Leave a process behind that ends all of this group when stdin ends. It is nobody's child, and
    no thread: campaigns fork, and count their children."""
    if os.fork() == 0:
        if os.fork() == 0:
            while os.read(0, 1):
                pass
            os.killpg(0, signal.SIGKILL)
        os._exit(0)
    os.wait()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


if __name__ == "__main__":
    main(sys.argv[1:])
