"""Every parser of holdfast's that reads bytes which somebody else may have written, each as one
function of bytes, and files that it reads, to begin from. Knows nothing of how bytes are made up.

Where a digest or a seal stands before what is parsed, it is made to fit, or nothing behind it would
ever be reached.
"""

# ruff: noqa: E501 -- tables of bytes are read as tables

import functools
import io
import itertools
import json
import pickle
import shutil
import struct
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Makes the folders of the tests importable, so before what is in them.
import _paths

# isort: split

import hostile_frames
import hostile_records
import hostile_shards
import hostile_values
import made_shards
import msgspec

from holdfast.catalog._intents import read_intent
from holdfast.catalog._model_index import _is_ours
from holdfast.cli._converting import safetensors_read
from holdfast.format import (
    CHUNK_BYTES,
    CompressionLevel,
    ShardEntry,
    codec_for,
    decode_record,
    decode_value,
    decompress_chunk,
    digest,
    header_bytes_needed,
    parse_shard_header,
    parse_table,
    plan_shard,
)
from holdfast.format._codecs import compress_chunk
from holdfast.format._strict_json import scan_json
from holdfast.format._value_model import MAX_VALUE_JSON_DEPTH
from holdfast.storage import MemoryStorage

GOLDEN = _paths.TESTS / "golden"
_SMALL = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Parser:
    """``parse`` returns or raises a ``CheckpointError``, whatever it is given. ``runs`` are as many
    as some seconds take. ``is_json`` says that its bytes are JSON, so that they can be changed as
    such."""

    name: str
    seeds: Callable[[], list[bytes]]
    parse: Callable[[bytes], object]
    runs: int
    is_json: bool = False


def _golden(pattern: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted(GOLDEN.glob(pattern))]


def _short(table: Mapping[str, tuple[bytes, str]]) -> list[bytes]:
    return [data for data, _ in table.values() if len(data) <= 2 * _SMALL]


# --- shards


def _shards() -> list[bytes]:
    return [*_golden("v1/*/*.safetensors"), *_short(hostile_shards.CORRUPTED)]


def _headers() -> list[bytes]:
    found = []
    for data in _shards():
        length = int.from_bytes(data[:8], "little")
        if 0 < length <= len(data) - 8:
            rest = len(data) - 8 - length
            found.append(struct.pack("<H", min(rest, 65535)) + data[8 : 8 + length].rstrip(b" "))
    return found


