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
            yield from self.found.named()


def survey(
    storage: Storage, now_s: float, *, tombstones: Mapping[str, str] | None = None
) -> Mapping[str, Folder]:
    """Every prefix with an object of a checkpoint in it. ``now_s`` is the storage's time.

    ``tombstones`` are the versions of some, by prefix, which need not be read: an object store
    keeps one for every checkpoint that was ever deleted. Their folders have no record then.
    An intent that cannot be read counts as alive for as long as leases usually last.
    """
    folders: dict[str, Folder] = {}
    listed: dict[str, str] = {}
    intents = _list_all(storage, folders, listed, tombstones or {})
    for folder, attempt, info in intents:
        _add_intent(storage, folder, attempt, info, now_s)
    for folder in folders.values():
        if folder.has_record:
            _add_record(storage, folder)
    while _add_news(storage, folders, listed, now_s):
        pass
    return folders


def _list_all(
    storage: Storage,
    folders: dict[str, Folder],
    listed: dict[str, str],
    tombstones: Mapping[str, str],
) -> list[tuple[Folder, str, ObjectInfo]]:
    """Fill ``folders``, and ``listed`` with the versions of intents and records, without reading
    any. Returns the intents, by folder and attempt."""
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
            continue
        listed[info.key] = info.version
        if intent is not None:
            intents.append((folder, intent, info))
        else:
            folder.has_record = tombstones.get(prefix) != info.version
    for prefix in indexed & folders.keys():
        folders[prefix].has_index = True
    return intents


def _add_news(
    storage: Storage, folders: dict[str, Folder], listed: dict[str, str], now_s: float
) -> bool:
    """Add the intents that came, and the records that came or changed, since they were listed.
    Returns whether there were any.

    Whoever read a record as committed, and has said so in an intent, may refer to what it names,
    though it was deleted before it was read here. They may even have committed since.
    """
    news = False
    for info in storage.list():
        prefix, _, name = info.key.rpartition("/")
        attempt = attempt_of_intent(name)
        if not prefix or (attempt is None and name != COMMIT_RECORD):
            continue
        before, listed[info.key] = listed.get(info.key), info.version
        if before == info.version or (attempt is not None and before is not None):
            continue  # also an intent that was renewed: it says what it said
        news = True
        folder = folders.setdefault(prefix, Folder(prefix=prefix))
        if attempt is not None:
            _add_intent(storage, folder, attempt, info, now_s)
        if attempt is None or attempt not in folder.intents:
            _add_record(storage, folder)
    return news


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
