"""A storage on a disk of this machine, or one mounted here. Knows files and folders, not tensors.

An object is written under a hidden name, synced, and only then given its own name:

    write -> fsync file -> rename (or link, where nothing may be replaced) -> fsync folder

so that a crash at any moment leaves the object as it was or as it was to be. A file whose fsync
failed is never synced again, because the kernel has called its pages clean by then: it is removed,
and the caller writes another.
"""

import contextlib
import errno
import os
import stat as modes
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from holdfast import _checks
from holdfast.contracts import Data, ObjectInfo, ReadRange
from holdfast.errors import ObjectChangedError, ObjectExistsError, ObjectNotFoundError, StorageError
from holdfast.storage._folders import Folders, sync, translated
from holdfast.storage._new_file import RESERVED, NewFile, hidden_files
from holdfast.storage._ordered import OrderedWriter
from holdfast.storage._ranges import check_ranges, small
from holdfast.storage._streams import Buffers, WriteStream, read_ranges, write_all
from holdfast.storage._system import System

_LOCK = f"{RESERVED}.lock"
_DIRECT_FROM_BYTES = 1024 * 1024
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}


class LocalStorage:
    """``contracts.Storage`` in a folder. Made when first written to; may be shared by processes.

    Large objects are written and read past the page cache where the filesystem allows it.
    Symbolic links inside the root are not followed. Files are made readable as the umask allows
    and writable by their owner alone. ``replace`` compares under a lock on the root that every
    ``LocalStorage`` of that root respects, in any process; where the filesystem has no locks it
    raises ``StorageError``. A name is either an object or a folder of objects.
    """

    def __init__(self, root: str | os.PathLike[str], *, system: System | None = None) -> None:
        path = os.fsdecode(root)
        if not path or "\0" in path:
            raise ValueError(f"root must be the path of a folder, not {root!r}")
        self._root = Path(path).resolve()
        self._system = System() if system is None else system
        self._folders = Folders(self._root, self._system)
        self._buffers = Buffers()

    @property
    def url(self) -> str:
        return self._root.as_uri()

    def open_writer(self, key: str, *, size_bytes: int | None = None) -> OrderedWriter:
        parts, name = _place(key)
        if size_bytes is not None:
            _checks.count("size_bytes", size_bytes, least=0)
        direct = size_bytes is None or size_bytes >= _DIRECT_FROM_BYTES
        with translated("write the object", key):
            file = NewFile(self._system, self._folders, parts, direct=direct)
            try:
                self._system.allocate(file.fd, size_bytes or 0)
            except BaseException:
                file.close()
                raise
        stream = WriteStream(self._system, file.fd, direct=file.direct, buffers=self._buffers)
        sink = _FileSink(
            key, file, stream, publish=lambda: _info(key, file.publish(name, self._lock))
        )
        return OrderedWriter(key, sink, size_bytes=size_bytes)

    def create(self, key: str, data: Data) -> ObjectInfo:
        _, name = _place(key)
        with self._written(key, data) as file, translated("create the object", key):
            try:
                return _info(key, file.publish_new(name, self._needed_lock))
            except FileExistsError:
                raise ObjectExistsError("the key is taken", path=key) from None

    def replace(self, key: str, data: Data, expected: str) -> ObjectInfo:
        _, name = _place(key)
        self._check_version(key, expected)  # before anything is written for nothing
        with self._written(key, data) as file, translated("replace the object", key):
            return _info(key, file.publish(name, lambda: self._unchanged(key, expected)))

    def read(self, key: str) -> bytes:
        with self._opened(key, direct=True) as (fd, direct, info):
            data = bytearray(info.size_bytes)
            self._fill(key, fd, [ReadRange(start=0, into=memoryview(data))], direct=direct)
            return bytes(data)

    def read_into(self, key: str, ranges: Sequence[ReadRange]) -> None:
        with self._opened(key, direct=True) as (fd, direct, info):
            check_ranges(ranges, info.size_bytes, key)
            self._fill(key, fd, ranges, direct=direct)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        parts = tuple(prefix.split("/")[:-1])
        if any(part in {"", ".", ".."} or part.startswith(RESERVED) for part in parts):
            return iter(())
        with translated("list the storage", prefix):
            return iter([*self._listed(parts, prefix)])

    def stat(self, key: str) -> ObjectInfo:
        with self._opened(key) as (_, _, info):
            return info

    def delete(self, key: str) -> None:
        parts, name = _place(key)
        with translated("delete the object", key):
            try:
                with self._folders.existing(parts) as folder:
                    self._delete(name, folder)
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
            return self._swept((), now_ns - int(older_than_s * 1e9))

    @contextlib.contextmanager
    def _written(self, key: str, data: Data) -> Iterator[NewFile]:
        """A sealed file of ``data`` beside where the object is to be."""
        view = small(_checks.data("data", data), key)
        parts, _ = _place(key)
        with translated("write the object", key):
            file = NewFile(self._system, self._folders, parts, direct=False)
        try:
            with translated("write the object", key):
                write_all(self._system, file.fd, view, 0)
                file.seal(len(view))
            yield file
        finally:
            file.close()

    @contextlib.contextmanager
    def _opened(self, key: str, *, direct: bool = False) -> Iterator[tuple[int, bool, ObjectInfo]]:
        parts, name = _place(key)
        with translated("read the object", key):
            try:
                with self._folders.existing(parts) as folder:
                    fd, direct = self._system.open_file(name, folder, direct=direct)
            except NotADirectoryError:
                raise ObjectNotFoundError("there is no such object", path=key) from None
        try:
            with translated("read the object", key):
                found = os.fstat(fd)
            if modes.S_ISDIR(found.st_mode):
                raise ObjectNotFoundError("there is no such object", path=key)
            if not modes.S_ISREG(found.st_mode):
                raise StorageError("this is no plain file", path=key)
            yield fd, direct, _info(key, found)
        finally:
            self._system.close(fd)

    def _fill(self, key: str, fd: int, ranges: Sequence[ReadRange], *, direct: bool) -> None:
        with translated("read the object", key):
            if direct and sum(wanted.into.nbytes for wanted in ranges) < _DIRECT_FROM_BYTES:
                self._system.make_buffered(fd)
                direct = False
            try:
                read_ranges(self._system, fd, ranges, direct=direct, buffers=self._buffers)
            except EOFError as error:
                raise StorageError(
                    f"the object was cut while it was read: {error}", path=key
                ) from error

    def _check_version(self, key: str, expected: str) -> None:
        found = self.stat(key).version
        if found != expected:
            raise ObjectChangedError(f"expected version {expected}, found {found}", path=key)

    def _delete(self, name: str, folder: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            if not modes.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                with self._lock():
                    self._system.unlink(name, folder)

    @contextlib.contextmanager
    def _unchanged(self, key: str, expected: str) -> Iterator[None]:
        with self._needed_lock():
            self._check_version(key, expected)
            yield

    @contextlib.contextmanager
    def _lock(self, *, needed: bool = False) -> Iterator[None]:
        """Keep out of a comparison under way. Where there are no locks there are no comparisons,
        so whoever needs none goes on without."""
        with self._lock_file() as fd, contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._system.locked(fd))
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                if needed:
                    raise StorageError(
                        "this filesystem has no locks, and without one nothing can be compared "
                        f"and replaced in one step ({error.strerror})",
                        path=self.url,
                    ) from error
            yield

    def _needed_lock(self) -> contextlib.AbstractContextManager[None]:
        return self._lock(needed=True)

    @contextlib.contextmanager
    def _lock_file(self) -> Iterator[int]:
        with self._folders.existing(()) as root:
            fd = self._system.open_lock(_LOCK, root)
        try:
            yield fd
        finally:
            self._system.close(fd)

    def _listed(self, parts: tuple[str, ...], prefix: str) -> Iterator[ObjectInfo]:
        above = "".join(f"{part}/" for part in parts)
        try:
            with self._folders.existing(parts) as folder, os.scandir(folder) as scanned:
                entries = [(entry, _is_folder(entry)) for entry in scanned]
                found = [(e, f, None if f else _stat(e)) for e, f in entries]
        except (FileNotFoundError, NotADirectoryError):
            return
        found.sort(key=lambda item: f"{item[0].name}/" if item[1] else item[0].name)
        for entry, is_folder, status in found:
            key = f"{above}{entry.name}"
            if entry.name.startswith(RESERVED):
                continue
            if is_folder and (f"{key}/".startswith(prefix) or prefix.startswith(f"{key}/")):
                yield from self._listed((*parts, entry.name), prefix)
            elif status is not None and key.startswith(prefix):
                yield _info(key, status)

    def _swept(self, parts: tuple[str, ...], before_ns: int) -> int:
        removed = 0
        try:
            with self._folders.existing(parts) as folder:
                for entry in [*hidden_files(folder)]:
                    status = _stat(entry)
                    if status is not None and status.st_mtime_ns <= before_ns:
                        self._system.unlink(entry.name, folder)
                        removed += 1
                with os.scandir(folder) as scanned:
                    inner = [entry.name for entry in scanned if _is_folder(entry)]
        except FileNotFoundError:
            return removed
        removed += sum(self._swept((*parts, name), before_ns) for name in inner)
        self._folders.remove_empty(parts)
        return removed


class _FileSink:
    """One object's way to its file. See ``_ordered.Sink``."""

    def __init__(
        self, key: str, file: NewFile, stream: WriteStream, *, publish: Callable[[], ObjectInfo]
    ) -> None:
        self._key = key
        self._file = file
        self._stream = stream
        self._publish = publish

    def append(self, data: memoryview) -> None:
        with translated("write the object", self._key):
            self._stream.append(data)

    def publish(self) -> ObjectInfo:
        with translated("write the object", self._key):
            self._file.seal(self._stream.finish())
            info = self._publish()
            self._file.close()
            return info

    def discard(self) -> None:
        self._stream.close()
        with translated("remove what was written", self._key):
            self._file.close()


def _place(key: str) -> tuple[tuple[str, ...], str]:
    """The folders and the file name of a key."""
    *parts, name = _checks.key("key", key).split("/")
    if any(part.startswith(RESERVED) for part in (*parts, name)):
        raise ValueError(f"key must not have a part that begins with {RESERVED!r}, as {key!r} has")
    return tuple(parts), name


def _info(key: str, found: os.stat_result) -> ObjectInfo:
    version = f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}"
    modified_s = found.st_mtime_ns / 1e9
    return ObjectInfo(key=key, size_bytes=found.st_size, version=version, modified_s=modified_s)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False)


def _stat(entry: os.DirEntry[str]) -> os.stat_result | None:
    """What the file is, or ``None`` if it is no plain file or is gone."""
    try:
        found = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    return found if modes.S_ISREG(found.st_mode) else None