def _parse_header(data: bytes) -> object:
    """Two bytes say how much follows the header, the others are its text, which is padded."""
    if len(data) < 2:
        return None
    text = data[2:]
    padded = text.ljust(-(-(len(text) + 8) // _SMALL) * _SMALL - 8)
    whole = len(padded).to_bytes(8, "little") + padded
    size = len(whole) + struct.unpack("<H", data[:2])[0]
    needed = header_bytes_needed(whole, size, path="a")
    return parse_shard_header(whole[:needed], size, path="a")


def _layouts() -> list[Any]:
    data = [*_golden("v1/compressed/*/*.safetensors"), *_golden("v1/plain/*.safetensors")]
    return [made_shards.open_shard(each) for each in data]


_LAYOUTS: list[Any] = []


def _tables() -> list[bytes]:
    files = [*_golden("v1/compressed/*/*.safetensors"), *_golden("v1/plain/*.safetensors")]
    found = []
    for number, data in enumerate(files):
        layout = made_shards.open_shard(data)
        found.append(bytes([number]) + data[layout.table_offset :])
    return found + [bytes([0]) + data for data in _golden("v1/consolidated/*.chunks")]


def _parse_table(data: bytes) -> object:
    """The first byte says of which file it is the table, inside of it or beside it."""
    if not _LAYOUTS:
        _LAYOUTS.extend(_layouts())
    if not data:
        return None
    layout = _LAYOUTS[data[0] % len(_LAYOUTS)]
    table = parse_table(layout, data[1:], path="a")
    for placed in layout.entries:
        table.digests_of(placed)
        table.frame_offsets_of(placed)
    return table


def _frames() -> list[bytes]:
    found = []
    for dtype, level in itertools.product(
        ("F32", "BF16", "BOOL", "I64", "C64"), ("fast", "maximum")
    ):
        for raw in (bytes(600), bytes(range(256)) * 2, struct.pack("<100f", *range(100)) + b"ab"):
            frame = compress_chunk(memoryview(raw), dtype=dtype, level=CompressionLevel(level))
            if frame is not None:
                found.append(struct.pack("<H", len(raw)) + frame)
    bombs = (hostile_frames.one_plane(1, payload) for payload in hostile_frames.BOMBS.values())
    return found + [struct.pack("<H", 512) + frame for frame in bombs if len(frame) < _SMALL]


def _parse_frame(data: bytes) -> object:
    """Two bytes say how long the chunk is."""
    if len(data) < 2:
        return None
    size = min(struct.unpack("<H", data[:2])[0] * 4, CHUNK_BYTES)
    codec = codec_for("fast", "F32")
    into = memoryview(bytearray(size))
    decompress_chunk(memoryview(data)[2:], into, codec=str(codec), path="a")
    return into


# --- records and values


def _records() -> list[bytes]:
    return [
        *_golden("v1/*/metadata.json"),
        *_golden("v1/*/*/metadata.json"),
        *_short(hostile_records.CORRUPTED),
    ]


def _bodies() -> list[bytes]:
    found = []
    for data in _records():
        start = data.find(b'"record":')
        if start >= 0:
            found.append(data[start + 9 : -1])
    return found


def _parse_body(data: bytes) -> object:
    record = decode_record(hostile_records.wrapped(data), path="a")
    if record.state == "committed":
        decode_value(record.tree)
        decode_value(record.custom)
    return record


def _values() -> list[bytes]:
    texts = (GOLDEN / "v1" / "values" / "metadata.json").read_bytes()
    found = [json.dumps(json.loads(texts)["record"]["tree"]).encode()]
    for encoded, _ in hostile_values.HOSTILE:
        try:
            text = msgspec.json.encode(encoded)
        except (RecursionError, TypeError):
            continue
        if len(text) < _SMALL:
            found.append(text)
    return found


def _parse_value(data: bytes) -> object:
    scan_json(data, max_depth=MAX_VALUE_JSON_DEPTH)
    try:
        encoded = msgspec.json.decode(data)
    except ValueError:
        return None
    return decode_value(encoded)


_INTENT = b'{"format":"holdfast-intent","version":1,"attempt":"00000000000000bb","lease_s":600.0,"refers":["a"],"host":"h","pid":1}'


def _parse_intent(data: bytes) -> object:
    storage = MemoryStorage()
    storage.create("a/intent-00000000000000bb.json", data)
    return read_intent(storage, "a", "00000000000000bb")


def _parse_index(data: bytes) -> object:
    """The index of a model, as a save looks whether it is holdfast's and convert what it names."""
    _is_ours(data)
    folder = _folder()
    if not (folder / "model.safetensors").exists():
        shutil.copyfile(
            next((GOLDEN / "v1/consolidated").glob("model-00001*.safetensors")),
            folder / "model.safetensors",
        )
    (folder / "model.safetensors.index.json").write_bytes(data)
    return safetensors_read.read_folder(folder)


def _indexes() -> list[bytes]:
    return [
        *_golden("v1/consolidated/*.index.json"),
        b'{"weight_map":{"embed.weight":"model.safetensors"}}',
    ]


# --- files


@functools.cache
def _folder() -> Path:
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="fuzz-", dir=memory if memory.is_dir() else None))


def forget_folder() -> None:
    """Remove what parsers wrote."""
    if _folder.cache_info().currsize:
        shutil.rmtree(_folder(), ignore_errors=True)
        _folder.cache_clear()


def _read_all(contents: Any) -> object:
    from holdfast.cli._converting.contents import tensors_in

    for _, tensor in tensors_in(contents.tree):
        if tensor.nbytes < 2**20:
            for _piece in tensor.pieces():
                pass
    return contents


def _parse_safetensors(data: bytes) -> object:
    path = _folder() / "a.safetensors"
    path.write_bytes(data)
    return _read_all(safetensors_read.read_file(path))


def _foreign_files() -> list[bytes]:
    import numpy as np
    from safetensors.numpy import save

    return [save({"w": np.arange(6.0), "b": np.zeros((2, 3), np.int8)}), *_shards()]


def _precision_parts() -> tuple[list[Any], list[bytes], bytes, Mapping[str, str]]:
    """The entries, contents and values of a file of mixed precision."""
    data = (GOLDEN / "precision_v1" / "adamw.safetensors").read_bytes()
    layout = made_shards.open_shard(data)
    contents = made_shards.contents_of(data)
    names = [placed for placed in layout.entries if placed.key not in {"values", "seal"}]
    return (
        [placed.entry for placed in names],
        [contents[placed.key] for placed in names],
        contents["values"],
        layout.metadata,
    )


_PARTS: list[Any] = []


def _parse_precision_values(data: bytes) -> object:
    """The values of a file that is otherwise whole, sealed and with the right digests."""
    if not _PARTS:
        _PARTS.extend(_precision_parts())
    entries, contents, _, metadata = _PARTS
    more = [
        ShardEntry(name="values", dtype="U8", shape=(len(data),)),
        ShardEntry(name="seal", dtype="U8", shape=(16,)),
    ]
    layout = plan_shard([*entries, *more], metadata=metadata)
    seal = digest(layout.header)
    return _load_precision(
        made_shards.make_shard([*entries, *more], [*contents, data, seal], metadata=metadata)
    )


def _load_precision(data: bytes) -> object:
    from holdfast.precision._files import _KIND, _READERS
    from holdfast.precision._sealed_file import read_sealed

    storage = MemoryStorage()
    storage.create("a", data)
    version, tree = read_sealed(storage, "a", kind=_KIND, newest=1)
    return _READERS[version](tree)


