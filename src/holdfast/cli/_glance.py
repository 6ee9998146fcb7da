"""Which checkpoints a store has, from as little of each commit record as a listing shows.

A catalog checks every tensor of every record that it reads, which for a thousand large ones takes
seconds. Here the digest of the record is checked and its tensors are only counted. Whatever is
not plainly a committed record of this version is left to the catalog to judge.
"""

from dataclasses import dataclass
from typing import Final, cast

import msgspec

from holdfast._lanes import run_all
from holdfast.catalog import Catalog, CheckpointInfo, Unreadable
from holdfast.catalog._committed import COMMITTED, Foreign, look
from holdfast.catalog._info import info_of
from holdfast.catalog._names import is_own_name
from holdfast.contracts import COMMIT_RECORD, SMALL_OBJECT_BYTES, ObjectInfo, Storage
from holdfast.errors import CheckpointError, ObjectNotFoundError
from holdfast.format import CommitRecord, StoredFile
from holdfast.format._record import _HEAD, _body_digest


class _Outline(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a ``CommitRecord`` that ``info_of`` looks at."""

    state: str
    ordinal: int
    created: str
    world_size: int
    step: int | None = None
    metrics: dict[str, int | float] = {}
    shard_format: str = "multi_shard"
    files: tuple[StoredFile, ...] = ()
    tensors: dict[str, msgspec.Raw] = {}


_LANES: Final = 16

_DECODE = msgspec.json.Decoder(_Outline).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """The committed checkpoints, the newest first, and the records that cannot be read."""

    infos: tuple[CheckpointInfo, ...]
    unreadable: tuple[Unreadable, ...]


def glance(catalog: Catalog) -> Glance:
    """As ``catalog.scan()``."""
    storage = catalog.storage
    records: dict[str, ObjectInfo] = {}
    own: set[str] = set()
    for each in storage.list():
        prefix, _, name = each.key.rpartition("/")
        if prefix and name == COMMIT_RECORD:
            records[prefix] = each
        elif is_own_name(name):
            own.add(prefix)
    infos: list[CheckpointInfo] = []
    unreadable: list[Unreadable] = []

    def read(prefix: str) -> None:
        try:
            info = _info(storage, prefix, records[prefix], alone=prefix not in own)
        except CheckpointError as error:
            if error.transient:
                raise
            unreadable.append(Unreadable(prefix=prefix, error=error))
            return
        if info is not None:
            infos.append(info)

    # A disk answers before a thread could be switched to; a server takes its time for each.
    run_all(records, read, lanes=1 if storage.url.startswith("file:") else _LANES)
    infos.sort(key=lambda info: (info.ordinal, info.timestamp, info.prefix), reverse=True)
    unreadable.sort(key=lambda each: each.prefix)
    return Glance(infos=tuple(infos), unreadable=tuple(unreadable))


def _info(
    storage: Storage, prefix: str, record: ObjectInfo, *, alone: bool
) -> CheckpointInfo | None:
    """What a record says, or ``None`` if it is of no checkpoint."""
    try:
        data = storage.read(record.key) if record.size_bytes <= SMALL_OBJECT_BYTES else b""
    except ObjectNotFoundError:  # deleted meanwhile
        return None
    outline = _outline(data)
    if outline is not None:
        # Only what an outline has is looked at.
        return info_of(prefix, cast("CommitRecord", outline))
    found = look(storage, prefix)
    if isinstance(found, Foreign):
        if not alone:
            raise found.error()
        return None
    return info_of(prefix, found.record) if found is not None and found.is_committed else None


def _outline(data: bytes) -> _Outline | None:
    """``None`` for what is not the undamaged record of a committed checkpoint, or may not be."""
    head = _HEAD.match(data)
    if head is None or not data.endswith(b"}"):
        return None
    body = memoryview(data)[head.end() : -1]
    if _body_digest(body).encode() != head[1]:
        return None
    try:
        outline = _DECODE(body)
    except ValueError:
        return None
    return outline if outline.state == COMMITTED else None
