"""Checkpoints that somebody made to do harm: every one ends in a ``CheckpointError``, quickly, in
little memory, and with nothing written."""

import contextlib
import dataclasses
import json
import os
import pickle
import resource
import subprocess
import sys
import textwrap
import tracemalloc
import zipfile
from io import BytesIO

import msgspec
import numpy as np
import pytest
import safetensors.numpy
import xxhash
import zstandard
from catalog_tools import Part, files_of, memory_of, write_parts

from holdfast.catalog import Catalog
from holdfast.contracts import SMALL_OBJECT_BYTES
from holdfast.errors import CheckpointError, CorruptedError, IncompatibleVersionError
from holdfast.format import (
    CHUNK_BYTES,
    ShardEntry,
    chunk_digests,
    codec_for,
    decode_record,
    encode_table,
    file_digest,
    plan_shard,
)
from holdfast.reshard import Box, Grid
from holdfast.storage import LocalStorage, MemoryStorage
from holdfast.storage._wrapped import WrappedStorage

RECORD = "a/metadata.json"
SHARD = "a/shard-0-00000000000000aa.safetensors"
MOST_BYTES = 96 * 1024 * 1024


def sealed(body: bytes) -> bytes:
    """A record with the right digest, whatever it says."""
    found = xxhash.xxh3_128_hexdigest(b"holdfast\x001\x00" + body)
    return b'{"format":"holdfast","version":1,"digest":"%b","record":%b}' % (found.encode(), body)


def honest():
    storage = MemoryStorage()
    array = np.arange(100.0)
    write_parts(storage, "a", {"w": (array, Grid.whole((100,)), [Part(Box((0,), (100,)), 0)])})
    return files_of(storage)


HONEST = honest()
BODY = msgspec.json.decode(msgspec.json.encode(decode_record(HONEST[RECORD], path=RECORD)))


def record(**changes) -> dict[str, bytes]:
    """The honest checkpoint, but for what its record says."""
    body = {**BODY, **changes}
    return {**HONEST, RECORD: sealed(json.dumps(body).encode())}


def tensor(**changes) -> dict[str, bytes]:
    return record(tensors={"w": {**BODY["tensors"]["w"], **changes}})


def named(name, **more) -> dict[str, bytes]:
    return record(files=[{**BODY["files"][0], "name": name, **more}])


def shard(data: bytes, digest: bytes | None = None) -> dict[str, bytes]:
    """Another file in the place of the shard, of which the record has the right size and digest."""
    file = {**BODY["files"][0], "size": len(data)}
    file["digest"] = (digest or bytes(16)).hex()
    changed = record(files=[file])
    return {**changed, SHARD: data}


def compressed_shard(shape, frame: bytes, count: int = 1) -> dict[str, bytes]:
    """A shard of one compressed tensor, whose frames are all ``frame``: right in every sum."""
    entry = ShardEntry(name="w", dtype="F64", shape=shape)
    codec = codec_for("fast", "F64")
    layout = plan_shard([entry], stored={0: (codec, [len(frame)] * count)})
    digests = [bytes(16 * count)]
    table = encode_table(layout, digests, {"w": [len(frame)] * count})
    data = layout.header + frame * count + table
    changed = shard(data, file_digest(layout.header, table))
    body = json.loads(changed[RECORD][len(sealed(b"")) - 1 : -1])
    whole = [{"step": size} for size in shape]
    body["tensors"]["w"] = {
        "dtype": "F64",
        "shape": list(shape),
        "placement": {"cuts": whole, "files": [[0, 0, 1]]},
    }
    return {**changed, RECORD: sealed(json.dumps(body).encode())}


def bomb() -> bytes:
    """A frame of the codec whose planes each claim, and are, far more than a chunk."""
    plane = zstandard.ZstdCompressor().compress(bytes(64 * 1024 * 1024))
    head = bytes([8]) + b"".join(b"\x01" + len(plane).to_bytes(4, "little") for _ in range(8))
    return head + plane * 8


