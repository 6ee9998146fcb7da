"""Folders beneath a root. Knows how to reach one without following a symbolic link, and what makes
a new one durable; knows no objects."""

import contextlib
import errno
from collections.abc import Iterator, Sequence
from pathlib import Path

from holdfast.errors import NoSpaceError, ObjectNotFoundError, StorageError, TransientStorageError
from holdfast.storage._system import System

_FULL = {errno.ENOSPC, errno.EDQUOT}
_PASSING = {errno.EAGAIN, errno.ESTALE, errno.ETIMEDOUT, errno.EBUSY, errno.ENFILE, errno.EMFILE}


@contextlib.contextmanager
def translated(doing: str, path: str) -> Iterator[None]:
    """Turn an ``OSError`` of the block into the ``StorageError`` that says the same."""
    try:
        yield
    except StorageError:  # some of ours are FileNotFoundErrors too
        raise
    except OSError as error:
        raise storage_error(error, doing, path) from error


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
            "objects",
            path=path,
        )
    kind = TransientStorageError if error.errno in _PASSING else StorageError
    return kind(f"could not {doing}: {reason}", path=path)


class Folders:
    """The folders of one root. Thread-safe; holds nothing open."""

    def __init__(self, root: Path, system: System) -> None:
        self._root = root
        self._system = system

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
        for part in parts:
            try:
                inner = self._enter(part, folder, make=make)
            finally:
                self._system.close(folder)
            folder = inner
        return folder

    def _enter(self, part: str, folder: int, *, make: bool) -> int:
        try:
            return self._system.open_folder(part, folder)
        except FileNotFoundError:
            if not make:
                raise
        with contextlib.suppress(FileExistsError):
            self._system.make_folder(part, folder)
        self._system.sync(folder)
        return self._system.open_folder(part, folder)

    def remove_empty(self, parts: Sequence[str]) -> None:
        """Remove the folder, and those above it but not the root, as long as they are empty."""
        for depth in range(len(parts), 0, -1):
            try:
                with self.existing(parts[: depth - 1]) as above:
                    self._system.remove_folder(parts[depth - 1], above)
            except OSError:  # not empty, or somebody else was faster: both are fine
                return

    def _make_root(self) -> None:
        missing = [path for path in (self._root, *self._root.parents) if not path.is_dir()]
        for path in reversed(missing):
            with contextlib.suppress(FileExistsError):
                self._system.make_folder(str(path))
            above = self._system.open_root(str(path.parent))
            try:
                self._system.sync(above)
            finally:
                self._system.close(above)
