"""The calls that reach the disk, in one place. Knows no keys and no order; tests put a recorder or
a failing disk here.

Names are single file names inside an open folder, so that no call can be led out of it by a
symbolic link that somebody swaps in.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import struct
import sys
from collections.abc import Iterator, Sequence

BLOCK_BYTES = 4096
"""What direct I/O aligns memory, offsets and sizes to. Every disk sold divides it."""

_DIRECT = getattr(os, "O_DIRECT", 0)
_FILE_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NOT_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP}
_NOT_OFFERED = {errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EPERM}

_fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
if _fallocate is not None:
    _fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]

_CACHESTAT = 451
"""Its number on the processors that torch runs on, as that of all calls newer than 2019."""

_syscall = getattr(ctypes.CDLL(None), "syscall", None) if sys.platform == "linux" else None
if _syscall is not None:
    _words = ctypes.POINTER(ctypes.c_uint64)
    _syscall.argtypes = [ctypes.c_long, ctypes.c_long, _words, _words, ctypes.c_long]
    _syscall.restype = ctypes.c_long


class System:
    """The operating system. Raises ``OSError`` as it does, and hides interrupted calls only."""

    def open_root(self, path: str) -> int:
        return os.open(path, _FOLDER_FLAGS)

    def open_folder(self, name: str, folder: int) -> int:
        return os.open(name, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=folder)

    def make_folder(self, name: str, folder: int | None = None) -> None:
        os.mkdir(name, 0o755, dir_fd=folder)

    def remove_folder(self, name: str, folder: int) -> None:
        os.rmdir(name, dir_fd=folder)

    def open_file(self, name: str, folder: int) -> int:
        """Open for reading, through the page cache."""
        return os.open(name, os.O_RDONLY | _FILE_FLAGS, dir_fd=folder)

    def create_file(self, name: str, folder: int, *, direct: bool = False) -> tuple[int, bool]:
        """Create a new file for writing: by its owner only, readable as the umask allows. Also
        says whether it is open for direct I/O, which is tried if wanted."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _FILE_FLAGS
        if direct and _DIRECT:
            try:
                return os.open(name, flags | _DIRECT, 0o644, dir_fd=folder), True
            except OSError as error:
                if error.errno not in _NOT_DIRECT:
                    raise
                with contextlib.suppress(FileNotFoundError):  # some make the file and then refuse
                    self.unlink(name, folder)
        return os.open(name, flags, 0o644, dir_fd=folder), False

    def open_lock(self, name: str, folder: int) -> int:
        """Open a file that is only ever locked, by anybody the umask lets write."""
        return os.open(name, os.O_RDWR | os.O_CREAT | _FILE_FLAGS, 0o666, dir_fd=folder)

    def is_cached(self, fd: int, offset: int, size: int) -> bool:
        """Whether the page cache has all of these bytes of an open file. ``False`` where that
        cannot be known: before Linux 6.5, on overlayfs, or of a file that one may not write."""
        if _syscall is None:
            return False
        wanted, found = (ctypes.c_uint64 * 2)(offset, size), (ctypes.c_uint64 * 5)()
        if _syscall(_CACHESTAT, fd, wanted, found, 0) != 0:
            return False
        pages = -(-(offset + size) // mmap.PAGESIZE) - offset // mmap.PAGESIZE
        return found[0] >= pages

    def make_direct(self, fd: int) -> bool:
        """Go past the page cache from here on, and say whether this file can be read so."""
        if not _DIRECT:
            return False
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | _DIRECT)
        except OSError as error:
            if error.errno not in _NOT_DIRECT:
                raise
            return False
        return True

    def make_buffered(self, fd: int) -> None:
        """Give up direct I/O on an open file."""
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~_DIRECT)

    def close(self, fd: int) -> None:
        """Release a descriptor. What a close complains of was read, or synced before, or is to be
        thrown away; and it has released the descriptor all the same."""
        try:
            os.close(fd)
        except OSError as error:
            if error.errno == errno.EBADF:
                raise

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        return self.read_parts(fd, [into], offset)

    def read_parts(self, fd: int, into: Sequence[memoryview], offset: int) -> int:
        """Read what follows each other in a file to several places, at once."""
        return os.preadv(fd, into, offset)

    def allocate(self, fd: int, size: int) -> None:
        """Reserve room where the filesystem can; ENOSPC where there is none. Never by writing."""
        if _fallocate is None or not size:
            return
        while _fallocate(fd, 0, 0, size) != 0:
            code = ctypes.get_errno()
            if code in _NOT_OFFERED:
                return
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def set_modified(self, fd: int, modified_ns: int) -> None:
        os.utime(fd, ns=(modified_ns, modified_ns))

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def rename(self, old: str, new: str, folder: int) -> None:
        os.rename(old, new, src_dir_fd=folder, dst_dir_fd=folder)

    def link(self, old: str, new: str, folder: int) -> None:
        os.link(old, new, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)

    def unlink(self, name: str, folder: int) -> None:
        os.unlink(name, dir_fd=folder)

    @contextlib.contextmanager
    def locked(self, fd: int) -> Iterator[None]:
        """Hold the only lock on an open file, against other threads as well as processes.

        ``OSError`` where the filesystem has no locks. Closing another descriptor of the same
        file does not drop it, as it would with plain POSIX locks.
        """
        _lock(fd, fcntl.F_WRLCK)
        try:
            yield
        finally:
            _lock(fd, fcntl.F_UNLCK)


def _lock(fd: int, kind: int) -> None:
    command = getattr(fcntl, "F_OFD_SETLKW", None)
    if command is None:  # not Linux: flock belongs to the open file too
        fcntl.flock(fd, fcntl.LOCK_EX if kind == fcntl.F_WRLCK else fcntl.LOCK_UN)
        return
    fcntl.fcntl(fd, command, struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0))
