"""Where a scratch file may lie, and the file: unlinked, and read and written past the page cache.
Knows folders, mounts and requests; not what the bytes are.
"""

import errno
import logging
import os
import secrets
import tempfile
import threading
from pathlib import Path
from typing import Final

from holdfast.storage._system import BLOCK_BYTES, System

REQUEST_BYTES: Final = 8 * 1024 * 1024
"""What is read or written at a time. Larger requests were no faster."""

_MEMORY_FILESYSTEMS: Final = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
_MOUNTS: Final = "/proc/self/mounts"

_log = logging.getLogger("holdfast.activation")


def scratch_folder(folder: str | os.PathLike[str] | None) -> str:
    """``folder``, or else the first of the temporary folders and the current one that will do.

    ``ValueError`` if there is none, or if ``folder`` is no folder that can be written to or lies
    in memory, where moving an activation to it would free nothing.
    """
    mounts = _mounts()
    if folder is not None:
        chosen = os.fsdecode(folder)
        problem = _problem(chosen, mounts)
        if problem:
            raise ValueError(f"folder must be a folder on a disk, not {chosen!r}: {problem}")
        return chosen
    tried = dict.fromkeys([tempfile.gettempdir(), "/var/tmp", str(Path.cwd())])  # noqa: S108
    problems = {each: _problem(each, mounts) for each in tried}
    for each, problem in problems.items():
        if not problem:
            return each
    told = "; ".join(f"{each}: {problem}" for each, problem in problems.items())
    raise ValueError(f"no folder for the disk tier was found ({told}): pass folder=")


def filesystem_of(path: str, mounts: str) -> str:
    """The type of the filesystem ``path`` lies on, by a table in the form of ``/proc/mounts``;
    empty if the table does not say. ``path`` is absolute and has no links in it."""
    found, longest = "", -1
    for line in mounts.splitlines():
        _, point, kind, *_ = line.split(" ")
        point = point.encode("latin-1", "backslashreplace").decode("unicode_escape")
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= longest:  # of two on one place the later hides the earlier
            found, longest = kind, len(point)
    return found


def _mounts() -> str:
    try:
        return Path(_MOUNTS).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:  # not Linux: nobody tells, and temporary folders lie on disks there
        return ""


def _problem(folder: str, mounts: str) -> str:
    if not Path(folder).is_dir():
        return "it is a file" if Path(folder).exists() else "there is no such folder"
    if not os.access(folder, os.W_OK | os.X_OK):
        return "it cannot be written to"
    kind = filesystem_of(os.path.realpath(folder), mounts)
    return f"{kind} is memory" if kind in _MEMORY_FILESYSTEMS else ""


class ScratchFile:
    """A file without a name, gone with its last user, also if the process is killed.

    Reads and writes are direct; where the filesystem refuses that, they are buffered and what
    they leave in the page cache is dropped. Thread-safe for requests that do not overlap; only
    the process that made it may write.
    """

    def __init__(self, folder: str, system: System | None = None) -> None:
        self._system = System() if system is None else system
        name = f".holdfast-scratch-{secrets.token_hex(8)}"
        inside = self._system.open_root(folder)
        try:
            self._fd, self._direct = self._system.create_file(name, inside, direct=True)
            self._system.unlink(name, inside)
        except OSError as error:
            raise ValueError(
                f"folder must be a folder on a disk, not {folder!r}: no file can be made in it "
                f"({error.strerror})"
            ) from error
        finally:
            self._system.close(inside)
        self._lock = threading.Lock()
        self._process = os.getpid()
        if not self._direct:
            self._go_buffered()

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of ``data``: whole blocks, from aligned memory, to an aligned offset."""
        while data:
            written = self._request(write=True, memory=data, offset=offset)
            if written <= 0 or (self._direct and written % BLOCK_BYTES):
                raise OSError(errno.EIO, "the disk took a part of a block")
            data, offset = data[written:], offset + written

    def read(self, into: memoryview, offset: int) -> None:
        """Fill ``into``, of which all is true that is of ``data`` above."""
        while into:
            got = self._request(write=False, memory=into, offset=offset)
            if got <= 0 or (self._direct and got % BLOCK_BYTES):
                raise OSError(errno.EIO, f"the scratch file ends at byte {offset + got}")
            into, offset = into[got:], offset + got

    def uncache(self, offset: int, size: int, *, written: bool) -> None:
        """See to it that the page cache keeps nothing of a stretch."""
        if self._direct:
            return
        if written:
            os.fdatasync(self._fd)  # what is not on the disk yet cannot be dropped
        os.posix_fadvise(self._fd, offset, size, os.POSIX_FADV_DONTNEED)

    def shorten(self, size: int) -> None:
        """Give what lies behind ``size`` back to the disk."""
        # A forked process has the same file as the one it came from.
        if os.getpid() == self._process and os.fstat(self._fd).st_size > size:
            self._system.truncate(self._fd, size)

    def close(self) -> None:
        """Idempotent. Nobody may be reading or writing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._system.close(fd)

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close()

    def _request(self, *, write: bool, memory: memoryview, offset: int) -> int:
        call = self._system.write if write else self._system.read
        direct = self._direct
        try:
            return call(self._fd, memory, offset)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
        with self._lock:
            if self._direct:
                self._system.make_buffered(self._fd)
                self._direct = False
                self._go_buffered()
        return call(self._fd, memory, offset)

    def _go_buffered(self) -> None:
        # Else the system reads on behind what is asked for, and nobody would drop that.
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)
        _log.info(
            "the filesystem of the disk tier takes no direct I/O: it is written through the page "
            "cache, which is then dropped; another folder= may be faster"
        )
