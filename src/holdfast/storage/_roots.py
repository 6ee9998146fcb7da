"""Where stores on a disk begin. Knows the lock file of a root, and no objects."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import unquote_to_bytes, urlsplit

from holdfast.contracts import Storage
from holdfast.storage._new_file import RESERVED

ROOT_MARK: Final = f"{RESERVED}.lock"
"""What a disk's root has, once anything was written to it; see docs/storage.md."""


def roots_above(folder: Path) -> Iterator[Path]:
    """The folders above this one, without links, in which there is a store; the nearest first."""
    return (above for above in folder.parents if _is_root(above))


def folder_of(storage: Storage) -> Path | None:
    """Where a storage begins, without links, if it is on a disk."""
    url = urlsplit(storage.url)
    return Path(os.fsdecode(unquote_to_bytes(url.path))) if url.scheme == "file" else None


def is_in_another(storage: Storage, folder: str) -> bool:
    """Whether a folder of a store is, or is inside of, a folder that others use as a store of its
    own. Not known of what is on no disk: ``False``."""
    at = folder_of(storage)
    if at is None:
        return False
    for name in folder.split("/"):
        at /= name
        if _is_root(at):
            return True
    return False


def _is_root(folder: Path) -> bool:
    return os.path.exists(folder / ROOT_MARK)  # noqa: PTH110 -- it raises nothing
