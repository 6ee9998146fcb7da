"""LocalStorage keeps the contract: on a disk, in memory, and where direct I/O is refused."""

import errno
import os
import tempfile
from pathlib import Path

import pytest

from holdfast.storage import LocalStorage
from holdfast.storage._system import System
from holdfast.testing import StorageConformance


class TestOnDisk(StorageConformance):
    many_objects = 300

    def make_storage(self, tmp_path):
        return LocalStorage(tmp_path / "yet" / "to be made")


class InMemory(StorageConformance):
    """tmpfs where there is one, so that syncs cost nothing."""

    random_examples = 10
    system = System

    @pytest.fixture
    def storage(self, tmp_path):
        memory = Path("/dev/shm")
        with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
            yield LocalStorage(folder, system=self.system())


class TestInMemory(InMemory):
    pass


class RefusesDirect(System):
    """A filesystem that does not open files for direct I/O, and makes them all the same."""

    def create_file(self, name, folder, *, direct=False):
        if direct:
            os.close(super().create_file(name, folder)[0])
            self.unlink(name, folder)
        return super().create_file(name, folder)

    def is_cached(self, fd, offset, size):
        return False

    def make_direct(self, fd):
        return False


class RefusesDirectLate(System):
    """A filesystem that opens files for direct I/O and then takes none."""

    def __init__(self):
        self._direct = set()

    def create_file(self, name, folder, *, direct=False):
        fd, direct = super().create_file(name, folder, direct=direct)
        if direct:
            self._direct.add(fd)
        return fd, direct

    def is_cached(self, fd, offset, size):
        return False

    def make_direct(self, fd):
        self._direct.add(fd)
        return True

    def make_buffered(self, fd):
        super().make_buffered(fd)
        self._direct.discard(fd)

    def close(self, fd):
        self._direct.discard(fd)
        super().close(fd)

    def write(self, fd, data, offset):
        self._refuse(fd)
        return super().write(fd, data, offset)

    def read(self, fd, into, offset):
        self._refuse(fd)
        return super().read(fd, into, offset)

    def _refuse(self, fd):
        if fd in self._direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


class HasNoLinks(System):
    """A filesystem without hard links, as FAT and some network mounts are."""

    def link(self, old, new, folder):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))


class GivesLittle(System):
    """A disk that moves a few bytes at a time, at odd places."""

    def write(self, fd, data, offset):
        return super().write(fd, data[: max(1, len(data) * 2 // 3)], offset)

    def read_parts(self, fd, into, offset):
        if len(into) > 1:
            return super().read_parts(fd, into[:-1], offset)
        return super().read_parts(fd, [into[0][: max(1, len(into[0]) * 2 // 3)]], offset)


class TestWhereDirectIsRefused(InMemory):
    system = RefusesDirect


class TestWhereDirectIsRefusedLate(InMemory):
    system = RefusesDirectLate


class TestWithoutHardLinks(InMemory):
    system = HasNoLinks


class TestWithShortReadsAndWrites(InMemory):
    many_ranges = 500
    large_bytes = 5 * 1024 * 1024 + 4095
    system = GivesLittle
