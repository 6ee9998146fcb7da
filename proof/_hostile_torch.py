"""Hostile files of torch's formats and those of mixed precision, read as ``holdfast convert`` and
``load_checkpoint`` read them, and as their own libraries do.
"""

# ruff: noqa: E501 -- tables of bytes are read as tables

import contextlib
import functools
import io
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from _hostile import _ODD, GOLDEN, Broken, Case
from _hostile_pickles import HARMFUL, RUNNING
from holdfast.cli import _convert
from holdfast.cli._converting.contents import tensors_in
from holdfast.cli._converting.recognising import source_at
from holdfast.precision import load_checkpoint
from holdfast.precision._files import _KIND
from holdfast.precision._sealed_file import read_sealed, write_sealed
from holdfast.storage import LocalStorage

MADE = "made by a pickle"
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19." + b"\x80\x02M\xe9\x03."
_SYSTEM = pickle.dumps({"protocol_version": 1001, "little_endian": True, "type_sizes": {}}, 2)


def converted(name: str, place: Path) -> object:
    """All that ``holdfast convert`` reads of a source."""
    source = source_at(str(place / "root" / name))
    contents = _convert._read(source, source, None, tensors_only=False)
    for _, tensor in tensors_in(contents.tree):
        for _piece in tensor.pieces():
            pass
    return "it was read"


# --- files of torch.save


