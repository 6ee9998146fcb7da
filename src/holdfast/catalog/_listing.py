"""Which checkpoints are committed, the newest first. Reads every record once, however often it is
asked: records are large, and what a version of one says never changes."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from holdfast.catalog._committed import Foreign, look
from holdfast.catalog._info import CheckpointInfo, info_of
from holdfast.catalog._names import is_own_name
from holdfast.contracts import COMMIT_RECORD, ObjectInfo, Storage
from holdfast.errors import CheckpointError, CorruptedError, IncompatibleVersionError

_MAX_ORDINAL: Final = 2**63 - 1

_log = logging.getLogger("holdfast.catalog")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    version: str
    info: CheckpointInfo | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A commit record that cannot be read, and why. Nobody knows which checkpoint it is of, but
    for its name, nor how old that is."""

    prefix: str
    error: CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """All records of a storage: the committed checkpoints, the newest first, and what could not be
    read. ``written_s`` is when the storage says that the record of each prefix was written, and
    ``tombstones`` has the versions of those that say that nothing is there."""

    infos: tuple[CheckpointInfo, ...]
    unreadable: tuple[Unreadable, ...]
    written_s: Mapping[str, float]
    tombstones: Mapping[str, str]


class Listing:
    """The committed checkpoints of a storage. Thread-safe."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._known: dict[str, _Known] = {}

    def read(self) -> list[CheckpointInfo]:
        """Those there are now, the newest first. One whose record is damaged is left out, with a
        warning; one that the storage will not give is an error."""
        found = self.scan()
        for each in found.unreadable:
            if not isinstance(each.error, CorruptedError | IncompatibleVersionError):
                raise each.error
            _log.warning("left out of the list: %s", each.error)
        return [*found.infos]

    def next_ordinal(self) -> int:
        """For a save that is to be newer than all there are. Records that cannot be read count,
        too: each may be one newer than the one before it."""
        found = self.scan()
        newest = max((info.ordinal for info in found.infos), default=0)
        return min(newest + len(found.unreadable) + 1, _MAX_ORDINAL)

    def scan(self) -> Scan:
        """What is committed, the newest first, and why other records cannot be read. What may
        pass is raised.

        Saves that committed at the same time may have the same ordinal. Then their writers'
        clocks decide, and then their names, so that the order is always the same.
        """
        known: dict[str, _Known] = {}
        unreadable: list[Unreadable] = []
        records: dict[str, ObjectInfo] = {}
        own: set[str] = set()
        for info in self._storage.list():
            prefix, _, name = info.key.rpartition("/")
            if prefix and name == COMMIT_RECORD:
                records[prefix] = info
            elif is_own_name(name):
                own.add(prefix)
        for prefix, record in records.items():
            seen = self._known.get(prefix)
            try:
                if seen is None or seen.version != record.version:
                    seen = self._look(prefix, alone=prefix not in own)
            except CheckpointError as error:
                if error.transient:
                    raise
                unreadable.append(Unreadable(prefix=prefix, error=error))
                continue
            if seen is not None:
                known[prefix] = seen
        self._known = known
        infos = [each.info for each in known.values() if each.info is not None]
        infos.sort(key=lambda info: (info.ordinal, info.timestamp, info.prefix), reverse=True)
        return Scan(
            infos=tuple(infos),
            unreadable=tuple(unreadable),
            written_s={prefix: record.modified_s for prefix, record in records.items()},
            tombstones={p: each.version for p, each in known.items() if each.info is None},
        )

    def _look(self, prefix: str, *, alone: bool) -> _Known | None:
        found = look(self._storage, prefix)
        if isinstance(found, Foreign):
            if not alone:
                raise found.error()
            _log.debug("not holdfast's, and left out of the list: %s", prefix)
            return None
        if found is None:
            return None
        info = info_of(prefix, found.record) if found.is_committed else None
        return _Known(version=found.info.version, info=info)
