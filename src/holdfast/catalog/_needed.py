"""What must not be deleted, because a committed checkpoint or a save needs it. Deletes nothing.

Whoever wants to refer to another checkpoint's files says so in an intent first, and then looks
whether that checkpoint is still committed. Whoever deletes takes the commit record away first,
and then looks for intents. So one of the two always sees the other.

A folder of a store may be a store of its own. What a record names is a name in the store that it
was saved in, and that may begin in any folder above the checkpoint: inside of this store, or above.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from holdfast.catalog._committed import find_record
from holdfast.catalog._names import intent_name
from holdfast.catalog._survey import Folder
from holdfast.contracts import Storage
from holdfast.errors import ObjectNotFoundError


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """Keys that records name, and prefixes that saves may refer to. ``unreadable`` are prefixes
    whose record or intent could not be read: nobody knows then what it refers to, so everything
    is needed."""

    keys: frozenset[str]
    prefixes: frozenset[str]
    unreadable: tuple[str, ...]

    @property
    def blind(self) -> bool:
        return bool(self.unreadable)

    def holds(self, key: str) -> bool:
        return self.blind or key in self.keys or key.rpartition("/")[0] in self.prefixes


def needed_in(folders: Iterable[Folder], *, given_up: Collection[str] = ()) -> Needed:
    """What must stay. A save that is not alive may still wake up and commit, and so needs what it
    refers to, until it is fenced off: the attempts ``given_up`` are."""
    folders = list(folders)
    return Needed(
        keys=frozenset(
            meant
            for folder in folders
            for key in folder.named()
            for meant in _meanings(key, folder.prefix)
        ),
        prefixes=frozenset(
            meant
            for folder in folders
            for attempt, intent in folder.intents.items()
            if attempt not in given_up
            for prefix in intent.refers
            for meant in _meanings(prefix, folder.prefix)
        ),
        unreadable=tuple(
            folder.prefix
            for folder in folders
            if folder.problem is not None or not folder.unknown.issubset(given_up)
        ),
    )


def _meanings(name: str, prefix: str) -> Iterator[str]:
    """What a name may mean here that is in the record or the intent of ``prefix``: one for each
    folder in which the store of that may begin. Files have names like no other's, so that at most
    one of these is there."""
    yield name
    for at, letter in enumerate(prefix):
        if letter == "/":  # it began in a folder of this one
            yield f"{prefix[:at]}/{name}"
    for at, letter in enumerate(name):
        if letter == "/":  # this one is a folder of it
            yield name[at + 1 :]


def unnamed(
    storage: Storage, prefix: str, attempt: str, keys: Sequence[str], *, given_up: Collection[str]
) -> list[str] | None:
    """Those of an attempt's files that no commit names, or ``None`` if it may yet commit them.

    A listing is no snapshot: a save may have announced itself, or committed, since.
    """
    if attempt in given_up or not keys:
        return [*keys]
    try:
        storage.stat(f"{prefix}/{intent_name(attempt)}")
    except ObjectNotFoundError:
        found = find_record(storage, prefix)
        if found is None or not found.is_committed:
            return [*keys]
        files = (file for file in found.record.files if file.prefix in {None, prefix})
        named = {name for file in files for name in file.names}
        return [key for key in keys if key.removeprefix(f"{prefix}/") not in named]
    return None