def archive(members: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """A zip file with the members that torch.save writes, and those given."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", compression) as made:
        for name, each in {"version": b"3\n", "byteorder": b"little", **members}.items():
            made.writestr(f"archive/{name}", each)
    return data.getvalue()


def saved(state: object) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _remade(
    data: bytes, change: Callable[[str, bytes], tuple[str, bytes]], **options: Any
) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(made, "w", **options) as new:
        for each in old.infolist():
            new.writestr(*change(each.filename, old.read(each)))
    return made.getvalue()


def _tensor_pickle(
    key: str = "0", size: int = 4, shape: str = "K\4", strides: str = "K\1"
) -> bytes:
    """The pickle of ``{"w": a tensor}`` with whatever shape, strides and storage."""
    storage = (
        b"(X\7\0\0\0storagectorch\nFloatStorage\nX"
        + struct.pack("<I", len(key))
        + key.encode()
        + b"X\3\0\0\0cpu"
        + b"\x8a\x08"
        + struct.pack("<q", size)
        + b"tQ"
    )
    return (
        b"\x80\x02}X\1\0\0\0wctorch._utils\n_rebuild_tensor_v2\n("
        + storage + b"K\0(" + shape.encode("latin-1") + b"t(" + strides.encode("latin-1")
        + b"t\x89ccollections\nOrderedDict\n)RtRs."
    )  # fmt: skip


def _long(value: int) -> str:
    return (b"\x8a\x08" + struct.pack("<q", value)).decode("latin-1")


def _overlapping_members() -> bytes:
    """Two members that are the same bytes."""
    data = bytearray(
        archive({"data.pkl": _tensor_pickle(), "data/0": bytes(16), "data/1": bytes(16)})
    )
    directory = data.rindex(b"PK\x01\x02")
    data[directory + 42 : directory + 46] = struct.pack("<I", 0)
    return bytes(data)


def _lying_size() -> bytes:
    data = bytearray(archive({"data.pkl": _tensor_pickle(size=2**28), "data/0": bytes(16)}))
    directory = data.rindex(b"PK\x01\x02")
    data[directory + 20 : directory + 28] = struct.pack("<II", 2**30, 2**30)
    return bytes(data)


def _twice(name: str) -> bytes:
    data = io.BytesIO(saved({"w": torch.ones(3)}))
    with zipfile.ZipFile(data, "a") as made, contextlib.suppress(UserWarning):
        made.writestr(name, b"K\1.")
    return data.getvalue()


ARCHIVES: Mapping[str, Callable[[], bytes]] = {
    "no pickle": lambda: archive({"readme": b"words"}),
    "an empty archive": lambda: b"PK\5\6" + bytes(18),
    "only a signature": lambda: b"PK\x03\x04",
    "a signature and zeros": lambda: b"PK\x03\x04" + bytes(5000),
    "a compressed pickle": lambda: archive({"data.pkl": _tensor_pickle()}, zipfile.ZIP_DEFLATED),
    "a bomb": lambda: archive({"data.pkl": b"\x80\x02N." + bytes(2**28)}, zipfile.ZIP_DEFLATED),
    "a bomb of lzma": lambda: archive({"data.pkl": b"\x80\x02N." + bytes(2**26)}, zipfile.ZIP_LZMA),
    "a tensor without its bytes": lambda: archive({"data.pkl": _tensor_pickle()}),
    "a storage of another size": lambda: archive({"data.pkl": _tensor_pickle(size=2**40), "data/0": bytes(16)}),
    "a storage below nothing": lambda: archive({"data.pkl": _tensor_pickle(size=-1), "data/0": bytes(16)}),
    "a storage elsewhere": lambda: archive({"data.pkl": _tensor_pickle("../../../etc/passwd")}),
    "a shape of 2**40": lambda: archive({"data.pkl": _tensor_pickle(shape=_long(2**40)), "data/0": bytes(16)}),
    "a shape of 2**62": lambda: archive({"data.pkl": _tensor_pickle(shape=_long(2**62)), "data/0": bytes(16)}),
    "a shape that wraps": lambda: archive({"data.pkl": _tensor_pickle(shape=_long(4194305) * 2 + _long(211106198978564), strides="K\1" * 3), "data/0": bytes(16)}),
    "a shape below nothing": lambda: archive({"data.pkl": _tensor_pickle(shape=_long(-4)), "data/0": bytes(16)}),
    "strides below nothing": lambda: archive({"data.pkl": _tensor_pickle(strides=_long(-1)), "data/0": bytes(16)}),
    "strides of 2**62": lambda: archive({"data.pkl": _tensor_pickle(strides=_long(2**62)), "data/0": bytes(16)}),
    "more strides than sizes": lambda: archive({"data.pkl": _tensor_pickle(strides="K\1K\1"), "data/0": bytes(16)}),
    "a shape of text": lambda: archive({"data.pkl": _tensor_pickle(shape="X\1\0\0\0a"), "data/0": bytes(16)}),
    "ten dimensions of 2**20 that are one byte": lambda: archive({"data.pkl": _tensor_pickle(shape=_long(2**20) * 3, strides="K\0" * 3), "data/0": bytes(16)}),
    "a tensor of 2**60 that is four bytes": lambda: saved({"w": torch.ones(1).expand(2**30, 2**30)}),
    "members that overlap": _overlapping_members,
    "a member larger than the file": _lying_size,
    "a byte order that is none": lambda: archive({"data.pkl": _tensor_pickle(), "data/0": bytes(16), "byteorder": b"middle"}),
    "a version that is none": lambda: archive({"data.pkl": _tensor_pickle(), "data/0": bytes(16), "version": b"x" * 100_000}),
    "cut in the middle": lambda: saved({"w": torch.randn(1000)})[:2000],
    "cut at the end": lambda: saved({"w": torch.randn(1000)})[:-3],
    "an end twice": lambda: saved({"w": torch.ones(3)}) + b"PK\5\6" + bytes(18),
    "a second pickle above": lambda: _twice("../data.pkl"),
    "fifty thousand members": lambda: archive({f"data/{n}": b"" for n in range(50_000)}),
    "a program of TorchScript": lambda: archive({"data.pkl": _tensor_pickle(), "constants.pkl": b"\x80\x02).", "code/__torch__.py": b"import os"}),
    "members of a folder above": lambda: _remade(saved({"w": torch.ones(3)}), lambda name, data: ("../" + name, data)),
    "names that are absolute": lambda: _remade(saved({"w": torch.ones(3)}), lambda name, data: ("/etc/" + name, data)),
}  # fmt: skip


def _may_be_read(what: str) -> bool:
    """Not all that is odd is wrong: a few are what they say, only oddly said."""
    return what in {
        "a byte order that is none",
        "a version that is none",
        "a second pickle above",
        "an end twice",
        "members that overlap",
        "members of a folder above",
        "names that are absolute",
        "a dtype as a state",
        "one million empty tuples",
        "a generator that is set",
        "a number of a million digits",
        "a hundred thousand marks",
        "a size of minus one",
        "a storage of another size",
        "a storage below nothing",
        "strides below nothing",
    }


def _always(data: bytes) -> Callable[[str], bytes]:
    return lambda _: data


def _in_archive(make: Callable[[str], bytes], made: str) -> bytes:
    return archive({"data.pkl": make(made)})


def _in_legacy(make: Callable[[str], bytes], made: str) -> bytes:
    return _LEGACY + _SYSTEM + make(made)


def _built(build: Callable[[], bytes], _: str) -> bytes:
    return build()


def torch_files() -> Iterator[tuple[str, str, Callable[[str], bytes]]]:
    """Name, name of the file, and its bytes from the folder that a pickle is to make."""
    for what, make in RUNNING.items():
        yield f"archive: {what}", "a.pt", functools.partial(_in_archive, make)
        yield f"legacy: {what}", "a.pt", functools.partial(_in_legacy, make)
    for what, data in HARMFUL.items():
        yield f"archive: {what}", "a.pt", functools.partial(_in_archive, _always(data))
        yield f"legacy: {what}", "a.pt", functools.partial(_in_legacy, _always(data))
    for what, build in ARCHIVES.items():
        yield f"archive: {what}", "a.pt", functools.partial(_built, build)
    yield (
        "legacy: keys that are a pickle",
        "a.pt",
        lambda made: _LEGACY + _SYSTEM + pickle.dumps({}, 2) + RUNNING["os.mkdir"](made),
    )
    yield (
        "legacy: a system that is a pickle",
        "a.pt",
        lambda made: _LEGACY + RUNNING["os.mkdir"](made),
    )
    yield (
        "legacy: a protocol that is none",
        "a.pt",
        lambda _: _LEGACY[:15] + pickle.dumps(7, 2) + _SYSTEM + b"\x80\x02}.",
    )


def _legacy(state: object) -> bytes:
    file = io.BytesIO()
    torch.save(state, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


def planted_file(name: str, make: Callable[[str], bytes], place: Path) -> None:
    (place / "root").mkdir()
    (place / "root" / name).write_bytes(make(str(place / "outside" / MADE)))


def from_torch() -> Iterator[Case]:
    for what, name, make in torch_files():
        yield Case(
            name=f"torch {what}",
            plant=functools.partial(planted_file, name, make),
            read=functools.partial(converted, name),
            may_read=_may_be_read(what.partition(": ")[2]),
        )


# --- folders of DCP


def _whole_folder(place: Path) -> Any:
    """A folder that is good, and its metadata."""
    folder = place / "root" / "a"
    folder.mkdir(parents=True)
    data = saved(torch.ones(4))
    (folder / "__0_0.distcp").write_bytes(data)
    chunk = metadata.ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))
    kind = metadata.TensorStorageMetadata(metadata.TensorProperties(), torch.Size([4]), [chunk])
    index = metadata.MetadataIndex("w", torch.Size([0]), 0)
    info = filesystem._StorageInfo("__0_0.distcp", 0, len(data))
    return metadata.Metadata({"w": kind}, storage_data={index: info})


def _write_metadata(place: Path, data: bytes) -> None:
    folder = place / "root" / "a"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".metadata").write_bytes(data)


def _plant_dcp_pickle(make: Callable[[str], bytes], place: Path) -> None:
    _write_metadata(place, make(str(place / "outside" / MADE)))


def _plant_dcp_value(make: Callable[[str], bytes], place: Path) -> None:
    _plant_value(archive({"data.pkl": make(str(place / "outside" / MADE))}), place)


def _plant_chunk(build: Callable[[], bytes], place: Path) -> None:
    """A file in the place of that with a chunk of a tensor."""
    found = _whole_folder(place)
    data = build()
    (place / "root" / "a" / "__0_0.distcp").write_bytes(data)
    _at(found, length=len(data))
    _write_metadata(place, pickle.dumps(found))


def _plant_value(data: bytes, place: Path) -> None:
    found = _whole_folder(place)
    (place / "root" / "a" / "__0_1.distcp").write_bytes(data)
    found.state_dict_metadata["x"] = metadata.BytesStorageMetadata()
    info = filesystem._StorageInfo("__0_1.distcp", 0, len(data))
    found.storage_data[metadata.MetadataIndex("x")] = info
    _write_metadata(place, pickle.dumps(found))


def _info(name: str = "__0_0.distcp", offset: int = 0, length: int = 1) -> Any:
    return filesystem._StorageInfo(name, offset, length)


def _at(found: Any, **info: Any) -> None:
    for index in found.storage_data:
        found.storage_data[index] = _info(**info)


def _sized(found: Any, *sizes: int) -> None:
    kind = found.state_dict_metadata["w"]
    kind.size = _Sizes(sizes)
    kind.chunks = [metadata.ChunkStorageMetadata(_Sizes([0] * len(sizes)), _Sizes(sizes))]
    info = next(iter(found.storage_data.values()))
    found.storage_data = {metadata.MetadataIndex("w", _Sizes([0] * len(sizes))): info}


class _Sizes(tuple[int, ...]):
    """Is pickled as ``torch.Size``, which refuses some numbers when it is made here."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        return torch.Size, (list(self),)


def _chunks(found: Any, *boxes: tuple[int, int]) -> None:
    kind = found.state_dict_metadata["w"]
    info = next(iter(found.storage_data.values()))
    kind.chunks = [
        metadata.ChunkStorageMetadata(_Sizes([start]), _Sizes([size])) for start, size in boxes
    ]
    found.storage_data = {metadata.MetadataIndex("w", _Sizes([start])): info for start, _ in boxes}


def _planned(found: Any, *path: object) -> None:
    found.planner_data = {"w": path}


def _many_chunks(found: Any, count: int) -> None:
    found.state_dict_metadata["w"].size = _Sizes([count])
    _chunks(found, *((start, 1) for start in range(count)))


FOLDERS: Mapping[str, Callable[[Any], object]] = {
    "a file above": lambda found: _at(found, name="../../outside/secret"),
    "a file by an absolute name": lambda found: _at(found, name="/etc/passwd"),
    "a file that is not there": lambda found: _at(found, name="__9_0.distcp"),
    "a file that is a folder": lambda found: _at(found, name="."),
    "a file of no name": lambda found: _at(found, name=""),
    "a name with a NUL": lambda found: _at(found, name="a\0b"),
    "a name of a million characters": lambda found: _at(found, name="a" * 10**6),
    "a name that is a number": lambda found: _at(found, name=7),
    "an offset below nothing": lambda found: _at(found, offset=-1, length=100),
    "an offset beyond": lambda found: _at(found, offset=2**62, length=1),
    "an offset that is a text": lambda found: _at(found, offset="0", length=1),
    "a length of 2**62": lambda found: _at(found, length=2**62),
    "a length below nothing": lambda found: _at(found, length=-5),
    "a length of nothing": lambda found: _at(found, length=0),
    "a place that is a number": lambda found: found.storage_data.update(dict.fromkeys(found.storage_data, 7)),
    "no places": lambda found: setattr(found, "storage_data", None),
    "places that are a list": lambda found: setattr(found, "storage_data", [1, 2]),
    "a shape below nothing": lambda found: _sized(found, -4),
    "a shape of 2**62": lambda found: _sized(found, 2**62),
    "a shape that wraps": lambda found: _sized(found, 4194305, 4194305, 211106198978564),
    "a shape of another size": lambda found: _sized(found, 5),
    "a shape of 100 dimensions": lambda found: _sized(found, *[1] * 100),
    "a shape that is None": lambda found: setattr(found.state_dict_metadata["w"], "size", None),
    "no chunks": _chunks,
    "chunks that overlap": lambda found: _chunks(found, (0, 4), (0, 4)),
    "chunks with a hole": lambda found: _chunks(found, (0, 1), (2, 2)),
    "a chunk beyond": lambda found: _chunks(found, (2, 4)),
    "a chunk below nothing": lambda found: _chunks(found, (-1, 4)),
    "fifty thousand chunks": lambda found: _many_chunks(found, 50_000),
    "chunks that are a number": lambda found: setattr(found.state_dict_metadata["w"], "chunks", 7),
    "properties that are none": lambda found: setattr(found.state_dict_metadata["w"], "properties", None),
    "a dtype that is none": lambda found: setattr(found.state_dict_metadata["w"].properties, "dtype", "F32"),
    "a quantized dtype": lambda found: setattr(found.state_dict_metadata["w"].properties, "dtype", torch.qint8),
    "a kind that is none": lambda found: found.state_dict_metadata.update(w=7),
    "a state that is a list": lambda found: setattr(found, "state_dict_metadata", [1]),
    "a name that is a tuple": lambda found: found.state_dict_metadata.update({(1, 2): 7}),
    "a path that is too long a list": lambda found: _planned(found, "a", 10**12),
    "a path below nothing": lambda found: _planned(found, "a", -1),
    "a path of nothing": _planned,
    "a path of many steps": lambda found: _planned(found, *["a"] * 100_000),
    "a path of a tuple": lambda found: _planned(found, ("a", "b")),
    "paths that are a list": lambda found: setattr(found, "planner_data", [1]),
    "paths of other names": lambda found: setattr(found, "planner_data", {"v": ("v",)}),
    "an extension": lambda found: setattr(next(iter(found.storage_data.values())), "transform_descriptors", ["zstd"]),
}  # fmt: skip


def _plant_dcp(change: Callable[[Any], object], place: Path) -> None:
    found = _whole_folder(place)
    (place / "outside" / "secret").write_bytes(saved(torch.ones(4)))
    change(found)
    _write_metadata(place, pickle.dumps(found))


def dcp_cases() -> Iterator[tuple[str, Callable[[Path], None]]]:
    for what, make in RUNNING.items():
        yield f"metadata: {what}", functools.partial(_plant_dcp_pickle, make)
        yield f"value: {what}", functools.partial(_plant_dcp_value, make)
    for what, data in HARMFUL.items():
        yield f"metadata: {what}", functools.partial(_plant_dcp_pickle, _always(data))
        yield f"value: {what}", functools.partial(_plant_dcp_value, _always(data))
    huge = saved({"w": torch.ones(1).expand(2**30, 2**30)})
    yield "value: a tensor of 2**60 that is four bytes", functools.partial(_plant_value, huge)
    for what, build in ARCHIVES.items():
        yield f"chunk: {what}", functools.partial(_plant_chunk, build)
    for what, change in FOLDERS.items():
        yield f"folder: {what}", functools.partial(_plant_dcp, change)


def from_dcp() -> Iterator[Case]:
    for what, plant in dcp_cases():
        kind, _, name = what.partition(": ")
        yield Case(
            name=f"DCP {what}",
            plant=plant,
            read=functools.partial(converted, "a"),
            may_read=(kind == "value" and _may_be_read(name)) or name == "fifty thousand chunks",
        )


# --- Hugging Face folders


_INDEXES: Mapping[str, bytes] = {
    "a file above": b'{"weight_map":{"w":"../outside/secret.safetensors"}}',
    "a file by an absolute name": b'{"weight_map":{"w":"/etc/passwd"}}',
    "a file of no name": b'{"weight_map":{"w":""}}',
    "the folder itself": b'{"weight_map":{"w":"."}}',
    "a name with a NUL": b'{"weight_map":{"w":"a\\u0000b"}}',
    "a name that is too long": b'{"weight_map":{"w":"' + b"a" * 5000 + b'"}}',
    "a file that is not there": b'{"weight_map":{"w":"b.safetensors"}}',
    "a tensor that is not there": b'{"weight_map":{"v":"model.safetensors"}}',
    "itself": b'{"weight_map":{"w":"model.safetensors.index.json"}}',
    "a number": b'{"weight_map":{"w":7}}',
    "no map": b"{}",
    "a list": b"[]",
    "deep JSON": b'{"weight_map":' + b"[" * 200_000,
    "deep JSON in what is not looked at": b'{"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "no JSON": b"\xff\xfe",
    "a pickle": RUNNING["os.system"]("/nonexistent"),
    "empty": b"",
    "a lone surrogate": b'{"weight_map":{"w":"\\ud800"}}',
    "a million tensors": b'{"weight_map":{%s}}' % b",".join(b'"t%d":"model.safetensors"' % n for n in range(10**6)),
    "70 MiB": b" " * (70 * 1024 * 1024),
}  # fmt: skip


def _plant_index(index: bytes, place: Path) -> None:
    folder = place / "root" / "a"
    folder.mkdir(parents=True)
    source = next((GOLDEN / "v1" / "consolidated").glob("model-00001*.safetensors"))
    shutil.copyfile(source, folder / "model.safetensors")
    (folder / "model.safetensors.index.json").write_bytes(index)
    shutil.copyfile(source, place / "outside" / "secret.safetensors")


def from_hugging_face() -> Iterator[Case]:
    for what, index in _INDEXES.items():
        yield Case(
            name=f"index: {what}",
            plant=functools.partial(_plant_index, index),
            read=functools.partial(converted, "a"),
        )


# --- files of mixed precision

_CHANGES: Mapping[str, Mapping[str, object]] = {
    "a precision that is none": {"options": {"precision": "fp17"}},
    "options that are a list": {"options": [1]},
    "a scale below nothing": {"scaler": {"scale": -1.0}},
    "a scale that is no number": {"scaler": {"scale": float("nan")}},
    "steps in words": {"step_count": "three"},
        "steps below nothing": {"skipped_steps": -1},
    "no masters": {"master_weights": {}},
    "masters that are numbers": {"master_weights": {"0.weight": 3}},
    "masters of text": {"master_weights": "all"},
    "weights of another shape": {"training_weights": {"0.weight": torch.ones(1)}},
    "no optimizer": {"base_optimizer_state": {}},
    "an optimizer of nobody": {"base_optimizer_state": {"class": "os.system", "state": {}, "groups": []}},
    "groups of other names": {"base_optimizer_state": {"class": "SGD", "state": {}, "groups": [{"params": ["x"]}]}},
    "groups that are numbers": {"base_optimizer_state": {"class": "AdamW", "state": {}, "groups": [3]}},
    "no metadata": {"metadata": None},
    "a tensor for the options": {"options": torch.ones(2)},
    "a tensor for the time": {"timestamp": torch.ones(2)},
    "a time that is a number": {"timestamp": 3},
    "a field that nobody knows": {"more": 1},
}  # fmt: skip


def _plant_values(change: Mapping[str, object], place: Path) -> None:
    storage = LocalStorage(GOLDEN / "precision_v1")
    _, tree = read_sealed(storage, "adamw.safetensors", kind=_KIND, newest=1)
    (place / "root").mkdir()
    made = LocalStorage(place / "root")
    write_sealed(made, "a", {**tree, **change}, kind=_KIND, version=1)


def _plant_bytes(make: Callable[[bytes], bytes], place: Path) -> None:
    (place / "root").mkdir()
    golden = (GOLDEN / "precision_v1" / "adamw.safetensors").read_bytes()
    (place / "root" / "a").write_bytes(make(golden))


def _plant_odd(make: Callable[[Path, Path], None], place: Path) -> None:
    _plant_bytes(lambda data: data, place)
    make(place / "root" / "a", place / "outside")


_BYTES: Mapping[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "a header of 2**63": lambda data: (2**63).to_bytes(8, "little") + data[8:],
    "a header of 32 MiB": lambda data: (2**25).to_bytes(8, "little") + data[8:],
    "cut": lambda data: data[:-1],
    "cut in its header": lambda data: data[:100],
    "longer": lambda data: data + b"\0",
    "a bit of its header": lambda data: data[:60] + bytes([data[60] ^ 1]) + data[61:],
    "a bit of its middle": lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:],
    "zeros": lambda data: bytes(len(data)),
    "a zip": lambda _: saved({"w": torch.ones(3)}),
    "a pickle": lambda _: RUNNING["os.system"]("/nonexistent"),
    "another format's": lambda _: (GOLDEN / "v1/plain/shard-0-0000000000000001.safetensors").read_bytes(),
    "twice": lambda data: data * 2,
    "its halves turned": lambda data: data[4096:] + data[:4096],
}  # fmt: skip


def _load(place: Path) -> object:
    return load_checkpoint(place / "root" / "a")


def from_precision() -> Iterator[Case]:
    for what, change in _CHANGES.items():
        plant = functools.partial(_plant_values, change)
        yield Case(name=f"precision: {what}", plant=plant, read=_load)
    for what, make in _BYTES.items():
        plant = functools.partial(_plant_bytes, make)
        yield Case(name=f"precision: {what}", plant=plant, read=_load)
    for what, odd in _ODD.items():
        # A path that a user names may be a link of the user's: it is followed.
        yield Case(
            name=f"precision: {what}",
            plant=functools.partial(_plant_odd, odd),
            read=_load,
            may_read="link out of the root" in what,
        )


def torch_cases() -> list[Case]:
    makers = (from_torch, from_dcp, from_hugging_face, from_precision)
    return [case for make in makers for case in make()]


__all__ = ["Broken", "dcp_cases", "planted_file", "torch_cases", "torch_files"]
