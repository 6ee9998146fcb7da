"""Whole checkpoints that somebody made to do harm, as files by their key. Used by tests and by the
campaign of hostile files."""

import json
import os
import pickle
import zipfile
from io import BytesIO

import msgspec
import numpy as np
import safetensors.numpy
import xxhash
import zstandard
from catalog_tools import Part, files_of, write_parts

from holdfast.errors import CheckpointError
from holdfast.format import (
    CHUNK_BYTES,
    ShardEntry,
    codec_for,
    decode_record,
    encode_table,
    file_digest,
    plan_shard,
)
from holdfast.reshard import Box, Grid
from holdfast.storage import MemoryStorage

RECORD = "a/metadata.json"
SHARD = "a/shard-0-00000000000000aa.safetensors"


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
            # Without what its frames hold, or memory would be that of three readers.
            error.__cause__ = error.__context__ = None
            errors.append(error.with_traceback(None))
    return errors, catalog.verify("a")


def on_disk(folder, files=HONEST):
    root = folder / "root"
    for key, data in files.items():
        path = root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root
