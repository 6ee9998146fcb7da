"""What the objects of a checkpoint are called. Knows names, not what is in them."""

import re
import secrets
from typing import Final

from holdfast import _checks
from holdfast.contracts import COMMIT_RECORD

MODEL_INDEX: Final = "model.safetensors.index.json"
"""Where readers of the Hugging Face layout look for which file holds which tensor."""

SHARD_STARTS: Final = ("shard-", "model-")
"""How the names of all files begin that ``attempt_of_shard`` knows."""

_FILE: Final = ".safetensors"
_TABLE: Final = ".chunks"
_MODEL: Final = re.compile(r"model-[0-9]{5,}-of-[0-9]{5,}-([0-9a-f]{16})\.safetensors", re.ASCII)
_SHARD: Final = re.compile(
    r"(?:shard-[0-9]+-([0-9a-f]{16})(?:-[0-9]+)?|model-[0-9]{5,}-of-[0-9]{5,}-([0-9a-f]{16}))"
    r"\.(?:safetensors|chunks)",
    re.ASCII,
)
_CLOCK: Final = re.compile(r"clock-[0-9a-f]{16}", re.ASCII)
_INTENT: Final = re.compile(r"intent-([0-9a-f]{16})\.json", re.ASCII)


def new_attempt() -> str:
    """A name for one attempt at saving, like no other."""
    return secrets.token_hex(8)


def shard_name(rank: int, attempt: str, part: int = 0) -> str:
    """The file that a rank writes in an attempt; ``part`` counts if it writes several."""
    return f"shard-{rank}-{attempt}{f'-{part}' if part else ''}.safetensors"


def shard_key(prefix: str, attempt: str, rank: int, part: int = 0) -> str:
    """Where a rank writes its file of an attempt at saving ``prefix``, any rank's."""
    return f"{prefix}/{shard_name(rank, attempt, part)}"


def model_name(number: int, count: int, attempt: str) -> str:
    """The ``number``-th of ``count`` files, from 1, that hold a model in the Hugging Face layout.

    Its readers go by the index, so that the attempt may stand in the name, which keeps the files
    of two attempts apart.
    """
    if not 1 <= number <= count:
        raise ValueError(f"number must be 1 to {count}, not {number}")
    return f"model-{number:05}-of-{count:05}-{attempt}{_FILE}"


def is_model_name(name: str) -> bool:
    """Whether ``model_name`` gives such names."""
    return _MODEL.fullmatch(name) is not None


def table_name(file: str) -> str:
    """The object beside a file that holds the file's chunk table, if the file does not."""
    if not file.endswith(_FILE):
        raise ValueError(f"file must be the name of a {_FILE} file, not {file!r}")
    return file.removesuffix(_FILE) + _TABLE


def intent_name(attempt: str) -> str:
    return f"intent-{attempt}.json"


def record_key(prefix: str) -> str:
    return f"{prefix}/{COMMIT_RECORD}"


def attempt_of_shard(name: str) -> str | None:
    """The attempt that wrote this file, a shard or the table beside one, or ``None`` if it has
    no such name."""
    found = _SHARD.fullmatch(name)
    return found[1] or found[2] if found else None


def attempt_of_intent(name: str) -> str | None:
    """The attempt that this file announces, or ``None`` if it is no intent's name."""
    found = _INTENT.fullmatch(name)
    return found[1] if found else None


def is_own_name(name: str) -> bool:
    """Whether only holdfast gives files such a name, that of a shard, a table or an intent."""
    return attempt_of_shard(name) is not None or attempt_of_intent(name) is not None


def new_clock() -> str:
    """A name for an object that is written only to see when the storage says it was."""
    return f"clock-{secrets.token_hex(8)}"


def is_clock(key: str) -> bool:
    return _CLOCK.fullmatch(key) is not None


def check_prefix(name: str, prefix: object) -> str:
    """``prefix``, or ``ValueError`` unless it can name a checkpoint."""
    checked = _checks.key(name, prefix)
    if COMMIT_RECORD in checked.split("/"):
        raise ValueError(f"{name} must name a checkpoint, not its {COMMIT_RECORD}: {prefix!r}")
    return checked
