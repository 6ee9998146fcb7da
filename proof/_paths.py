"""Where the tests keep the machinery that campaigns use. Importing this makes it importable; knows
no campaign.
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


sys.path += [str(folder) for folder in _FOLDERS if str(folder) not in sys.path]


def for_children() -> dict[str, str]:
    """The environment in which a process of Python's finds the same modules."""
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    more = [str(folder) for folder in _FOLDERS if str(folder) not in inherited]
    return os.environ | {"PYTHONPATH": os.pathsep.join([*inherited, *more])}
