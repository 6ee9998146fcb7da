"""The one lock of a root. Knows the lock's file, and disks that have no locks; knows no objects."""

import contextlib
import errno
from collections.abc import Iterator

from holdfast.errors import StorageError
from holdfast.storage._folders import Folders
from holdfast.storage._roots import ROOT_MARK
from holdfast.storage._system import System

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}


class RootLock:
    """Keeps changes of names out of comparisons, in this process and in others. Thread-safe.

    ``FileNotFoundError`` where the root is not there.
    """

    def __init__(self, system: System, folders: Folders, url: str) -> None:
        self._system = system
        self._folders = folders
        self._url = url

    @contextlib.contextmanager
    def held(self, *, needed: bool = False) -> Iterator[None]:
        """Keep out of a comparison under way. Where there are no locks there are no comparisons,
        so whoever needs none goes on without."""
        with self._opened() as fd, contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._system.locked(fd))
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                if needed:
                    raise StorageError(
                        "this filesystem has no locks, and without one nothing can be compared "
                        f"and changed in one step ({error.strerror}); nothing was changed",
                        path=self._url,
                    ) from error
            yield

    def needed(self) -> contextlib.AbstractContextManager[None]:
        """For a comparison: ``StorageError`` where there are no locks."""
        return self.held(needed=True)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        with self._folders.existing(()) as root:
            fd = self._system.open_lock(ROOT_MARK, root)
        try:
            yield fd
        finally:
            self._system.close(fd)
