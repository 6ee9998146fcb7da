"""Long ranges into memory that lies as the file does: read there by the disk itself, and right
wherever they begin and end."""

import mmap
import threading

import numpy as np
import pytest

from holdfast.contracts import ReadRange
from holdfast.storage import LocalStorage
from holdfast.storage._system import BLOCK_BYTES, System

MIB = 2**20
SIZE_BYTES = 4 * MIB + 1234


class WatchedSystem(System):
    """Remembers into which memory files were read."""

    def __init__(self) -> None:
        self.read_into: list[tuple[int, int]] = []
        self._lock = threading.Lock()

    def read(self, fd, into, offset):
        with self._lock:
            self.read_into.append((address(into), len(into)))
        return super().read(fd, into, offset)


class ShortReads(System):
    """A disk that gives a part of what is asked for, not always whole blocks."""

    def read(self, fd, into, offset):
        return super().read(fd, into[: max(1, len(into) * 2 // 3)], offset)


def address(memory):
    return np.frombuffer(memory, np.uint8).__array_interface__["data"][0]


def memory_at(distance, size):
    """Memory that begins so many bytes after the start of a page."""
    whole = memoryview(mmap.mmap(-1, size + BLOCK_BYTES))
    return whole[distance : distance + size]


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    root = tmp_path_factory.mktemp("straight")
    data = np.random.default_rng(5).bytes(SIZE_BYTES)
    with LocalStorage(root).open_writer("x", size_bytes=len(data)) as writer:
        writer.write_at(0, data)
        writer.finish()
    return root, data


EDGES = [0, 1, 17, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1]


@pytest.mark.parametrize("system", [System, ShortReads])
@pytest.mark.parametrize("moved", [0, 1], ids=["alike", "not alike"])
@pytest.mark.parametrize("start", EDGES)
def test_any_beginning_and_end_of_a_range_is_read_right(stored, start, moved, system):
    root, data = stored
    storage = LocalStorage(root, system=system())
    for end in (*EDGES, MIB):
        size = SIZE_BYTES - start - end
        into = memory_at((start + moved) % BLOCK_BYTES, size)
        storage.read_into("x", [ReadRange(start=start, into=into)])
        assert into == data[start : SIZE_BYTES - end]


def test_memory_that_lies_as_the_file_does_is_read_into_without_a_copy(stored):
    root, data = stored
    system = WatchedSystem()
    folder = system.open_root(str(root))
    fd, direct = system.open_file("x", folder, direct=True)
    system.close(fd)
    system.close(folder)
    if not direct:
        pytest.skip("this filesystem has no direct I/O")
    into = memory_at(17, 3 * MIB)
    LocalStorage(root, system=system).read_into("x", [ReadRange(start=17, into=into)])
    first, last = address(into), address(into) + len(into)
    straight = sum(size for at, size in system.read_into if first <= at and at + size <= last)
    assert straight >= 3 * MIB - 2 * BLOCK_BYTES
    assert into == data[17 : 17 + 3 * MIB]


def test_long_ranges_that_follow_each_other_are_all_read(stored):
    root, data = stored
    at = 5
    ranges = []
    for size in (MIB + 3, 10, 2 * MIB, 300_000, 1):
        into = memory_at(at % BLOCK_BYTES, size)
        ranges.append(ReadRange(start=at, into=into))
        at += size
    LocalStorage(root).read_into("x", ranges[::-1])
    assert b"".join(each.into for each in ranges) == data[5:at]
