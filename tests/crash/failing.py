"""A disk that fails at its Nth call. Knows calls by number, and logs like the recorder."""

import errno
import os
from pathlib import Path

from recorder import RecordingSystem

CALLS = (
    "open_root", "open_folder", "make_folder", "remove_folder", "open_file", "create_file",
    "open_lock", "make_direct", "make_buffered", "write", "read_parts", "allocate", "truncate",
    "set_modified", "sync", "rename", "link", "unlink", "locked",
)  # fmt: skip

BEFORE, AFTER, FROM_THEN_ON, SHORT, NOTHING = "before", "after", "from then on", "short", "nothing"


class FailingSystem(RecordingSystem):
    """The ``nth`` call fails with ``code``: before it does anything, after it did, or that call
    and all that follow. ``SHORT`` and ``NOTHING`` count reads and writes only, and move half the
    bytes or none. Closing never fails, as ``System`` promises.
    """

    def __init__(self, base: Path, nth: int, code: int = errno.EIO, how: str = BEFORE) -> None:
        super().__init__(base)
        self._nth = nth
        self._code = code
        self._how = how
        self._count = 0
        self.failed: list[str] = []
        self.failed_reads_of_parts = 0
        self.failed_syncs: list[int] = []
        self.synced_again: list[int] = []

    def call(self, name, *args, **kwargs):
        with self._lock:
            real = getattr(super(), name)
            if self._how in {SHORT, NOTHING}:
                return self._partly(real, name, *args, **kwargs)
            self._count += 1
            due = self._count == self._nth
            if not due and not (self._how == FROM_THEN_ON and self._count > self._nth):
                if name == "sync" and self._by_fd[args[0]] in self.failed_syncs:
                    self.synced_again.append(self._by_fd[args[0]])
                return real(*args, **kwargs)
            self._fails(name, args)
            if name == "sync":
                self.failed_syncs.append(self._by_fd[args[0]])
            elif self._how == AFTER:
                result = real(*args, **kwargs)
                if name.startswith(("open_", "create_")):  # the caller gets no descriptor to close
                    self.close(result[0] if isinstance(result, tuple) else result)
            raise OSError(self._code, os.strerror(self._code))

    def _fails(self, name, args):
        self.failed.append(name)
        self.failed_reads_of_parts += name == "read_parts" and len(args[1]) > 1

    def _partly(self, real, name, fd=None, memory=None, offset=None, **kwargs):
        if name not in {"read_parts", "write"}:
            args = [arg for arg in (fd, memory, offset) if arg is not None]
            return real(*args, **kwargs)
        self._count += 1
        if self._count != self._nth:
            return real(fd, memory, offset)
        self._fails(name, (fd, memory))
        if self._how == NOTHING:
            return 0
        if name == "read_parts" and len(memory) > 1:
            return real(fd, memory[: len(memory) // 2], offset)
        whole = memory[0] if name == "read_parts" else memory
        half = whole[: len(whole) // 2]
        return real(fd, [half] if name == "read_parts" else half, offset) if half else 0


def _forward(name):
    def method(self, *args, **kwargs):
        return self.call(name, *args, **kwargs)

    return method


for _name in CALLS:
    setattr(FailingSystem, _name, _forward(_name))
