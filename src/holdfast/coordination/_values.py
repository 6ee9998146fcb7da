"""How a value of any size lives in the store: under one key, in parts, and gone when read.

The store drops a connection that sends more than 8 MiB at once, so what is larger than 4 MiB
goes in parts. The key itself, holding the number of parts and the first of them, is written
last: once it is there, all of the value is.
"""

import functools
from collections.abc import Sequence

from holdfast.coordination._channel import Session

PART_BYTES = 4 * 1024 * 1024
READ_BATCH = 8  # values read in one message: small enough to come within a second or two


def put(
    session: Session, key: str, data: bytes, *, if_absent: bool = False
) -> tuple[bytes, list[str]]:
    """Set the value, with ``if_absent`` only if nobody has. Returns what is under the key itself
    now, and the keys that were written."""
    parts = [data[at : at + PART_BYTES] for at in range(0, len(data), PART_BYTES)] or [b""]
    further = [f"{key}/{number}" for number in range(1, len(parts))]
    for name, part in zip(further, parts[1:], strict=True):
        session.set(name, part)
    head = len(parts).to_bytes(4, "big") + parts[0]
    if if_absent:
        head = session.set_if_absent(key, head)
    else:
        session.set(key, head)  # does not wait for the store's answer
    return head, [key, *further]


def rest(session: Session, key: str, head: bytes) -> bytes:
    """The whole value, of which ``head`` is under the key itself."""
    further = [session.get([name])[0] for name in _further(key, head)]
    return b"".join([head[4:], *further])


def take(session: Session, keys: Sequence[str]) -> list[bytes]:
    """The values under keys that are there and that nobody else reads; they are deleted later."""
    values = []
    for at in range(0, len(keys), READ_BATCH):
        batch = keys[at : at + READ_BATCH]
        for key, head in zip(batch, session.get(batch), strict=True):
            values.append(rest(session, key, head))
            session.later(functools.partial(delete, session, key, head))
    return values


def delete(session: Session, key: str, head: bytes) -> None:
    session.delete(key)
    for name in _further(key, head):
        session.delete(name)


def join(parts: Sequence[bytes]) -> bytes:
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def split(data: bytes) -> list[bytes]:
    parts, at = [], 0
    while at < len(data):
        end = at + 8 + int.from_bytes(data[at : at + 8], "big")
        parts.append(data[at + 8 : end])
        at = end
    return parts


def _further(key: str, head: bytes) -> list[str]:
    return [f"{key}/{number}" for number in range(1, int.from_bytes(head[:4], "big"))]
