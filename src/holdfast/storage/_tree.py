"""Finds what is in the folders of a root, however deep: objects, and leftovers to sweep. Knows
names and times, not what writes them."""

import contextlib
import os
import stat as modes
from collections.abc import Iterator

from holdfast.contracts import ObjectInfo
from holdfast.storage._folders import Folders, storage_error
from holdfast.storage._new_file import RESERVED, hidden_files
from holdfast.storage._system import System

_Parts = tuple[str, ...]
_Entry = tuple[str, os.stat_result | None]


def object_info(key: str, found: os.stat_result) -> ObjectInfo:
    version = f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}"
    modified_s = found.st_mtime_ns / 1e9
    return ObjectInfo(key=key, size_bytes=found.st_size, version=version, modified_s=modified_s)


def listed(folders: Folders, prefix: str) -> Iterator[ObjectInfo]:
    """The objects whose keys start with ``prefix``, ordered by key."""
    parts = tuple(prefix.split("/")[:-1])
    if any(part in {"", ".", ".."} or part.startswith(RESERVED) for part in parts):
        return
    above = "".join(f"{part}/" for part in parts)
    open_folders = [(above, iter(_entries(folders, parts)))]
    while open_folders:
        above, entries = open_folders[-1]
        name, status = next(entries, ("", None))
        key = above + name
        if not name:
            open_folders.pop()
        elif not key.startswith(prefix):
            continue
        elif status is not None:
            yield object_info(key, status)
        else:
            inner = tuple(key.split("/")[:-1])
            open_folders.append((key, iter(_entries(folders, inner))))


def swept(system: System, folders: Folders, before_ns: int) -> int:
    """Remove hidden files to which nothing was added since, and folders that are empty."""
    removed = 0
    todo: list[tuple[_Parts, bool]] = [((), False)]
    while todo:
        parts, seen = todo.pop()
        if seen:
            folders.remove_empty(parts)
            continue
        todo.append((parts, True))
        try:
            with folders.existing(parts) as folder:
                removed += _swept_here(system, folder, before_ns)
                with os.scandir(folder) as scanned:
                    todo += [
                        ((*parts, entry.name), False) for entry in scanned if _is_folder(entry)
                    ]
        except (FileNotFoundError, NotADirectoryError):
            todo.pop()
    return removed


def _swept_here(system: System, folder: int, before_ns: int) -> int:
    removed = 0
    for entry in [*hidden_files(folder)]:
        status = _stat(entry)
        if status is not None and status.st_mtime_ns <= before_ns:
            with contextlib.suppress(FileNotFoundError):  # its writer or another sweep was faster
                system.unlink(entry.name, folder)
                removed += 1
    return removed


def _entries(folders: Folders, parts: _Parts) -> list[_Entry]:
    """The files of a folder with what they are, and its folders, whose names end with ``/``. In
    the order of the keys beneath them."""
    try:
        with folders.existing(parts) as folder, os.scandir(folder) as scanned:
            found = [
                (f"{entry.name}/", None) if _is_folder(entry) else (entry.name, _stat(entry))
                for entry in scanned
                if not entry.name.startswith(RESERVED)
            ]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        if not parts:
            raise  # the root is named by whoever lists it
        raise storage_error(error, "list the storage", "/".join(parts)) from error
    return sorted((e for e in found if e[1] is not None or e[0].endswith("/")), key=_name)


def _name(entry: _Entry) -> str:
    return entry[0]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False)


def _stat(entry: os.DirEntry[str]) -> os.stat_result | None:
    """What the file is, or ``None`` if it is no plain file or is gone."""
    try:
        found = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    return found if modes.S_ISREG(found.st_mode) else None
