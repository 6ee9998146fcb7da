"""Where the tests keep the machinery that campaigns use. Importing this makes it importable, here
and in the processes that are started from here; knows no campaign.
"""

import os
import sys
from pathlib import Path

PROOF = Path(__file__).resolve().parent
REPO = PROOF.parent
TESTS = REPO / "tests"

_FOLDERS = (
    PROOF,
    REPO / "src",
    TESTS / "crash",
    TESTS / "unit",
    TESTS / "conformance",
    TESTS / "distributed",
    TESTS / "numerics",
)


def _add() -> None:
    known = {*sys.path}
    sys.path += [str(folder) for folder in _FOLDERS if str(folder) not in known]
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    more = [str(folder) for folder in _FOLDERS if str(folder) not in inherited]
    os.environ["PYTHONPATH"] = os.pathsep.join([*inherited, *more])


_add()
