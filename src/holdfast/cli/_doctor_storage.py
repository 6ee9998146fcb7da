"""What a storage of any kind can do, found out by trying. Leaves nothing behind."""

import functools
import secrets
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from holdfast.cli._scratch import scratch
from holdfast.cli._text import size
from holdfast.contracts import ReadRange, Storage
from holdfast.errors import CheckpointError, ObjectChangedError, ObjectExistsError, StorageError

Verdict = Literal["ok", "warn", "bad"]

_BLOCK: Final = 8 * 1024 * 1024
_TELLING_BYTES: Final = 16 * 1024 * 1024
_SLOW_OBJECT_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at, what it is like, and what to do if that is not well."""

    what: str
    value: str
    verdict: Verdict = "ok"
    advice: str = ""


def object_findings(store: str, nbytes: int) -> list[Finding]:
    """An object store: whether it answers, keeps writers apart, and how fast it is."""
    try:
        with scratch(store, "doctor") as own:
            findings = [_latency(own.storage), *promises(own.storage)]
            return [*findings, *bandwidth(own.storage, nbytes, slow=50e6)]
    except CheckpointError as error:
        why = "see that the address, the credentials and the right to write and delete are right"
        return [Finding(what="storage", value=error.message, verdict="bad", advice=why)]


def promises(storage: Storage) -> Iterator[Finding]:
    """What commits stand on: of two that create one key one wins, and only the version that was
    seen is replaced."""
    name = "promises"
    first = storage.create(name, b"first")
    try:
        storage.create(name, b"second")
        yield Finding(
            what="create only if absent",
            value="ignored",
            verdict="bad",
            advice="two saves of one name could overwrite each other: use another store or gateway",
        )
    except ObjectExistsError:
        yield Finding(what="create only if absent", value="kept")
    try:
        second = storage.replace(name, b"third, longer", first.version)
        storage.replace(name, b"fourth", first.version)
        yield Finding(
            what="replace only what was seen",
            value="ignored",
            verdict="bad",
            advice="saves with overwrite could destroy each other: use another store or gateway",
        )
    except ObjectChangedError:
        kept = storage.stat(name).version == second.version
        yield Finding(what="replace only what was seen", value="kept" if kept else "unclear")
    except StorageError as error:
        yield Finding(
            what="replace only what was seen",
            value=error.message,
            verdict="bad",
            advice="overwriting and deleting checkpoints will fail here",
        )


def bandwidth(storage: Storage, nbytes: int, *, slow: float) -> Iterator[Finding]:
    """Bytes per second, written durably and read back. ``slow`` is where to warn; of a few bytes
    that would only be how long it takes to begin."""
    slow = slow if nbytes >= _TELLING_BYTES else 0.0
    _noise()
    begun = time.monotonic()
    write_object(storage, "large", nbytes)
    yield _speed("write, durable", nbytes, time.monotonic() - begun, slow)
    into = memoryview(bytearray(nbytes))
    begun = time.monotonic()
    storage.read_into("large", [ReadRange(start=0, into=into, uncached=True)])
    yield _speed("read", nbytes, time.monotonic() - begun, slow)


def write_object(storage: Storage, key: str, nbytes: int) -> None:
    """Bytes that cannot be compressed, durable when this returns."""
    block = memoryview(_noise())
    with storage.open_writer(key, size_bytes=nbytes) as writer:
        for offset in range(0, nbytes, len(block)):
            writer.write_at(offset, block[: nbytes - offset])
        writer.finish()


@functools.cache
def _noise() -> bytes:
    """Made once, and not while a write is timed: it takes longer than a fast storage."""
    return secrets.token_bytes(_BLOCK)


def _speed(what: str, nbytes: int, seconds: float, slow: float) -> Finding:
    speed = nbytes / max(seconds, 1e-9)
    bad = speed < slow
    return Finding(
        what=what,
        value=f"{size(speed)}/s ({size(nbytes)})",
        verdict="warn" if bad else "ok",
        advice="slow: save in the background (save_async) or to a nearer disk" if bad else "",
    )


def _latency(storage: Storage) -> Finding:
    seconds = []
    for nth in range(5):
        begun = time.monotonic()
        storage.create(f"small-{nth}", b"small")
        seconds.append(time.monotonic() - begun)
    middle = statistics.median(seconds)
    late = middle > _SLOW_OBJECT_S
    return Finding(
        what="small object",
        value=f"{middle * 1e3:.1f} ms to create",
        verdict="warn" if late else "ok",
        advice="far away: fewer and larger files help (format single_file)" if late else "",
    )
