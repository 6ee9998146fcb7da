"""Whether a checkpoint is there: the one answer that everything else asks for.

Knows the commit record and how it is put in place, compared and fenced; knows no shards.
"""

import datetime as dt
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import msgspec

import holdfast
from holdfast.catalog._names import new_attempt, record_key
from holdfast.contracts import SMALL_OBJECT_BYTES, Data, ObjectInfo, ReadRange, Storage
from holdfast.errors import (
    CheckpointNotFoundError,
    CorruptedError,
    ObjectChangedError,
    ObjectExistsError,
    ObjectNotFoundError,
    StorageError,
)
from holdfast.format import CommitRecord, decode_record, encode_record

COMMITTED: Final = "committed"
TOMBSTONE: Final = "tombstone"

_MAX_FENCE: Final = 2**63 - 1

_BEGINNING: Final = b'{"format":"holdfast"'
_DAMAGED: Final = re.compile(rb'\0|.{,200}"record":\{"state":"', re.DOTALL)

_log = logging.getLogger("holdfast.catalog")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A commit record, and the version of the object that holds it."""

    prefix: str
    record: CommitRecord
    info: ObjectInfo

    @property
    def is_committed(self) -> bool:
        """A checkpoint exists if and only if this is true of its record.

        A tombstone stands where a save was given up: it keeps the save, should it wake up, from
        putting its record there.
        """
        return self.record.state == COMMITTED

    def named(self) -> Iterator[str]:
        """The keys of the files that the record names, also in other folders."""
        for file in self.record.files:
            for name in file.names:
                yield f"{file.prefix or self.prefix}/{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A file in the place of a commit record that does not begin like one, damaged or not.

    Somebody else's, if nothing of holdfast's is beside it; otherwise a record that was damaged.
    """

    prefix: str

    def error(self) -> CorruptedError:
        return CorruptedError(
            "this file is not holdfast's: it does not begin like a commit record; holdfast leaves "
            "it alone, so use another name for the checkpoint",
            path=record_key(self.prefix),
        )


def look(storage: Storage, prefix: str) -> Found | Foreign | None:
    """What stands in the place of the prefix's commit record, tombstones and others' files
    included. ``CorruptedError`` or ``IncompatibleVersionError`` if it cannot be read."""
    seen = _read(storage, prefix)
    return found_of(prefix, *seen) if isinstance(seen, tuple) else seen


def found_of(prefix: str, data: Data, info: ObjectInfo) -> Found:
    """A record from its bytes, read here or on another rank. Pure. ``CorruptedError`` or
    ``IncompatibleVersionError`` if they cannot be read."""
    return Found(prefix=prefix, record=decode_record(data, path=record_key(prefix)), info=info)


def _read(storage: Storage, prefix: str) -> tuple[bytes, ObjectInfo] | Foreign | None:
    """The bytes in the record's place, and their version.

    The version is asked for before the bytes: whoever replaces that version later replaces what
    was read here, or fails.
    """
    key = record_key(prefix)
    try:
        info = storage.stat(key)
        if info.size_bytes > SMALL_OBJECT_BYTES:
            if _begins_otherwise(storage, key):
                return Foreign(prefix=prefix)
            problem = (
                f"a commit record has at most {SMALL_OBJECT_BYTES} bytes, not {info.size_bytes}"
            )
            raise CorruptedError(problem, path=key)
        data = storage.read(key)
    except ObjectNotFoundError:
        return None
    if data and not data.startswith(_BEGINNING) and not _DAMAGED.match(data):
        return Foreign(prefix=prefix)
    return data, info


def find_record(storage: Storage, prefix: str) -> Found | None:
    """As ``look``, but somebody else's file is a ``CorruptedError``, too."""
    found = look(storage, prefix)
    if isinstance(found, Foreign):
        raise found.error()
    return found


def _begins_otherwise(storage: Storage, key: str) -> bool:
    first = bytearray(len(_BEGINNING))
    storage.read_into(key, [ReadRange(start=0, into=memoryview(first))])
    return first != _BEGINNING


def find_committed(storage: Storage, prefix: str) -> Found:
    """The committed checkpoint of that name, or ``CheckpointNotFoundError``."""
    found = find_record(storage, prefix)
    if found is None or not found.is_committed:
        raise _not_found(storage, prefix)
    return found


def read_committed(storage: Storage, prefix: str) -> tuple[bytes, ObjectInfo]:
    """The bytes of a committed checkpoint's record, for one rank to read and all to decode with
    ``found_of``. Raises as ``find_committed`` does."""
    seen = _read(storage, prefix)
    if isinstance(seen, Foreign):
        raise seen.error()
    if seen is None or not found_of(prefix, *seen).is_committed:
        raise _not_found(storage, prefix)
    return seen


def _not_found(storage: Storage, prefix: str) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(
        "there is no committed checkpoint of this name; list them to see which there are, and if "
        "this is a store, name one that is in it",
        path=f"{storage.url}/{prefix}",
    )


def publish(storage: Storage, prefix: str, record: bytes, over: str | None) -> ObjectInfo:
    """Put a record's bytes in place: where nothing is, or over exactly that version.

    One atomic step. ``ObjectExistsError``, ``ObjectChangedError`` or ``ObjectNotFoundError`` if
    another was there first.
    """
    if over is None:
        return storage.create(record_key(prefix), record)
    return storage.replace(record_key(prefix), record, over)


def new_tombstone() -> CommitRecord:
    """A record that says: nothing is here, and no save that began before may put anything here."""
    return CommitRecord(
        state=TOMBSTONE,
        ordinal=0,
        attempt=new_attempt(),
        created=utc_now(),
        world_size=1,
        writer=f"holdfast {holdfast.__version__}",
    )


def fence(storage: Storage, prefix: str, seen: Found | None) -> bool:
    """Change what stands in the record's place, so that no save which began before can publish
    over it. ``False`` if somebody changed it since it was seen.

    A committed record and a tombstone stay what they are and only count one fence more.
    """
    if seen is None:
        record, over = msgspec.structs.replace(new_tombstone(), fence=1), None
    else:
        record = msgspec.structs.replace(seen.record, fence=min(seen.record.fence + 1, _MAX_FENCE))
        over = seen.info.version
    try:
        publish(storage, prefix, encode_record(record), over)
    except (ObjectExistsError, ObjectChangedError, ObjectNotFoundError):
        return False
    _log.info("fenced %s in %s", prefix, storage.url)
    return True


def lift(storage: Storage, prefix: str, version: str) -> bool:
    """Remove a tombstone, given by its version, and say whether it is gone.

    In one step, so that nothing is lost that took its place. A storage that cannot do that keeps
    it, which does no harm: tombstones are not listed, and saves may take their place.
    """
    try:
        storage.delete(record_key(prefix), expected=version)
    except StorageError as error:
        if error.transient:
            raise
        _log.debug("a tombstone stays in %s: %s", storage.url, error)
        return False
    return True


def utc_now() -> str:
    """Now, as a record says it."""
    return dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