def _archive(data: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, each in {
            "data.pkl": data,
            "version": b"3\n",
            "byteorder": b"little",
            "data/0": bytes(64),
        }.items():
            archive.writestr(f"a/{name}", each)
    return made.getvalue()


def _parse_torch_pickle(data: bytes) -> object:
    return _parse_torch_file(_archive(data))


def _parse_torch_file(data: bytes) -> object:
    from holdfast.cli._converting.with_torch import torch_read

    path = _folder() / "a.pt"
    path.write_bytes(data)
    return _read_all(torch_read.read_file(path))


def _torch_states() -> list[Any]:
    import torch

    return [
        {"w": torch.arange(4.0), "b": torch.ones(2, 3, dtype=torch.bfloat16).t(), "step": 3},
        {"model": {"x": torch.zeros(1).expand(5)}, "list": [1, (2.5, "a"), None, True, b"x"]},
    ]


def _torch_files() -> list[bytes]:
    import torch

    found = []
    for state, new in itertools.product(_torch_states(), (True, False)):
        file = io.BytesIO()
        torch.save(state, file, _use_new_zipfile_serialization=new)
        found.append(file.getvalue())
    return found


def _torch_pickles() -> list[bytes]:
    from _hostile_pickles import HARMFUL, RUNNING

    found = [make("/nonexistent/made") for make in RUNNING.values()]
    found += [data for data in HARMFUL.values() if len(data) < _SMALL]
    for data in _torch_files():
        if zipfile.is_zipfile(io.BytesIO(data)):
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                name = next(each for each in archive.namelist() if each.endswith("data.pkl"))
                found.append(archive.read(name))
    return found


def _parse_dcp(data: bytes) -> object:
    """The metadata of a folder whose other file is good."""
    from holdfast.cli._converting.with_torch import dcp_read

    folder = _folder()
    if not (folder / "__0_0.distcp").exists():
        (folder / "__0_0.distcp").write_bytes(_dcp_folder()[1])
    (folder / ".metadata").write_bytes(data)
    return _read_all(dcp_read.read_folder(folder, tensors_only=False))


@functools.cache
def _dcp_folder() -> tuple[bytes, bytes]:
    import torch
    import torch.distributed.checkpoint as dcp

    with tempfile.TemporaryDirectory() as folder:
        state = {"w": torch.arange(6.0).reshape(2, 3), "n": 1, "list": [torch.ones(2), "x"]}
        dcp.save(state, checkpoint_id=folder, no_dist=True)
        return (Path(folder) / ".metadata").read_bytes(), (
            Path(folder) / "__0_0.distcp"
        ).read_bytes()


def _metadata() -> list[bytes]:
    data = _dcp_folder()[0]
    found = pickle.loads(data)
    return [data, *(pickle.dumps(found, protocol) for protocol in range(2, 6)), *_torch_pickles()]


PARSERS: Mapping[str, Parser] = {
    parser.name: parser
    for parser in (
        Parser(name="shard file", seeds=_shards, parse=made_shards.open_shard, runs=60_000),
        Parser(name="shard header", seeds=_headers, parse=_parse_header, runs=60_000),
        Parser(name="chunk table", seeds=_tables, parse=_parse_table, runs=600_000),
        Parser(name="compressed chunk", seeds=_frames, parse=_parse_frame, runs=400_000),
        Parser(
            name="commit record",
            seeds=_records,
            parse=functools.partial(decode_record, path="a"),
            runs=500_000,
        ),
        Parser(name="record's body", seeds=_bodies, parse=_parse_body, runs=50_000, is_json=True),
        Parser(name="typed values", seeds=_values, parse=_parse_value, runs=80_000, is_json=True),
        Parser(
            name="intent", seeds=lambda: [_INTENT], parse=_parse_intent, runs=200_000, is_json=True
        ),
        Parser(name="model index", seeds=_indexes, parse=_parse_index, runs=50_000, is_json=True),
        Parser(
            name="mixed-precision file",
            seeds=lambda: _golden("precision_v1/*"),
            parse=_load_precision,
            runs=20_000,
        ),
        Parser(
            name="mixed-precision values",
            seeds=lambda: [_precision_parts()[2]],
            parse=_parse_precision_values,
            runs=5_000,
            is_json=True,
        ),
        Parser(
            name="safetensors file, converted",
            seeds=_foreign_files,
            parse=_parse_safetensors,
            runs=50_000,
        ),
        Parser(
            name="torch.save file, converted",
            seeds=_torch_files,
            parse=_parse_torch_file,
            runs=20_000,
        ),
        Parser(
            name="torch.save pickle, converted",
            seeds=_torch_pickles,
            parse=_parse_torch_pickle,
            runs=8_000,
        ),
        Parser(name="DCP metadata, converted", seeds=_metadata, parse=_parse_dcp, runs=20_000),
    )
}
