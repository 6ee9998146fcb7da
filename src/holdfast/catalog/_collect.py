"""Collects what saves that never finished left behind. Never touches what a committed checkpoint
or a living save may need.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from holdfast.catalog._committed import fence, lift
from holdfast.catalog._intents import DEFAULT_LEASE_S
from holdfast.catalog._model_index import has_model_files, settle_index
from holdfast.catalog._names import is_clock, record_key
from holdfast.catalog._needed import Needed, needed_in, unnamed
from holdfast.catalog._survey import Folder, storage_time, survey
from holdfast.contracts import Storage
from holdfast.errors import CheckpointError, NoSpaceError

_log = logging.getLogger("holdfast.catalog")

TOMBSTONE_S = 7 * 24 * 3600.0
"""How long a tombstone stays: longer than any save that was given up could sleep and wake."""

_CLOCK_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GcReport:
    """What gc did. ``deleted`` are keys, ``swept`` counts hidden files of interrupted writes.
    ``kept`` gives, by prefix, why something that looked like a leftover stays."""

    deleted: tuple[str, ...] = ()
    kept: Mapping[str, str] = field(default_factory=dict)
    swept: int = 0


def collect_garbage(storage: Storage, *, tombstone_s: float = TOMBSTONE_S) -> GcReport:
    """Remove what saves left that never committed and are not alive. Writes nothing where there
    is nothing.

    A save on another host is alive while its intent is younger than its lease, by the storage's
    clock. One that is not is fenced off before anything goes that it wrote or may refer to:
    should it wake up, its commit fails.
    """
    if next(storage.list(), None) is None:
        return GcReport(swept=storage.sweep(DEFAULT_LEASE_S))
    now_s = storage_time(storage)
    folders = survey(storage, now_s)
    readable = all(folder.problem is None for folder in folders.values())
    fenced = {f.prefix for f in folders.values() if readable and _give_up(storage, f)}
    given_up = {attempt for prefix in fenced for attempt in folders[prefix].intents}
    # One that woke up before it was fenced off may have committed, and others refer to it since.
    current = survey(storage, now_s) if fenced else folders
    needed = needed_in(current.values(), given_up=given_up)
    deleted: list[str] = []
    kept: dict[str, str] = {}
    for folder in folders.values():
        try:
            reason = _collect(storage, folder, needed, deleted, fenced=folder.prefix in fenced)
        except CheckpointError as error:
            if error.transient:
                raise
            reason = f"it could not be removed: {error}"
        if reason is not None:
            kept[folder.prefix] = reason
        elif _lift_old(storage, folder, now_s - tombstone_s):
            deleted.append(record_key(folder.prefix))
    for info in [*storage.list("clock-")]:
        if is_clock(info.key) and info.modified_s < now_s - _CLOCK_S:
            storage.delete(info.key)
            deleted.append(info.key)
    swept = storage.sweep(_longest_lease(folders.values()))
    _log.info("gc in %s deleted %d objects, swept %d", storage.url, len(deleted), swept)
    return GcReport(deleted=tuple(deleted), kept=kept, swept=swept)


def _give_up(storage: Storage, folder: Folder) -> bool:
    """Fence off the saves of a folder that are not alive, unless that would stop one that is."""
    if not folder.intents or folder.alive:
        return False
    try:
        return fence(storage, folder.prefix, folder.found)
    except NoSpaceError:  # what can be deleted without it makes room for the next time
        return False


def _collect(
    storage: Storage, folder: Folder, needed: Needed, deleted: list[str], *, fenced: bool
) -> str | None:
    """Delete what is garbage in a folder. Returns why something was kept, if it was."""
    reason = _reason_to_stay(folder, needed, fenced=fenced)
    if reason is not None:
        return reason
    garbage: list[str] = []
    for attempt, keys in folder.shards.items():
        loose = [key for key in keys if not needed.holds(key)]
        sure = unnamed(storage, folder.prefix, attempt, loose, given_up=folder.intents)
        if sure is None:
            return "a save began while gc was looking"
        garbage += sure
    garbage += [intent.key for intent in folder.intents.values()]
    if garbage or folder.has_index is not _needs_index(folder):
        settle_index(storage, folder.prefix)  # first: it names files that are about to go
    for key in garbage:
        storage.delete(key)
        deleted.append(key)
    return None


def _needs_index(folder: Folder) -> bool:
    found = folder.found
    return found is not None and found.is_committed and has_model_files(found.record)


def _reason_to_stay(folder: Folder, needed: Needed, *, fenced: bool) -> str | None:
    """Why nothing of a folder may go, or ``None`` if some of it may."""
    if folder.problem is not None:
        return f"its commit record cannot be read: {folder.problem.message}"
    if folder.alive:
        return "a save is under way"
    named = set(folder.named())
    if needed.blind and (
        folder.intents or any(key not in named for keys in folder.shards.values() for key in keys)
    ):
        unreadable = ", ".join(needed.unreadable)
        return f"what is in {unreadable} cannot be read, and it may refer to these files"
    if folder.intents and not fenced:
        return "it changed while gc was looking, or there is no room for a tombstone; try again"
    return None


def _lift_old(storage: Storage, folder: Folder, before_s: float) -> bool:
    found = folder.found
    if found is None or found.is_committed or folder.shards or folder.intents:
        return False
    return found.info.modified_s < before_s and lift(storage, folder.prefix, found.info.version)


def _longest_lease(folders: Iterable[Folder]) -> float:
    leases = [intent.lease_s for folder in folders for intent in folder.intents.values()]
    return max([DEFAULT_LEASE_S, *leases])
