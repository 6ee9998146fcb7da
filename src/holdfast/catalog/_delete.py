"""Deletes checkpoints that somebody names, but never a file that another one or a save needs.

The commit record goes first, so that at every moment there is a whole checkpoint or none. Only
then is it looked up who needs its files.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from holdfast.catalog._committed import Found, find_committed, lift, look, new_tombstone, publish
from holdfast.catalog._model_index import has_model_files, settle_index
from holdfast.catalog._names import check_prefix, record_key
from holdfast.catalog._needed import Needed, needed_in, unnamed
from holdfast.catalog._survey import Folder, storage_time, survey
from holdfast.contracts import Storage
from holdfast.errors import (
    CheckpointError,
    CorruptedError,
    IncompatibleVersionError,
    NoSpaceError,
    ObjectChangedError,
    ObjectExistsError,
    ObjectNotFoundError,
    StorageError,
)
from holdfast.format import encode_record

_log = logging.getLogger("holdfast.catalog")


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A record that was taken away, and the version of the tombstone in its place, if there is one
    and it may be lifted."""

    found: Found
    tombstone: str | None


def delete_checkpoint(storage: Storage, prefix: str) -> None:
    """Delete a committed checkpoint: its record first, then those of the files it names that
    nothing else needs. The others stay until what needs them is deleted, or gc finds them
    unneeded."""
    check_prefix("prefix", prefix)
    try:
        found = find_committed(storage, prefix)
    except (CorruptedError, IncompatibleVersionError) as error:
        error.add_note("rollback removes a checkpoint that is damaged (holdfast rm --force).")
        raise
    for problem in clear_away(storage, [take_record(storage, found)]).values():
        raise problem


def take_record(storage: Storage, found: Found) -> Taken:
    """Make a checkpoint none. Its record gives way to a tombstone, in one step and only if it is
    still the one that was found: a save that replaces it at the same time either fails or is not
    deleted. ``StorageError`` if it stays. Its files are for ``clear_away``."""
    version, fences = found.info.version, found.record.fence
    return Taken(found=found, tombstone=_take_away(storage, found.prefix, version, fences))


def clear_away(
    storage: Storage, taken: Sequence[Taken], *, tombstones: Mapping[str, str] | None = None
) -> Mapping[str, StorageError]:
    """Delete the files that these records named and nothing needs, and lift the tombstones.

    One look at the storage does for all of them, since by now none is a checkpoint. Returns, by
    prefix, why something could not be removed; that of one does not keep the others.
    ``tombstones`` as for ``survey``.
    """
    known = {each.found.prefix: each.tombstone for each in taken if each.tombstone is not None}
    try:
        folders = survey(storage, storage_time(storage), tombstones={**(tombstones or {}), **known})
    except CheckpointError as error:
        return {each.found.prefix: _stays(storage, each.found.prefix, error) for each in taken}
    needed = needed_in(folders.values())
    problems: dict[str, StorageError] = {}
    for each in taken:
        prefix = each.found.prefix
        try:
            _clear(storage, each, folders.get(prefix), needed)
        except CheckpointError as error:
            problems[prefix] = _stays(storage, prefix, error)
    return problems


def _clear(storage: Storage, taken: Taken, folder: Folder | None, needed: Needed) -> None:
    prefix = taken.found.prefix
    if has_model_files(taken.found.record):
        settle_index(storage, prefix)
    _delete_named(storage, taken.found, needed)
    if taken.tombstone is not None and (folder is None or not folder.intents):
        lift(storage, prefix, taken.tombstone)


def delete_replaced(storage: Storage, replaced: Found) -> None:
    """Delete the files of a record that another has taken the place of, if nothing needs them.

    That the new one is saved does not hang on it: what cannot be deleted is left to gc.
    """
    try:
        if has_model_files(replaced.record):
            settle_index(storage, replaced.prefix)
        folders = survey(storage, storage_time(storage))
        _delete_named(storage, replaced, needed_in(folders.values()))
    except CheckpointError as error:
        _log.warning("files of the replaced %s stay until gc: %s", replaced.prefix, error)


def _delete_named(storage: Storage, gone: Found, needed: Needed) -> None:
    """Delete the files that a record named which is no more, but for those needed. Files of other
    checkpoints, too: they may have outlived their own only because this one named them.
    ``StorageError`` if it cannot be known which are needed."""
    named = [*gone.named()]
    if named:
        _refuse_blindly(needed)
    _delete_all(storage, [key for key in named if not needed.holds(key)])


