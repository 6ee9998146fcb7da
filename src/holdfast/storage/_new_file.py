"""A file being written under a hidden name, and how it gets its own. Knows the order of syncs."""

import contextlib
import errno
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from holdfast.storage._folders import Folders, sync
from holdfast.storage._system import System

RESERVED = ".holdfast"
"""Names that begin so are not objects: files being written, and the lock."""

_ATTEMPTS = 20
_MILLISECOND_NS = 1_000_000
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}

_log = logging.getLogger("holdfast.storage")

Lock = Callable[[], AbstractContextManager[None]]


class NewFile:
    """Open from the start; ``close`` removes what was not published. Used by one thread.

    Only the process that made the file removes it: a forked one has but copies of descriptors.
    """

    def __init__(
        self, system: System, folders: Folders, parts: Sequence[str], *, direct: bool
    ) -> None:
        self._system = system
        self._process = os.getpid()
        self._hidden: str | None = f"{RESERVED}-{secrets.token_hex(8)}.tmp"
        for attempt in range(_ATTEMPTS):
            try:
                self._open(folders, parts, direct=direct)
            except FileNotFoundError:  # the folder was empty and somebody removed it
                if attempt == _ATTEMPTS - 1:
                    raise
            else:
                return

    def _open(self, folders: Folders, parts: Sequence[str], *, direct: bool) -> None:
        assert self._hidden is not None  # noqa: S101 -- for mypy
        self._folder = folders.open_made(parts)
        try:
            self.fd, self.direct = self._system.create_file(
                self._hidden, self._folder, direct=direct
            )
        except BaseException:
            self._system.close(self._folder)
            raise

    def seal(self, size_bytes: int) -> None:
        """Make the content durable; it is not to change any more.

        The time of modification keeps its millisecond and gets a random rest: clocks tick
        slower than files are replaced and inodes are used again, so that without it two
        versions of an object could look the same.
        """
        if os.fstat(self.fd).st_size != size_bytes:
            self._system.truncate(self.fd, size_bytes)
        tick_ns = os.fstat(self.fd).st_mtime_ns // _MILLISECOND_NS * _MILLISECOND_NS
        self._system.set_modified(self.fd, tick_ns + secrets.randbelow(_MILLISECOND_NS))
        sync(self._system, self.fd)

    def publish(self, name: str, lock: Lock) -> os.stat_result:
        """Give the sealed file its name under ``lock``, in place of what has it now. Durable on
        return."""
        hidden = self._hidden_name()
        with lock():
            try:
                self._system.rename(hidden, name, self._folder)
            except OSError:
                if not self._has(name):
                    raise
            self._hidden = None
        sync(self._system, self._folder)
        return os.fstat(self.fd)

    def publish_new(self, name: str, lock: Lock) -> os.stat_result:
        """As ``publish``, but ``FileExistsError`` if the name is taken.

        A link does that in one step. Where there are no links, look and rename under ``lock``.
        """
        try:
            self._system.link(self._hidden_name(), name, self._folder)
        except OSError as error:
            if not self._has(name):
                if error.errno not in _NO_LINKS:
                    raise
                return self.publish(name, lambda: self._free(name, lock))
        self.remove_hidden()
        sync(self._system, self._folder)
        return os.fstat(self.fd)

    def _hidden_name(self) -> str:
        if self._hidden is None:
            raise FileNotFoundError(errno.ENOENT, "the file was removed before it got its name")
        return self._hidden

    def _has(self, name: str) -> bool:
        """Whether the file got this name, though the call that was to give it failed.

        A network disk that did as it was told and lost the answer is asked again, and then says
        that the new name is taken or that the old one is gone. Taken for a failure, that would
        leave an object which its writer believes not to exist.
        """
        try:
            found = os.stat(name, dir_fd=self._folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(found, os.fstat(self.fd))

    @contextlib.contextmanager
    def _free(self, name: str, lock: Lock) -> Iterator[None]:
        with lock():
            if exists(name, self._folder):
                raise FileExistsError(errno.EEXIST, "the name is taken")
            yield

    def close(self) -> None:
        """Remove the file unless it was published. Idempotent."""
        if self.fd < 0:
            return
        try:
            self.remove_hidden()
        finally:
            fd, self.fd = self.fd, -1
            self._system.close(fd)
            self._system.close(self._folder)

    def remove_hidden(self) -> None:
        """Remove the file unless it was published, and leave it open. Idempotent.

        What cannot be removed is seen by nobody and swept one day: it must neither undo a
        publication nor hide the error that made the file useless.
        """
        hidden, self._hidden = self._hidden, None
        if hidden is None or os.getpid() != self._process:
            return
        try:
            self._system.unlink(hidden, self._folder)
        except FileNotFoundError:
            return
        except OSError as error:
            _log.warning("the hidden file %s stays until a sweep: %s", hidden, error)


def exists(name: str, folder: int) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def hidden_files(folder: int) -> Iterator[os.DirEntry[str]]:
    """What interrupted writes left in a folder, and what writes under way use."""
    with os.scandir(folder) as entries:
        yield from (
            entry
            for entry in entries
            if entry.name.startswith(f"{RESERVED}-") and entry.is_file(follow_symlinks=False)
        )