def foreign_shard() -> dict[str, bytes]:
    data = safetensors.numpy.save({"w": np.arange(100.0)})
    data += bytes(max(0, 4096 - len(data)))
    return shard(data)


def safetensors_shard() -> dict[str, bytes]:
    return shard(safetensors.numpy.save({"w": np.arange(1000.0)}))


def zip_file() -> bytes:
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(os.system))
    return buffer.getvalue()


def huge_header() -> dict[str, bytes]:
    return shard((90_000_000).to_bytes(8, "little") + b"{" * 8192)


def deep(depth: int) -> dict[str, bytes]:
    body = json.dumps(BODY).encode()
    return {
        **HONEST,
        RECORD: sealed(body[:-1] + b',"custom":' + b"[" * depth + b"]" * depth + b"}"),
    }


def header_of(text: bytes) -> dict[str, bytes]:
    padded = text.ljust(4096 - 8)
    return shard(len(padded).to_bytes(8, "little") + padded + bytes(4096))


PLACEMENT = BODY["tensors"]["w"]["placement"]
HOSTILE = {
    "a file above the root": named("../../etc/shard-0-00000000000000aa.safetensors"),
    "a file by an absolute name": named("/etc/passwd"),
    "a file that is no shard": named("metadata.json"),
    "a file of a prefix above the root": named(BODY["files"][0]["name"], prefix="../other"),
    "a file of an absolute prefix": named(BODY["files"][0]["name"], prefix="/etc"),
    "a file of an empty prefix": named(BODY["files"][0]["name"], prefix=""),
    "a file with a NUL in its prefix": named(BODY["files"][0]["name"], prefix="a\0b"),
    "a file listed twice": record(files=BODY["files"] * 2),
    "a file larger than any": record(files=[{**BODY["files"][0], "size": 2**63 - 1}]),
    "a tensor larger than memory": tensor(
        shape=[2**40], placement={**PLACEMENT, "cuts": [{"step": 2**40}]}
    ),
    "a tensor larger than 64 bits": tensor(shape=[2**40, 2**40, 2**40]),
    "a tensor of a million dimensions": tensor(shape=[1] * 1_000_000),
    "a negative shape": tensor(shape=[-5]),
    "a grid of a million million cells": tensor(
        shape=[10**12], placement={"cuts": [{"step": 1}], "files": [[0, 0, 10**12]]}
    ),
    "a grid of many dimensions' cells": tensor(
        shape=[1000] * 4, placement={"cuts": [{"step": 1}] * 4, "files": [[0, 0, 10**12]]}
    ),
    "a grid of fifty million cells in one tiny file": tensor(
        shape=[49_000_000], placement={"cuts": [{"step": 1}], "files": [[0, 0, 49_000_000]]}
    ),
    "a grid of a million cells in one tiny file": tensor(
        shape=[1_000_000], placement={"cuts": [{"step": 1}], "files": [[0, 0, 1_000_000]]}
    ),
    "forty tensors of a million cells": record(
        tensors={
            f"t{i}": {
                "dtype": "U8",
                "shape": [1_000_000],
                "placement": {"cuts": [{"step": 1}], "files": [[0, 0, 1_000_000]]},
            }
            for i in range(40)
        },
        files=[{**BODY["files"][0], "size": 5000}],
    ),
    "runs of files that go on for ever": tensor(
        placement={**PLACEMENT, "files": [[0, 0, 2**62]]}
    ),
    "runs of files that leave the list": tensor(placement={**PLACEMENT, "files": [[5, 1, 1]]}),
    "runs of files that go below nothing": tensor(placement={**PLACEMENT, "files": [[0, -1, 2]]}),
    "boxes outside of the tensor": tensor(
        placement={"boxes": [[[0, 200]]], "files": [[0, 0, 1]]}
    ),
    "an unknown dtype": tensor(dtype="F1"),
    "another dtype than the file's": tensor(dtype="I64"),
    "another shape than the file's": tensor(
        shape=[50], placement={**PLACEMENT, "cuts": [{"step": 50}]}
    ),
    "another tensor than the file's": record(tensors={"v": BODY["tensors"]["w"]}),
    "a tree that refers to nothing": record(tree={"$": ["array", "nothing"]}),
    "a tree with an unknown tag": record(tree={"$": ["pickle", "gASVIgAAAAAAAACM"]}),
    "a tree with a huge inline array": record(
        tree={"$": ["numpy.array", ["float64", [2**40], ""]]}
    ),
    "a tree with an object dtype": record(tree={"$": ["numpy.array", ["object", [1], "AAAA"]]}),
    "deep JSON": deep(100_000),
    "JSON deeper than a tree may be": deep(400),
    "a key twice": {**HONEST, RECORD: sealed(json.dumps(BODY).encode()[:-1] + b',"ordinal":7}')},
    "a field that nobody knows": record(backdoor=1),
    "a body that is no JSON": {**HONEST, RECORD: sealed(b"\xff" * 100)},
    "a newer version": {**HONEST, RECORD: b'{"format":"holdfast","version":99}'},
    "a pickle as the record": {**HONEST, RECORD: pickle.dumps(os.system)},
    "a torch.save file as the record": {**HONEST, RECORD: zip_file()},
    "an empty record": {**HONEST, RECORD: b""},
    "a record of 65 MiB": {**HONEST, RECORD: b" " * (65 * 1024 * 1024)},
    "a record of 63 MiB of brackets": {**HONEST, RECORD: sealed(b"[" * (63 * 1024 * 1024))},
    "a tombstone with files": record(state="tombstone"),
    "another program's safetensors file as a shard": safetensors_shard(),
    "a padded foreign file as a shard": foreign_shard(),
    "a pickle as a shard": shard(pickle.dumps(os.system).ljust(8192, b".")),
    "a shard of nothing but zeros": shard(bytes(8192)),
    "a shard whose header is longer than it": huge_header(),
    "a shard whose header is deep JSON": header_of(b"[" * 4000),
    "a shard whose header is no JSON": header_of(b"\x80\x04"),
    "a shard with a newer version": header_of(
        b'{"__metadata__":{"holdfast":"{\\"version\\":2,\\"chunk_bytes\\":262144}"},'
        b'"__holdfast_chunks__":{"dtype":"U8","shape":[4096],"data_offsets":[0,4096]}}'
    ),
    "a shard with overlapping entries": header_of(
        b'{"__metadata__":{"holdfast":"{\\"version\\":1,\\"chunk_bytes\\":262144}"},'
        b'"a":{"dtype":"U8","shape":[4000],"data_offsets":[0,4000]},'
        b'"b":{"dtype":"U8","shape":[4000],"data_offsets":[0,4000]},'
        b'"__holdfast_chunks__":{"dtype":"U8","shape":[32],"data_offsets":[4000,4032]}}'
    ),
    "a compressed chunk that is a bomb": compressed_shard((CHUNK_BYTES // 8,), bomb()),
    "compressed chunks of one byte": compressed_shard((CHUNK_BYTES // 8 * 100,), b"\x08", 100),
    "a compressed chunk of nonsense": compressed_shard((1000,), b"\x08" + b"\xff" * 99),
}  # fmt: skip


def everything(catalog):
    """Whatever a reader may do with it. Returns the errors that ``read`` and ``verify`` gave."""
    errors = []
    for call in (
        lambda: catalog.read("a"),
        lambda: catalog.open("a").read_all(),
        lambda: catalog.info("a"),
    ):
        try:
            call()
        except CheckpointError as error:
            errors.append(error)
    return errors, catalog.verify("a")


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


def on_disk(folder, files=HONEST):
    root = folder / "root"
    for key, data in files.items():
        path = root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


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
