"""What the objects of a checkpoint are called. Knows names, not what is in them."""

import re
import secrets
from typing import Final

from holdfast import _checks
from holdfast.contracts import COMMIT_RECORD

_SHARD: Final = re.compile(r"shard-[0-9]+-([0-9a-f]{16})(?:-[0-9]+)?\.safetensors", re.ASCII)
_CLOCK: Final = re.compile(r"clock-[0-9a-f]{16}", re.ASCII)
_INTENT: Final = re.compile(r"intent-([0-9a-f]{16})\.json", re.ASCII)


def new_attempt() -> str:
    """A name for one attempt at saving, like no other."""
    return secrets.token_hex(8)


def shard_name(rank: int, attempt: str, part: int = 0) -> str:
    """The file that a rank writes in an attempt; ``part`` counts if it writes several."""
    return f"shard-{rank}-{attempt}{f'-{part}' if part else ''}.safetensors"


def intent_name(attempt: str) -> str:
    return f"intent-{attempt}.json"


def record_key(prefix: str) -> str:
    return f"{prefix}/{COMMIT_RECORD}"


def attempt_of_shard(name: str) -> str | None:
    """The attempt that wrote this file, or ``None`` if it is no shard's name."""
    found = _SHARD.fullmatch(name)
    return found[1] if found else None


def attempt_of_intent(name: str) -> str | None:
    """The attempt that this file announces, or ``None`` if it is no intent's name."""
    found = _INTENT.fullmatch(name)
    return found[1] if found else None


def is_own_name(name: str) -> bool:
    """Whether only holdfast gives files such a name, that of a shard or an intent."""
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
