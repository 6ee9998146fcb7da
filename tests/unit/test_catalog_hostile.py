"""Checkpoints that somebody made to do harm: every one ends in a ``CheckpointError``, quickly, in
little memory, and with nothing written."""

import contextlib
import dataclasses
import os
import resource
import subprocess
import sys
import textwrap
import tracemalloc

import numpy as np
import pytest
import zstandard
from catalog_tools import files_of, memory_of
from hostile_checkpoints import (
    HONEST,
    HOSTILE,
    RECORD,
    SHARD,
    compressed_shard,
    everything,
    on_disk,
    record,
)

from holdfast.catalog import Catalog
from holdfast.contracts import SMALL_OBJECT_BYTES
from holdfast.errors import CheckpointError, CorruptedError, IncompatibleVersionError
from holdfast.format import CHUNK_BYTES, chunk_digests
from holdfast.storage import LocalStorage, MemoryStorage
from holdfast.storage._wrapped import WrappedStorage

MOST_BYTES = 96 * 1024 * 1024


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_checkpoint_is_refused_in_little_memory_and_nothing_is_written(case):
    files = HOSTILE[case]
    storage = memory_of(files)
    catalog = Catalog(storage)
    tracemalloc.start()
    try:
        errors, report = everything(catalog)
        catalog.list()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert errors, "it was read"
    assert isinstance(errors[0], CorruptedError | IncompatibleVersionError)
    assert errors[0].path is not None
    assert not report.is_intact
    assert peak < MOST_BYTES + 2 * sum(map(len, files.values()))
    assert files_of(storage) == files
    assert len(str(errors[0])) < 2000


def test_there_are_many_of_them():
    assert len(HOSTILE) >= 50


def test_the_honest_checkpoint_that_they_are_made_from_is_fine():
    errors, report = everything(Catalog(memory_of(HONEST)))
    assert errors == []
    assert report.is_intact
    errors, report = everything(Catalog(memory_of(record())))
    assert errors == []


def test_gc_and_rollback_of_hostile_checkpoints_touch_nothing_else():
    for case, files in HOSTILE.items():
        storage = memory_of({**files, "keep/notes.txt": b"mine"})
        catalog = Catalog(storage)
        catalog.write("honest", {"x": np.arange(3)})
        catalog.gc()
        catalog.rollback("a")
        assert storage.read("keep/notes.txt") == b"mine", case
        assert catalog.read("honest")["x"].tolist() == [0, 1, 2], case
        assert [info.prefix for info in catalog.list()] == ["honest"], case
        assert [info.key for info in storage.list("a/shard")] == [], case


def test_digests_that_fit_do_not_make_wrong_chunks_right():
    raw = bytes(8000)
    frame = zstandard.ZstdCompressor().compress(raw)
    files = compressed_shard((1000,), frame)
    assert chunk_digests(raw) != bytes(16)
    with pytest.raises(CorruptedError, match="tensor 'w' is damaged"):
        Catalog(memory_of(files)).read("a")


# --- what only a disk can hold


@pytest.mark.parametrize("key", [SHARD, RECORD])
def test_a_link_out_of_the_root_is_not_followed(tmp_path, key):
    root = on_disk(tmp_path)
    outside = tmp_path / "outside"
    outside.write_bytes((root / key).read_bytes())
    (root / key).unlink()
    (root / key).symlink_to(outside)
    catalog = Catalog(LocalStorage(root))
    with pytest.raises(CheckpointError):
        catalog.read("a")
    catalog.gc()
    with contextlib.suppress(CheckpointError):
        catalog.rollback("a")
    assert outside.exists()


def test_a_linked_folder_is_not_followed(tmp_path):
    root = on_disk(tmp_path)
    (root / "a").rename(tmp_path / "elsewhere")
    (root / "a").symlink_to(tmp_path / "elsewhere")
    catalog = Catalog(LocalStorage(root))
    assert catalog.list() == []
    with pytest.raises(CheckpointError):
        catalog.read("a")
    catalog.gc()
    assert len(list((tmp_path / "elsewhere").iterdir())) == 2


@pytest.mark.parametrize("key", [SHARD, RECORD])
def test_a_pipe_or_a_folder_in_the_place_of_a_file_is_refused_at_once(tmp_path, key):
    for make in (os.mkfifo, os.mkdir):
        root = on_disk(tmp_path / make.__name__)
        (root / key).unlink()
        make(root / key)
        catalog = Catalog(LocalStorage(root))
        with pytest.raises(CheckpointError):
            catalog.read("a")
        catalog.list()
        catalog.gc()


@pytest.mark.parametrize(
    "case",
    [
        "a tensor larger than memory",
        "a grid of fifty million cells in one tiny file",
        "compressed chunks of one byte",
        "a compressed chunk that is a bomb",
        "a record of 63 MiB of brackets",
    ],
)
def test_hostile_checkpoints_are_refused_by_a_process_of_little_memory(tmp_path, case):
    root = on_disk(tmp_path, HOSTILE[case])
    program = textwrap.dedent(
        """
        import resource, sys
        from holdfast.catalog import Catalog
        from holdfast.errors import CheckpointError

        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 400 * 2**20,) * 2)
        try:
            Catalog(sys.argv[1]).read("a")
        except CheckpointError as error:
            print(type(error).__name__)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(root)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "CorruptedError"
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


def test_a_tensor_that_is_really_stored_but_larger_than_memory_says_so(tmp_path):
    count = 12_000
    files = compressed_shard((CHUNK_BYTES // 8 * count,), b"\x08" * 40, count)
    root = on_disk(tmp_path, files)
    program = textwrap.dedent(
        """
        import resource, sys
        from holdfast.catalog import Catalog
        from holdfast.errors import LoadError

        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 400 * 2**20,) * 2)
        try:
            Catalog(sys.argv[1]).read("a")
        except LoadError as error:
            print(error)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(root)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"there is no memory for the {count * CHUNK_BYTES} bytes of tensor 'w'" in done.stdout


def test_a_record_that_is_too_large_is_not_read():
    class Large(WrappedStorage):
        def stat(self, key):
            return dataclasses.replace(super().stat(key), size_bytes=SMALL_OBJECT_BYTES + 1)

        def read(self, key):
            raise AssertionError(key)

    storage = MemoryStorage()
    Catalog(storage).write("a", {"n": 1})
    with pytest.raises(CorruptedError, match="a commit record has at most 67108864 bytes, not 671"):
        Catalog(Large(storage)).info("a")
    somebodys = MemoryStorage()
    somebodys.create(RECORD, b'{"format":"another"}')
    with pytest.raises(CorruptedError, match="is not holdfast's"):
        Catalog(Large(somebodys)).info("a")
