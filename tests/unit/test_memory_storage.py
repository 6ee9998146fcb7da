"""What MemoryStorage promises beyond the contract of every storage (tests/conformance)."""

import pytest

from holdfast.contracts import ReadRange
from holdfast.errors import StorageError
from holdfast.storage import MemoryStorage


def test_every_write_gets_a_version_of_its_own_also_of_the_same_bytes():
    storage = MemoryStorage()
    seen = set()
    for _ in range(5):
        seen.add(storage.create("a", b"same").version)
        storage.delete("a")
    with storage.open_writer("a") as writer:
        writer.write_at(0, b"same")
        info = writer.finish()
    seen.add(info.version)
    seen.add(storage.replace("a", b"same", info.version).version)
    assert len(seen) == 7


def test_storages_are_apart_and_say_so():
    one, other = MemoryStorage(), MemoryStorage()
    one.create("a", b"")
    assert list(other.list()) == []
    assert one.url.startswith("memory://")
    assert one.url != other.url


def test_it_knows_no_limit_and_leaves_nothing_to_sweep():
    storage = MemoryStorage()
    storage.open_writer("a").write_at(0, b"never finished")
    assert storage.free_bytes() is None
    assert storage.sweep(0) == 0


def test_a_refused_range_leaves_all_of_the_memory_as_it_was():
    storage = MemoryStorage()
    storage.create("a", b"abcdef")
    memory = bytearray(4)
    view = memoryview(memory)
    ranges = [ReadRange(start=0, into=view[:2]), ReadRange(start=5, into=view[2:])]
    with pytest.raises(StorageError, match="bytes 5 to 7 are not inside the object of 6"):
        storage.read_into("a", ranges)
    assert memory == bytes(4)
