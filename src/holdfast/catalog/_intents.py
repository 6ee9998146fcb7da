"""Intents: what a save under way says to everybody who might delete something.

Knows the lease, in the storage's own time: an intent is alive for ``lease_s`` after it was last
written, and a save writes it again and again.
"""

import contextlib
import os
import socket
from dataclasses import dataclass
from typing import Final

import msgspec

from holdfast import _checks
from holdfast.catalog._names import intent_name
from holdfast.contracts import ObjectInfo, Storage
from holdfast.errors import CheckpointError, CorruptedError

DEFAULT_LEASE_S: Final = 600.0
MAX_LEASE_S: Final = 24 * 3600.0
"""No lease is longer: one that claims to be is taken for this long."""

_FORMAT: Final = "holdfast-intent"
_MAX_BYTES: Final = 16 * 1024 * 1024


class _Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: str
    version: int
    attempt: str
    lease_s: float
    refers: tuple[str, ...]
    host: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """A save of ``prefix`` under way, and the prefixes whose files it may refer to."""

    prefix: str
    attempt: str
    lease_s: float
    refers: tuple[str, ...] = ()
    writer: str = ""

    @property
    def key(self) -> str:
        return f"{self.prefix}/{intent_name(self.attempt)}"


def encode_intent(intent: Intent) -> bytes:
    body = _Body(
        format=_FORMAT,
        version=1,
        attempt=intent.attempt,
        lease_s=intent.lease_s,
        refers=intent.refers,
        host=socket.gethostname(),
        pid=os.getpid(),
    )
    return msgspec.json.encode(body)


def announce(storage: Storage, intent: Intent) -> None:
    """Write an intent that is not there yet; after an error it is not there either."""
    try:
        storage.create(intent.key, encode_intent(intent))
    except BaseException:
        with contextlib.suppress(CheckpointError):  # it may be there all the same
            storage.delete(intent.key)
        raise


def renew(storage: Storage, intent: Intent) -> None:
    """Write the intent again, in one step, and without comparing: not every filesystem can."""
    data = encode_intent(intent)
    with storage.open_writer(intent.key, size_bytes=len(data)) as writer:
        writer.write_at(0, data)
        writer.finish()


def read_intent(storage: Storage, prefix: str, attempt: str) -> Intent:
    """``CorruptedError`` if it cannot be understood; also one of a newer version."""
    key = f"{prefix}/{intent_name(attempt)}"
    if storage.stat(key).size_bytes > _MAX_BYTES:
        raise CorruptedError("this is too large for an intent", path=key)
    try:
        body = msgspec.json.decode(storage.read(key), type=_Body)
        _checks.seconds("lease_s", body.lease_s)
    except (RecursionError, ValueError) as error:
        raise CorruptedError(f"this is no intent: {error}", path=key) from error
    if (body.format, body.version, body.attempt) != (_FORMAT, 1, attempt):
        raise CorruptedError("this intent is of another attempt or another version", path=key)
    return Intent(
        prefix=prefix,
        attempt=attempt,
        lease_s=min(body.lease_s, MAX_LEASE_S),
        refers=body.refers,
        writer=f"process {body.pid} on {body.host}",
    )


def check_lease(lease_s: object) -> float:
    """``lease_s``, or ``ValueError`` unless a save can have such a lease."""
    checked = _checks.seconds("lease_s", lease_s)
    if checked > MAX_LEASE_S:
        raise ValueError(f"lease_s must be at most {MAX_LEASE_S:g} seconds, not {lease_s!r}")
    return checked


def is_alive(info: ObjectInfo, lease_s: float, now_s: float) -> bool:
    """Whether the intent was written within its lease. Both times are the storage's."""
    return now_s - info.modified_s <= lease_s
