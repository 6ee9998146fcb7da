"""Which store on a disk the checkpoint at a path is in, where it does not say. Knows lock files and
records."""

from pathlib import Path

from holdfast.catalog._committed import Found, look
from holdfast.contracts import Storage
from holdfast.errors import CheckpointError, ObjectNotFoundError
from holdfast.storage import LocalStorage
from holdfast.storage._roots import roots_above


def store_of(path: Path) -> Path:
    """Where the store begins: in the folder above the checkpoint, or in one further up that has a
    lock file, if that is where the files are that it refers to. ``path`` is without links."""
    folder = path.parent
    stores = [*roots_above(path)]
    if folder in stores or not stores:
        return folder
    try:
        found = look(LocalStorage(folder), path.name)
        if isinstance(found, Found) and found.is_committed:
            roots = (folder, *stores)
            return next((at for at in roots if has_files(LocalStorage(at), found)), folder)
    except CheckpointError:
        pass  # who reads it says what is wrong with it
    return folder


def has_files(storage: Storage, found: Found) -> bool:
    """Whether one file of every other checkpoint that the record refers to is there."""
    others = {file.prefix: file.name for file in found.record.files if file.prefix is not None}
    for prefix, name in others.items():
        try:
            storage.stat(f"{prefix}/{name}")
        except (ObjectNotFoundError, ValueError):
            return False
    return True
