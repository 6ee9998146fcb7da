"""Which checkpoints are committed, the newest first. Reads every record once, however often it is
asked: records are large, and what a version of one says never changes."""

import logging
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


class Listing:
    """The committed checkpoints of a storage. Thread-safe."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._known: dict[str, _Known] = {}

    def read(self) -> list[CheckpointInfo]:
        """Those there are now, the newest first. One whose record is damaged is left out, with a
        warning; one that the storage will not give is an error.

        Saves that committed at the same time may have the same ordinal. Then their writers'
        clocks decide, and then their names, so that the order is always the same.
        """
        infos, unreadable = self._scan()
        for error in unreadable:
            if not isinstance(error, CorruptedError | IncompatibleVersionError):
                raise error
            _log.warning("left out of the list: %s", error)
        return sorted(
            infos, key=lambda info: (info.ordinal, info.timestamp, info.prefix), reverse=True
        )

    def next_ordinal(self) -> int:
        """For a save that is to be newer than all there are. Records that cannot be read count,
        too: each may be one newer than the one before it."""
        infos, unreadable = self._scan()
        newest = max((info.ordinal for info in infos), default=0)
        return min(newest + len(unreadable) + 1, _MAX_ORDINAL)

    def _scan(self) -> tuple[list[CheckpointInfo], list[CheckpointError]]:
        """What is committed, and why other records cannot be read."""
        known: dict[str, _Known] = {}
        unreadable: list[CheckpointError] = []
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
                unreadable.append(error)
                continue
            if seen is not None:
                known[prefix] = seen
        self._known = known
        return [each.info for each in known.values() if each.info is not None], unreadable

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
