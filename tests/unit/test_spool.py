"""Compressing without holding everything in memory."""

import errno
import os
import resource
import subprocess
import sys
import tempfile

import numpy as np
import pytest

from holdfast.catalog._read_jobs import all_chunks, batches, run_batch, scratch_buffers
from holdfast.catalog._shard_read import open_shard
from holdfast.catalog._shard_write import ArraySource, write_shard
from holdfast.catalog._spool import Spool
from holdfast.errors import NoSpaceError, StorageError
from holdfast.format import CompressionLevel, ShardEntry
from holdfast.storage import LocalStorage, MemoryStorage


@pytest.mark.parametrize("memory_bytes", [0, 5, 7, 1000])
def test_pieces_come_back_in_any_order(memory_bytes):
    pieces = [b"abc", memoryview(b"defg"), b"", bytearray(b"h"), b"ij" * 50]
    with Spool(memory_bytes=memory_bytes) as spool:
        numbers = [spool.add(piece) for piece in pieces]
        assert numbers == [0, 1, 2, 3, 4]
        for number in [3, 0, 4]:
            assert bytes(spool.take(number)) == pieces[number]
        assert spool.add(b"late") == 5
        assert [bytes(spool.take(number)) for number in [5, 1, 2]] == [b"late", b"defg", b""]


def test_what_is_kept_in_memory_is_bounded_and_the_rest_is_in_one_file(monkeypatch):
    made = []
    real = tempfile.TemporaryFile
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda: made.append(real()) or made[-1])
    with Spool(memory_bytes=10) as spool:
        for _ in range(2):
            spool.add(b"12345")
        assert made == []
        for _ in range(3):
            spool.add(b"12345")
        (file,) = made
        file.flush()
        assert os.fstat(file.fileno()).st_size == 15
    assert file.closed


def test_a_folder_for_temporary_files_without_room_is_told(tmp_path):
    with Spool(memory_bytes=0) as spool:
        spool.add(b"small")
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
        try:
            with pytest.raises(StorageError, match="set TMPDIR to a folder with room"):
                spool.add(bytes(2_000_000))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_a_lack_of_space(monkeypatch):
    def full():
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with Spool(memory_bytes=0) as spool, pytest.raises(NoSpaceError, match="TMPDIR"):
        spool.add(b"x")


def test_a_shard_that_was_spooled_is_the_same():
    weights = np.random.default_rng(0).normal(size=(50, 1000, 500)).astype(np.float32)
    halves = {"a": weights[:25], "b": weights[25:].transpose(0, 2, 1)}
    sources = [
        ArraySource(entry=ShardEntry(name=name, dtype="F32", shape=half.shape), array=half)
        for name, half in halves.items()
    ]
    storage = MemoryStorage()
    ticks = []
    written = write_shard(
        storage, "x", sources, level=CompressionLevel.FAST, tick=ticks.append
    ).file
    assert 64 * 1024 * 1024 < written.size_bytes < 0.95 * weights.nbytes
    assert ticks[0] == 0, "a lease is kept while it compresses"
    shard = open_shard(storage, "x", written)
    assert sum(ticks) == sum(placed.stored_bytes for placed in shard.layout.entries)
    assert shard.layout.chunks > 300
    for batch in batches(all_chunks([shard], {})):
        assert run_batch(storage, batch, scratch_buffers(), keep=False) == []


PROGRAM = """
import pathlib, resource, sys
import numpy as np
from holdfast.catalog._shard_write import ArraySource, write_shard
from holdfast.format import CompressionLevel, ShardEntry
from holdfast.storage import LocalStorage

folder, raw = sys.argv[1:]
data = np.memmap(raw, np.float32, "r").view(np.ndarray)
entry = ShardEntry(name="x", dtype="F32", shape=data.shape)
source = ArraySource(entry=entry, array=data)

def own_bytes():
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])

most = before = own_bytes()

def tick(nbytes):
    global most
    most = max(most, own_bytes())

written = write_shard(
    LocalStorage(folder), "x", [source], level=CompressionLevel.FAST, tick=tick
)
print(written.file.size_bytes, most - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted by /proc")
def test_compressing_a_large_array_takes_little_memory(tmp_path):
    """300 MB of weights become some 250 MB, of which no more than a part is ever in memory. The
    array itself is mapped from a file, and so does not count."""
    rng = np.random.default_rng(0)
    with (tmp_path / "raw").open("wb") as file:
        for _ in range(10):
            rng.standard_normal(7_500_000, np.float32).tofile(file)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path / "storage", tmp_path / "raw"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    size_bytes, memory = map(int, done.stdout.split())
    assert size_bytes > 200_000_000
    assert memory < 130_000_000
    assert LocalStorage(tmp_path / "storage").stat("x").size_bytes == size_bytes
