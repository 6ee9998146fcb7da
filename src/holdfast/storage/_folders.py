"""Folders beneath a root. Knows how to reach one without following a symbolic link, and what makes
a new one durable; knows no objects."""

import contextlib
import errno
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from holdfast.errors import NoSpaceError, ObjectNotFoundError, StorageError, TransientStorageError
from holdfast.storage._system import System

_FULL = {errno.ENOSPC, errno.EDQUOT}
_PASSING = {
    *(errno.EAGAIN, errno.ESTALE, errno.ETIMEDOUT, errno.EBUSY, errno.ENFILE, errno.EMFILE),
    errno.ENOMEM,
}
_REMEMBERED = 1024

_Inode = tuple[int, int]


@contextlib.contextmanager
def translated(doing: str, path: str, *, writing: bool = False) -> Iterator[None]:
    """Turn an ``OSError`` or ``MemoryError`` of the block into the ``StorageError`` that says the
    same.

    A file that is gone is no object that is missing if it was our own, being written. Memory that
    is not to be had may be later, and says nothing of the object.
    """
    try:
        yield
    except StorageError:  # some of ours are FileNotFoundErrors too
        raise
    except OSError as error:
        if writing and error.errno == errno.ENOENT:
            raise StorageError(
                f"could not {doing}: its hidden file or its folder was removed while it was being "
                "written, by a sweep or by hand; nothing that was stored before is harmed, write "
                "it again and sweep with a longer age",
                path=path,
            ) from error
        raise storage_error(error, doing, path) from error
    except MemoryError as error:
        reason = str(error) or "there is no memory left"
        raise TransientStorageError(f"could not {doing}: {reason}", path=path) from error


def storage_error(error: OSError, doing: str, path: str) -> StorageError:
    reason = (error.strerror or str(error)).lower()
    if error.errno in _FULL:
        return NoSpaceError(
            f"could not {doing}: {reason}; nothing that was stored before is harmed, "
            "make room and try again",
            path=path,
        )
    if error.errno == errno.ENOENT:
        return ObjectNotFoundError("there is no such object", path=path)
    if error.errno == errno.ELOOP:
        return StorageError(
            f"could not {doing}: a symbolic link stands on the way, and links inside a storage "
            "are not followed",
            path=path,
        )
    if error.errno in {errno.ENOTDIR, errno.EISDIR}:
        return StorageError(
            f"could not {doing}: {reason}; on a disk a name is either an object or a folder of "
            "objects, and symbolic links are not followed",
            path=path,
        )
    kind = TransientStorageError if error.errno in _PASSING else StorageError
    return kind(f"could not {doing}: {reason}", path=path)


def sync(system: System, fd: int) -> None:
    """Make a file or folder durable. A failure is never a passing one, whatever the system calls
    it: it may have dropped what it could not write, so that a second try seems to work."""
    try:
        system.sync(fd)
    except OSError as error:
        if error.errno in _FULL:
            raise
        reason = (error.strerror or str(error)).lower()
        raise OSError(errno.EIO, f"what was written is not durable ({reason})") from error


class Folders:
    """The folders of one root. Thread-safe; holds nothing open.

    That a folder is there does not make its name durable: whoever made it may have died before
    the sync. So the first time a folder is written to, the one above it is synced. Known folders
    are remembered by inode, which misses one case: another process removes such a folder, makes
    it again with the same inode, and dies at once.
    """

    def __init__(self, root: Path, system: System) -> None:
        self._root = root
        self._system = system
        self._durable: dict[tuple[str, ...], _Inode] = {}
        self._root_is_durable = False
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def existing(self, parts: Sequence[str]) -> Iterator[int]:
        """A descriptor of the folder. ``FileNotFoundError`` if it is not there."""
        folder = self._descend(parts, make=False)
        try:
            yield folder
        finally:
            self._system.close(folder)

    def open_made(self, parts: Sequence[str]) -> int:
        """A descriptor, to be closed by the caller. Folders that are missing are made, and are
        durable before they are used."""
        self._make_root()
        return self._descend(parts, make=True)

    def _descend(self, parts: Sequence[str], *, make: bool) -> int:
        folder = self._system.open_root(str(self._root))
        for depth in range(len(parts)):
            try:
                inner = self._enter(tuple(parts[: depth + 1]), folder, make=make)
            finally:
                self._system.close(folder)
            folder = inner
        return folder

    def _enter(self, parts: tuple[str, ...], folder: int, *, make: bool) -> int:
        if not make:
            return self._system.open_folder(parts[-1], folder)
        with self._lock:
            try:
                inner = self._system.open_folder(parts[-1], folder)
            except FileNotFoundError:
                self._durable.pop(parts, None)
            else:
                if self._durable.get(parts) == _inode(inner):
                    return inner
                self._system.close(inner)
        with contextlib.suppress(FileExistsError):
            self._system.make_folder(parts[-1], folder)
        inner = self._system.open_folder(parts[-1], folder)
        try:
            sync(self._system, folder)
        except BaseException:
            self._system.close(inner)
            raise
        self._remember(parts, inner)
        return inner

    def _remember(self, parts: tuple[str, ...], folder: int) -> None:
        with self._lock:
            if len(self._durable) >= _REMEMBERED:
                self._durable.clear()
            self._durable[parts] = _inode(folder)

    def remove_empty(self, parts: Sequence[str]) -> None:
        """Remove the folder, and those above it but not the root, as long as they are empty."""
        for depth in range(len(parts), 0, -1):
            try:
                with self.existing(parts[: depth - 1]) as above, self._lock:
                    self._durable.pop(tuple(parts[:depth]), None)
                    self._system.remove_folder(parts[depth - 1], above)
            except OSError:  # not empty, or somebody else was faster: both are fine
                return

    def _make_root(self) -> None:
        if self._root_is_durable and self._root.is_dir():
            return
        missing = [path for path in (self._root, *self._root.parents) if not path.is_dir()]
        for path in reversed(missing):
            with contextlib.suppress(FileExistsError):
                self._system.make_folder(str(path))
            self._sync_above(path)
        if not missing:
            with contextlib.suppress(PermissionError):  # then it was not made by the likes of us
                self._sync_above(self._root)
        self._root_is_durable = True

    def _sync_above(self, path: Path) -> None:
        above = self._system.open_root(str(path.parent))
        try:
            sync(self._system, above)
        finally:
            self._system.close(above)


def _inode(fd: int) -> _Inode:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino
