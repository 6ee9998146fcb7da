"""A System that does the real calls and logs them. Knows inodes and names; knows no crashes."""

import os
import stat
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from holdfast.storage._system import System


@dataclass(frozen=True, slots=True)
class Op:
    """One operation that reached the disk, or a ``mark`` that a workload made.

    ``at`` is the folder of entry operations and the file (or folder) of the others; ``node`` is
    what the entry leads to.
    """

    kind: str
    at: int = -1
    name: str = ""
    node: int = -1
    offset: int = 0
    data: bytes = b""
    new: str = ""
    value: object = None


class Recorded(Protocol):
    """What was there, by node, and what was done to it since."""

    base: int
    found_files: dict[int, bytes]
    found_entries: dict[int, dict[str, int]]
    log: list[Op]


class Killed(BaseException):
    """The process is no more: nothing it still tries reaches the disk."""


class RecordingSystem(System):
    """Logs what changes the disk, in the order in which it happened, whatever the thread.

    Nodes are numbered as they are met with; what ``base`` holds at the start is ``found`` and
    durable. ``kill_at`` is the number of the operation before which the process dies.
    """

    def __init__(self, base: Path, *, kill_at: int | None = None) -> None:
        self.log: list[Op] = []
        self.kill_at = kill_at
        self.killed = False
        self._lock = threading.RLock()
        self._nodes = 0
        self._by_fd: dict[int, int] = {}
        self._entries: dict[int, dict[str, int]] = {}
        self._folders: dict[str, int] = {}
        self.files: dict[int, bytes] = {}
        self.base = self._adopt(str(base))
        self.found_entries = {node: dict(names) for node, names in self._entries.items()}
        self.found_files = dict(self.files)

    def revive(self) -> None:
        """Another process begins. Descriptors of the dead one are closed already."""
        self.kill_at, self.killed = None, False

    def mark(self, kind: str, subject: str, value: object = None) -> None:
        with self._lock:
            self.log.append(Op(kind=kind, name=subject, value=value))

    def open_root(self, path):
        with self._lock:
            self._die_if_killed()
            fd = super().open_root(path)
            if path not in self._folders:
                self._folders[path] = self._node()
                self._entries[self._folders[path]] = {}
            self._by_fd[fd] = self._folders[path]
            return fd

    def open_folder(self, name, folder):
        with self._lock:
            self._die_if_killed()
            fd = super().open_folder(name, folder)
            self._by_fd[fd] = self._entries[self._by_fd[folder]][name]
            return fd

    def make_folder(self, name, folder=None):
        with self._lock:
            self._before()
            super().make_folder(name, folder)
            node = self._node()
            self._entries[node] = {}
            if folder is None:
                self._folders[name] = node
                at, name = self._folders[str(Path(name).parent)], Path(name).name
            else:
                at = self._by_fd[folder]
            self._enter(Op("mkdir", at, name, node))

    def remove_folder(self, name, folder):
        with self._lock:
            self._before()
            super().remove_folder(name, folder)
            self._remove(Op("rmdir", self._by_fd[folder], name))

    def open_file(self, name, folder):
        with self._lock:
            self._die_if_killed()
            return super().open_file(name, folder)

    def create_file(self, name, folder, *, direct=False):
        with self._lock:
            self._before()
            fd, direct = super().create_file(name, folder, direct=direct)
            node = self._node()
            self.files[node] = b""
            self._by_fd[fd] = node
            self._enter(Op("create", self._by_fd[folder], name, node))
            return fd, direct

    def open_lock(self, name, folder):
        with self._lock:
            self._before()
            fd = super().open_lock(name, folder)
            at = self._by_fd[folder]
            if name not in self._entries[at]:
                node = self._node()
                self.files[node] = b""
                self._enter(Op("create", at, name, node))
            return fd

    def close(self, fd):
        with self._lock:
            self._by_fd.pop(fd, None)
            super().close(fd)

    def write(self, fd, data, offset):
        with self._lock:
            self._before()
            written = super().write(fd, data, offset)
            self.log.append(Op("write", self._by_fd[fd], offset=offset, data=bytes(data[:written])))
            return written

    def read_parts(self, fd, into, offset):
        self._die_if_killed()
        return super().read_parts(fd, into, offset)

    def allocate(self, fd, size):
        with self._lock:
            self._before()
            super().allocate(fd, size)
            self.log.append(Op("size", self._by_fd[fd], offset=os.fstat(fd).st_size))

    def truncate(self, fd, size):
        with self._lock:
            self._before()
            super().truncate(fd, size)
            self.log.append(Op("size", self._by_fd[fd], offset=size))

    def sync(self, fd):
        with self._lock:
            self._before()
            super().sync(fd)
            self._log_sync(fd)

    def _log_sync(self, fd):
        kind = "sync folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "sync file"
        self.log.append(Op(kind, self._by_fd[fd]))

    def rename(self, old, new, folder):
        with self._lock:
            self._before()
            super().rename(old, new, folder)
            at = self._by_fd[folder]
            node = self._entries[at].pop(old)
            self._entries[at][new] = node
            self.log.append(Op("rename", at, old, node, new=new))

    def link(self, old, new, folder):
        with self._lock:
            self._before()
            super().link(old, new, folder)
            at = self._by_fd[folder]
            node = self._entries[at][old]
            self._entries[at][new] = node
            self.log.append(Op("link", at, old, node, new=new))

    def unlink(self, name, folder):
        with self._lock:
            self._before()
            super().unlink(name, folder)
            self._remove(Op("unlink", self._by_fd[folder], name))

    def _before(self) -> None:
        if self.kill_at is not None:
            self.kill_at -= 1
            self.killed = self.killed or self.kill_at < 0
        self._die_if_killed()

    def _die_if_killed(self) -> None:
        if self.killed:
            raise Killed

    def _enter(self, op: Op) -> None:
        self._entries[op.at][op.name] = op.node
        self.log.append(op)

    def _remove(self, op: Op) -> None:
        del self._entries[op.at][op.name]
        self.log.append(op)

    def _node(self) -> int:
        self._nodes += 1
        return self._nodes

    def _adopt(self, path: str) -> int:
        node = self._node()
        self._folders[path] = node
        self._entries[node] = {}
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    self._entries[node][entry.name] = self._adopt(entry.path)
                else:
                    inner = self._node()
                    self.files[inner] = Path(entry.path).read_bytes()
                    self._entries[node][entry.name] = inner
        return node
