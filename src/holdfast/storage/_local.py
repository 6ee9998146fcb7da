"""A storage on a disk of this machine, or one mounted here. Knows files and folders, not tensors.

An object is written under a hidden name, synced, and only then given its own name:

    write -> fsync file -> rename (or link, where nothing may be replaced) -> fsync folder

so that a crash at any moment leaves the object as it was or as it was to be. A file whose fsync
failed is never synced again, because the kernel has called its pages clean by then: it is removed,
and the caller writes another.
"""

import contextlib
import os
import stat as modes
from collections.abc import Iterator, Sequence
from pathlib import Path

from holdfast import _checks
from holdfast.contracts import Data, ObjectInfo, ReadRange
from holdfast.errors import ObjectChangedError, ObjectExistsError, ObjectNotFoundError, StorageError
from holdfast.storage._disk_threads import DiskThreads
from holdfast.storage._file_sink import FileSink
from holdfast.storage._folders import Folders, sync, translated
from holdfast.storage._new_file import RESERVED, NewFile
from holdfast.storage._ordered import OrderedWriter, announced
from holdfast.storage._ranges import check_ranges, small
from holdfast.storage._root_lock import RootLock
from holdfast.storage._streams import IN_FLIGHT, WriteStream, file_buffers, read_ranges, write_all
from holdfast.storage._system import System
from holdfast.storage._tree import listed, object_info, swept

_DIRECT_FROM_BYTES = 1024 * 1024


