"""Which store on a disk a checkpoint's path is in, where it does not say. Knows lock files and
records.

A folder without a lock file that has checkpoints is a part of the store whose lock file is above
it: names in their records are names in that one, and others there may refer to their files.
"""

from pathlib import Path

from holdfast.catalog._committed import Found, look
from holdfast.contracts import COMMIT_RECORD, Storage
from holdfast.errors import CheckpointError, ObjectNotFoundError
from holdfast.storage import LocalStorage
from holdfast.storage._roots import roots_above


def store_to_write(path: Path) -> Path:
    """Where the store of a checkpoint that is to be saved there begins: in the folder above, if
    that is not a part of another. ``path`` is without links."""
    folder = path.parent
    store = next(roots_above(path), folder)
    return store if any(folder.glob(f"*/{COMMIT_RECORD}")) else folder


def store_to_read(path: Path) -> Path:
    """Where the store of the checkpoint there begins: in the folder above, or in one further up
    that has a lock file, if that is where the files are that it refers to."""
    folder = path.parent
    stores = [*roots_above(path)]
    if folder in stores or not stores:
        return folder
    try:
        found = look(LocalStorage(folder), path.name)
    except CheckpointError:
        return folder  # who reads it says what is wrong with it
    if not isinstance(found, Found) or not found.is_committed:
        return folder
    return next((at for at in (folder, *stores) if has_files(LocalStorage(at), found)), folder)


def has_files(storage: Storage, found: Found) -> bool:
    """Whether one file of every other checkpoint that the record refers to is there."""
    others = {file.prefix: file.name for file in found.record.files if file.prefix is not None}
    for prefix, name in others.items():
        try:
            storage.stat(f"{prefix}/{name}")
        except (ObjectNotFoundError, ValueError):
            return False
    return True