def roll_back(storage: Storage, prefix: str) -> None:
    """Remove all that saves put under the prefix, committed or not, readable or not, but for
    files that others need. ``StorageError`` while a save is under way there.

    If saves were ever given up there, a tombstone stays for a week, so that none of them commits.
    """
    check_prefix("prefix", prefix)
    if next(storage.list(f"{prefix}/"), None) is None:
        return
    folder = survey(storage, storage_time(storage)).get(prefix)
    if folder is None:
        return
    if folder.foreign:
        raise StorageError(
            "this file is not holdfast's, so it stays; nothing was deleted",
            path=f"{storage.url}/{record_key(prefix)}",
        )
    if folder.alive:
        writers = ", ".join(folder.intents[attempt].writer for attempt in sorted(folder.alive))
        raise StorageError(
            f"a save is under way here ({writers}); wait for it, or for its lease to end",
            path=f"{storage.url}/{prefix}",
        )
    tombstone = _take_away(storage, prefix, _version(storage, folder), _fences(folder))
    with _gone(storage, prefix):
        if folder.has_index:
            settle_index(storage, prefix)
        needed = needed_in(survey(storage, storage_time(storage)).values(), given_up=folder.intents)
        _refuse_blindly(needed)
        shards = [
            key
            for attempt, keys in folder.shards.items()
            for key in unnamed(storage, prefix, attempt, keys, given_up=folder.intents) or ()
            if not needed.holds(key)
        ]
        _delete_all(storage, shards)
        _delete_all(storage, [intent.key for intent in folder.intents.values()])
        if tombstone is not None:
            lift(storage, prefix, tombstone)


def _fences(folder: Folder) -> int:
    """How many fences a tombstone in the place of this folder's record has to count: not 0 if
    any save was ever given up there, or may have been, or is now."""
    before = folder.found.record.fence if folder.found is not None else 0
    return before + (1 if folder.intents or folder.problem is not None else 0)


def _version(storage: Storage, folder: Folder) -> str | None:
    if folder.problem is not None:
        return storage.stat(record_key(folder.prefix)).version
    return None if folder.found is None else folder.found.info.version


def _take_away(storage: Storage, prefix: str, over: str | None, fences: int) -> str | None:
    """Put a tombstone in the place of a record. Returns its version if it may be lifted again.

    On a full disk there may be no room for one before something is deleted. There the record
    goes, exactly the one that was read, and ``None`` is returned; unless saves were given up
    here, any of which could commit once nothing is in its way.
    """
    try:
        return _bury(storage, prefix, over, fences)
    except NoSpaceError as error:
        if over is None:
            raise
        if fences:
            error.add_note(
                "Nothing was deleted. A save of this name was given up once, so a tombstone has "
                "to take the place of the record; delete another checkpoint first."
            )
            raise
        try:
            storage.delete(record_key(prefix), expected=over)
        except ObjectChangedError as changed:
            raise _changed(storage, prefix) from changed
        return None


def _bury(storage: Storage, prefix: str, over: str | None, fences: int) -> str | None:
    """Put a tombstone in the place of a record. Returns its version if it may be lifted again:
    not if saves were ever given up here, since it is what keeps them from committing."""
    tombstone = msgspec.structs.replace(new_tombstone(), fence=fences)
    try:
        version = publish(storage, prefix, encode_record(tombstone), over).version
    except (ObjectExistsError, ObjectChangedError, ObjectNotFoundError) as error:
        # A retry may find what its first try has put there, and a fence that gc added since.
        found = look(storage, prefix)
        if not isinstance(found, Found) or found.record.attempt != tombstone.attempt:
            raise _changed(storage, prefix) from error
        return None
    return None if fences else version


def _refuse_blindly(needed: Needed) -> None:
    if needed.blind:
        raise StorageError(
            f"what is in {', '.join(needed.unreadable)} cannot be read, and it may refer to them; "
            "if it is damaged, remove that with rollback (holdfast rm --force)"
        )


def _changed(storage: Storage, prefix: str) -> StorageError:
    return StorageError(
        "somebody changed this checkpoint at the same time, and what they made of it is left as "
        "it is; try again if it is still there",
        path=f"{storage.url}/{prefix}",
    )


@contextlib.contextmanager
def _gone(storage: Storage, prefix: str) -> Iterator[None]:
    """Say of an error that the checkpoint is gone all the same."""
    try:
        yield
    except CheckpointError as error:
        raise _stays(storage, prefix, error) from error


def _stays(storage: Storage, prefix: str, error: CheckpointError) -> StorageError:
    problem = StorageError(
        f"this is no checkpoint any more, but not all of its files are removed: {error.message}; "
        "gc removes what nothing needs",
        path=f"{storage.url}/{prefix}",
    )
    problem.__cause__ = error
    return problem


def _delete_all(storage: Storage, keys: Sequence[str]) -> None:
    """Delete what can be deleted; only then complain."""
    errors: list[CheckpointError] = []
    for key in keys:
        try:
            storage.delete(key)
        except ValueError:  # a record may name what no storage can hold: it is not there
            _log.debug("not to be deleted, as it cannot be: %s", key)
        except CheckpointError as error:
            errors.append(error)
    if errors:
        raise StorageError(f"{len(errors)} could not be removed, {errors[0]}") from ExceptionGroup(
            "deleting", errors
        )
