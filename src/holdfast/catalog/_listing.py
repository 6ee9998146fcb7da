"""Which checkpoints are committed, the newest first. Reads every record once, however often it is
asked: records are large, and what a version of one says never changes."""

import logging
from dataclasses import dataclass

from holdfast.catalog._committed import find_record
from holdfast.catalog._info import CheckpointInfo, info_of
from holdfast.contracts import COMMIT_RECORD, Storage
from holdfast.errors import CheckpointError

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
        """Those there are now. One whose record cannot be read is left out, with a warning."""
        known: dict[str, _Known] = {}
        for record in self._storage.list():
            prefix, _, name = record.key.rpartition("/")
            if prefix and name == COMMIT_RECORD:
                before = self._known.get(prefix)
                same = before is not None and before.version == record.version
                found = before if same else self._look(prefix)
                if found is not None:
                    known[prefix] = found
        self._known = known
        infos = [each.info for each in known.values() if each.info is not None]
        return sorted(infos, key=lambda info: (info.ordinal, info.prefix), reverse=True)

    def _look(self, prefix: str) -> _Known | None:
        """What is there, or ``None`` if it is gone or cannot be read."""
        try:
            found = find_record(self._storage, prefix)
        except CheckpointError as error:
            if error.transient:
                raise
            _log.warning("left out of the list: %s", error)
            return None
        if found is None:
            return None
        info = info_of(prefix, found.record) if found.is_committed else None
        return _Known(version=found.info.version, info=info)
