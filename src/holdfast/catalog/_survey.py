"""What is in a store of checkpoints, seen once: records, intents, shards. Decides and deletes
nothing."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from holdfast.catalog._committed import Foreign, Found, look
from holdfast.catalog._intents import DEFAULT_LEASE_S, Intent, is_alive, read_intent
from holdfast.catalog._names import MODEL_INDEX, attempt_of_intent, attempt_of_shard, new_clock
from holdfast.contracts import COMMIT_RECORD, ObjectInfo, Storage
from holdfast.errors import CheckpointError, CorruptedError, ObjectNotFoundError, StorageError

_log = logging.getLogger("holdfast.catalog")


@dataclass(slots=True, kw_only=True)
class Folder:
    """The objects of one prefix. ``problem`` says why its record could not be read; ``unknown``
    are the attempts whose intent could not: nobody knows what they refer to. ``foreign`` if
    somebody else's file is in the record's place, and nothing else here is of a checkpoint.
    ``has_index`` if there is an index of model files, holdfast's or not."""

    prefix: str
    shards: dict[str, list[str]] = field(default_factory=dict)
    intents: dict[str, Intent] = field(default_factory=dict)
    alive: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)
    has_record: bool = False
    found: Found | None = None
    problem: CheckpointError | None = None
    foreign: bool = False
    has_index: bool = False

    def named(self) -> Iterator[str]:
        """The keys of the files that the committed record names, also in other folders."""
        if self.found is not None and self.found.is_committed:
            for file in self.found.record.files:
                for name in file.names:
                    yield f"{file.prefix or self.prefix}/{name}"


def survey(storage: Storage, now_s: float) -> Mapping[str, Folder]:
    """Every prefix with an object of a checkpoint in it. ``now_s`` is the storage's time.

    An intent that cannot be read counts as alive for as long as leases usually last.
    """
    folders: dict[str, Folder] = {}
    intents: list[tuple[Folder, str, ObjectInfo]] = []
    indexed: set[str] = set()
    for info in storage.list():
        prefix, _, name = info.key.rpartition("/")
        if name == MODEL_INDEX:
            indexed.add(prefix)
        shard, intent = attempt_of_shard(name), attempt_of_intent(name)
        if not prefix or (shard is None and intent is None and name != COMMIT_RECORD):
            continue
        folder = folders.setdefault(prefix, Folder(prefix=prefix))
        if shard is not None:
            folder.shards.setdefault(shard, []).append(info.key)
        elif intent is not None:
            intents.append((folder, intent, info))
        else:
            folder.has_record = True
    for prefix in indexed & folders.keys():
        folders[prefix].has_index = True
    for folder, attempt, info in intents:
        _add_intent(storage, folder, attempt, info, now_s)
    for folder in folders.values():
        if folder.has_record:
            _add_record(storage, folder)
    _add_late_intents(storage, folders, now_s)
    return folders


def _add_late_intents(storage: Storage, folders: dict[str, Folder], now_s: float) -> None:
    """Add the intents that came while the records were read: whoever read one as committed since
    then, and has said so, may refer to what it names."""
    for info in storage.list():
        prefix, _, name = info.key.rpartition("/")
        attempt = attempt_of_intent(name)
        if not prefix or attempt is None:
            continue
        folder = folders.setdefault(prefix, Folder(prefix=prefix))
        if attempt not in folder.intents:
            _add_intent(storage, folder, attempt, info, now_s)
            if attempt not in folder.intents:
                _add_record(storage, folder)


def _add_intent(
    storage: Storage, folder: Folder, attempt: str, info: ObjectInfo, now_s: float
) -> None:
    try:
        intent = read_intent(storage, folder.prefix, attempt)
    except ObjectNotFoundError:  # it is over, and may have committed
        folder.has_record = True
        return
    except (CorruptedError, StorageError) as error:
        if error.transient:
            raise
        intent = Intent(prefix=folder.prefix, attempt=attempt, lease_s=DEFAULT_LEASE_S)
        folder.unknown.add(attempt)
    folder.intents[attempt] = intent
    if is_alive(info, intent.lease_s, now_s):
        folder.alive.add(attempt)


def _add_record(storage: Storage, folder: Folder) -> None:
    try:
        found = look(storage, folder.prefix)
    except CheckpointError as error:
        if error.transient:
            raise
        folder.problem = error
        return
    if not isinstance(found, Foreign):
        folder.found = found
    elif folder.shards or folder.intents:
        folder.problem = found.error()
    else:
        folder.foreign = True
        _log.debug("not holdfast's, and left alone: %s in %s", folder.prefix, storage.url)


def storage_time(storage: Storage) -> float:
    """What the storage's clock says, found out by writing something and looking when."""
    key = new_clock()
    try:
        return storage.create(key, b"").modified_s
    finally:
        storage.delete(key)