class LocalStorage:
    """``contracts.Storage`` in a folder. Made when first written to; may be shared by processes.

    Large objects are written and read past the page cache where the filesystem allows it; what is
    in it already is read from it.
    Symbolic links inside the root are not followed. Files are made readable as the umask allows
    and writable by their owner alone. ``replace``, and ``delete`` of one version, compare under a
    lock on the root that every ``LocalStorage`` of that root respects, in any process; where the
    filesystem has no locks they raise ``StorageError``. A name is either an object or a folder of
    objects. A writer that is forgotten is aborted when it is collected, or the interpreter ends.
    """

    def __init__(self, root: str | os.PathLike[str], *, system: System | None = None) -> None:
        path = os.fsdecode(root)
        if not path or "\0" in path:
            raise ValueError(f"root must be the path of a folder, not {root!r}")
        self._root = Path(os.path.realpath(path))  # as resolve(), also if links go in circles
        self._system = System() if system is None else system
        self._folders = Folders(self._root, self._system)
        self._lock = RootLock(self._system, self._folders, self.url)
        self._buffers = file_buffers()
        self._disk = DiskThreads(IN_FLIGHT)

    def __repr__(self) -> str:
        return f"LocalStorage({self.url!r})"

    @property
    def url(self) -> str:
        return self._root.as_uri()

    def open_writer(self, key: str, *, size_bytes: int | None = None) -> OrderedWriter:
        parts, name = _place(key)
        announced(size_bytes)
        direct = size_bytes is None or size_bytes >= _DIRECT_FROM_BYTES
        with translated("write the object", key, writing=True):
            file = NewFile(self._system, self._folders, parts, direct=direct)
            try:
                self._system.allocate(file.fd, size_bytes or 0)
            except BaseException:
                file.close()
                raise
        stream = WriteStream(self._system, file.fd, direct=file.direct, buffers=self._buffers)
        sink = FileSink(
            key, file, stream, publish=lambda: object_info(key, file.publish(name, self._lock.held))
        )
        return OrderedWriter(key, sink, size_bytes=size_bytes)

    def create(self, key: str, data: Data) -> ObjectInfo:
        _, name = _place(key)
        with self._written(key, data) as file, translated("create the object", key, writing=True):
            try:
                return object_info(key, file.publish_new(name, self._lock.needed))
            except FileExistsError:
                raise ObjectExistsError("the key is taken", path=key) from None

    def replace(self, key: str, data: Data, expected: str) -> ObjectInfo:
        _, name = _place(key)
        self._check_version(key, expected)  # before anything is written for nothing
        with self._written(key, data) as file, translated("replace the object", key, writing=True):
            return object_info(key, file.publish(name, lambda: self._unchanged(key, expected)))

    def read(self, key: str) -> bytes:
        with self._opened(key) as (fd, info), translated("read the object", key):
            data = bytearray(info.size_bytes)
            self._fill(key, fd, [ReadRange(start=0, into=memoryview(data))])
            return bytes(data)

    def read_into(self, key: str, ranges: Sequence[ReadRange]) -> None:
        with self._opened(key) as (fd, info):
            check_ranges(ranges, info.size_bytes, key)
            self._fill(key, fd, ranges)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        with translated("list the storage", prefix or self.url):
            return iter([*listed(self._folders, prefix)])

    def stat(self, key: str) -> ObjectInfo:
        with self._opened(key) as (_, info):
            return info

    def delete(self, key: str, *, expected: str | None = None) -> None:
        parts, name = _place(key)
        with translated("delete the object", key):
            try:
                with self._folders.existing(parts) as folder:
                    self._delete(key, name, folder, expected)
                    sync(self._system, folder)  # also if another removed it, and then died
            except (FileNotFoundError, NotADirectoryError):
                return
        self._folders.remove_empty(parts)

    def free_bytes(self) -> int | None:
        with translated("ask for the free space", self.url):
            nearest = next(path for path in (self._root, *self._root.parents) if path.exists())
            found = os.statvfs(nearest)
        return found.f_bavail * found.f_frsize

    def sweep(self, older_than_s: float) -> int:
        _checks.seconds("older_than_s", older_than_s, zero=True)
        if not self._root.is_dir():
            return 0
        with translated("sweep the storage", self.url):
            probe = NewFile(self._system, self._folders, (), direct=False)
            try:
                now_ns = os.fstat(probe.fd).st_mtime_ns
            finally:
                probe.close()
            return swept(self._system, self._folders, now_ns - int(older_than_s * 1e9))

    @contextlib.contextmanager
    def _written(self, key: str, data: Data) -> Iterator[NewFile]:
        """A sealed file of ``data`` beside where the object is to be."""
        view = small(_checks.data("data", data), key)
        parts, _ = _place(key)
        with translated("write the object", key, writing=True):
            file = NewFile(self._system, self._folders, parts, direct=False)
        try:
            with translated("write the object", key, writing=True):
                write_all(self._system, file.fd, view, 0)
                file.seal(len(view))
            yield file
        finally:
            file.close()

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int, ObjectInfo]]:
        parts, name = _place(key)
        with translated("read the object", key):
            try:
                with self._folders.existing(parts) as folder:
                    fd = self._system.open_file(name, folder)
            except NotADirectoryError:
                raise ObjectNotFoundError("there is no such object", path=key) from None
        try:
            with translated("read the object", key):
                found = os.fstat(fd)
            if modes.S_ISDIR(found.st_mode):
                raise ObjectNotFoundError("there is no such object", path=key)
            if not modes.S_ISREG(found.st_mode):
                raise StorageError("this is no plain file", path=key)
            yield fd, object_info(key, found)
        finally:
            self._system.close(fd)

    def _fill(self, key: str, fd: int, ranges: Sequence[ReadRange]) -> None:
        size = sum(wanted.into.nbytes for wanted in ranges)
        with translated("read the object", key):
            try:
                read_ranges(
                    self._system,
                    fd,
                    ranges,
                    past_cache=size >= _DIRECT_FROM_BYTES,
                    uncached=any(wanted.uncached for wanted in ranges),
                    buffers=self._buffers,
                    disk=self._disk,
                )
            except EOFError as error:
                raise StorageError(
                    f"the object was cut while it was read: {error}", path=key
                ) from error

    def _check_version(self, key: str, expected: str) -> None:
        _require(key, self.stat(key).version, expected)

    @contextlib.contextmanager
    def _unchanged(self, key: str, expected: str) -> Iterator[None]:
        with self._lock.needed():
            self._check_version(key, expected)
            yield

    def _delete(self, key: str, name: str, folder: int, expected: str | None) -> None:
        with contextlib.suppress(FileNotFoundError):
            if modes.S_ISDIR(_look(name, folder).st_mode):
                return
            with self._lock.held(needed=expected is not None):
                if expected is not None:
                    _require(key, object_info(key, _look(name, folder)).version, expected)
                self._system.unlink(name, folder)


def _place(key: str) -> tuple[tuple[str, ...], str]:
    """The folders and the file name of a key."""
    *parts, name = _checks.key("key", key).split("/")
    if any(part.startswith(RESERVED) for part in (*parts, name)):
        raise ValueError(f"key must not have a part that begins with {RESERVED!r}, as {key!r} has")
    return tuple(parts), name


def _look(name: str, folder: int) -> os.stat_result:
    return os.stat(name, dir_fd=folder, follow_symlinks=False)


def _require(key: str, found: str, expected: str) -> None:
    if found != expected:
        raise ObjectChangedError(f"expected version {expected}, found {found}", path=key)
