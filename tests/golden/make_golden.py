"""Makes the golden checkpoints of format 1, and what is expected of them.

    python tests/golden/make_golden.py tests/golden/v1

Everything is fixed, the time and the attempts included, so that it makes the same bytes each time;
only compressed files may differ with another version of zstandard. Files of a released format are
never made again: they show that what was written once is read for ever. A new format gets a new
folder beside ``v1``.
"""

import datetime as dt
import enum
import hashlib
import json
import math
import pathlib
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from holdfast.catalog import Catalog
from holdfast.catalog._model_index import write_index
from holdfast.catalog._names import model_name, shard_name, table_name
from holdfast.catalog._shard_write import ArraySource, write_shard
from holdfast.format import (
    CHUNK_BYTES,
    CommitRecord,
    CompressionLevel,
    LeafRef,
    PerRank,
    ShardEntry,
    StoredCut,
    StoredFile,
    StoredPlacement,
    StoredTensor,
    encode_record,
    encode_value,
    numpy_dtype,
)
from holdfast.format._dtypes import DTYPES
from holdfast.storage import MemoryStorage

CREATED = "2026-01-31T12:00:00.123Z"
WRITER = "holdfast golden"
COMPRESSED = {level.value: level for level in CompressionLevel if level.value != "none"}


class Colour(enum.Enum):
    RED = "red"


VALUES = {
    "none": None,
    "bools": [True, False],
    "ints": [0, -1, 2**63 - 1, -(2**63), 2**63, -(2**200)],
    "floats": [0.0, -0.0, 0.1, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, math.nan],
    "texts": ["", "plain", "größe 日本 \N{GRINNING FACE}", "\0\n\x7f", "\ud800"],
    "bytes": [b"", b"\0\xff"],
    "complex": [1j, complex(math.nan, -0.0)],
    "tuple": (1, (2, ())),
    "dict with any keys": {1: "int", "1": "text", (2, None): "tuple", 1.5: "float", b"k": "bytes"},
    "dict with the tag": {"$": ["tuple", []]},
    "ordered": OrderedDict([("b", 1), ("a", 2)]),
    "counter": Counter({"x": 2}),
    "default": defaultdict(list, {"k": [1]}),
    "default of nothing": defaultdict(None, {}),
    "deque": deque([1, 2], maxlen=5),
    "set": {7},
    "frozenset": frozenset({"only"}),
    "enum": Colour.RED,
    "path": pathlib.PurePosixPath("runs/a.b"),
    "windows path": pathlib.PureWindowsPath("C:\\runs"),
    "times": [
        dt.datetime(2026, 1, 31, 12, 0, 0, 5, dt.UTC),
        dt.datetime(2026, 1, 31, 12, fold=1),  # noqa: DTZ001 -- one without a zone
        dt.date(1, 1, 1),
        dt.time(23, 59, 59, 999_999),
        dt.timedelta(-1, 2, 3),
    ],
    "numpy scalars": [
        np.float32(0.1),
        np.int64(-5),
        np.bool_(True),
        np.complex128(1 - 2j),
        np.datetime64("2026-01-31", "D"),
        np.str_("text"),
        ml_dtypes.bfloat16(1.5),
    ],
    "inline arrays": [
        np.array(["ab", "c"]),
        np.array([b"ab", b"c"]),
        np.array(["2026-01-31"], "datetime64[D]"),
        np.array([[1, -2]], ml_dtypes.int4),
    ],
}


def raw_bytes(count: int, seed: int) -> np.ndarray:
    """Bytes that no version of NumPy makes otherwise."""
    blocks = [hashlib.sha256(f"{seed} {i}".encode()).digest() for i in range(-(-count // 32))]
    return np.frombuffer(b"".join(blocks)[:count], np.uint8)


def array_of(code: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """An array of any dtype of the format; ``uint8`` with one more dimension if NumPy has none."""
    dtype = DTYPES[code]
    raw = raw_bytes(math.prod(shape) * dtype.itemsize, seed)
    if code == "BOOL":
        raw = raw & 1
    return raw.view(numpy_dtype(code)).reshape((*shape, *dtype.numpy_tail))


@dataclass(frozen=True)
class Tensor:
    """A tensor, its boxes (``None``: the whole) and the file of each; cuts if they are a grid."""

    code: str
    array: np.ndarray
    boxes: tuple[tuple[tuple[int, int], ...] | None, ...] = (None,)
    files: tuple[tuple[int, int, int], ...] = ((0, 0, 1),)
    cuts: tuple[StoredCut, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        tail = len(DTYPES[self.code].numpy_tail)
        return self.array.shape[: self.array.ndim - tail]

    def placement(self) -> StoredPlacement:
        if self.boxes == (None,):
            return StoredPlacement(
                cuts=tuple(StoredCut(step=n) for n in self.shape), files=self.files
            )
        if self.cuts is not None:
            return StoredPlacement(cuts=self.cuts, files=self.files)
        return StoredPlacement(boxes=self.boxes, files=self.files)


def commit(storage, number, prefix, tensors, *, level=CompressionLevel.NONE, models=0, **facts):
    """Write the files and the record of one checkpoint, the first ``models`` of them as those of
    the Hugging Face layout."""
    attempt = f"{number:016x}"
    sources: dict[int, list[ArraySource]] = {}
    for name, tensor in tensors.items():
        files = [first + step * i for first, step, count in tensor.files for i in range(count)]
        for box, index in zip(tensor.boxes, files, strict=True):
            part = (
                tensor.array if box is None else tensor.array[tuple(slice(*ends) for ends in box)]
            )
            shape = tensor.shape if box is None else tuple(stop - start for start, stop in box)
            entry = ShardEntry(name=name, dtype=tensor.code, shape=shape, box=box)
            sources.setdefault(index, []).append(ArraySource(entry=entry, array=part))
    stored = []
    for i in sorted(sources):
        model = i < models
        key = f"{prefix}/{model_name(i + 1, models, attempt) if model else shard_name(i, attempt)}"
        written = write_shard(
            storage,
            key,
            sources[i],
            level=level,
            metadata={"format": "pt"} if model else None,
            table_key=table_name(key) if model else None,
        )
        stored.append(written.file)
    tree = facts.pop("tree", {name: LeafRef(kind="array", name=name) for name in tensors})
    record = CommitRecord(
        state="committed",
        ordinal=number,
        attempt=attempt,
        created=CREATED,
        world_size=max(1, len(stored)),
        writer=WRITER,
        tree=encode_value(tree),
        files=(*stored, *facts.pop("borrowed", ())),
        tensors={
            **{
                name: StoredTensor(dtype=t.code, shape=t.shape, placement=t.placement())
                for name, t in tensors.items()
            },
            **facts.pop("more", {}),
        },
        **facts,
    )
    write_index(storage, prefix, record)
    storage.create(f"{prefix}/metadata.json", encode_record(record))
    return record


def plain() -> dict[str, Tensor]:
    tensors = {}
    for seed, code in enumerate(DTYPES):
        tensors[f"some {code}"] = Tensor(code, array_of(code, (3, 5), seed))
        tensors[f"scalar {code}"] = Tensor(code, array_of(code, (), seed))
        tensors[f"none {code}"] = Tensor(code, array_of(code, (2, 0, 3), seed))
    for name in ["x[0:2]", "[]", "__metadata__", "__holdfast_chunks__", "größe/日本"]:
        tensors[name] = Tensor("I16", array_of("I16", (2,), len(name)))
    return tensors


def sliced() -> dict[str, Tensor]:
    grid = tuple(((r, r + 2), (c, c + 3)) for r in (0, 2) for c in (0, 3, 6))
    uneven = (((0, 1),), ((1, 4),), ((4, 5),), ((5, 9),))
    odd = (((0, 2), (0, 4)), ((2, 4), (0, 1)), ((2, 4), (1, 4)))
    steps, at = (StoredCut(step=2), StoredCut(step=3)), (StoredCut(at=((1, 3, 2), (5, 0, 1))),)
    return {
        "grid": Tensor("F32", array_of("F32", (4, 9), 1), grid, ((0, 1, 3), (3, -1, 3)), steps),
        "uneven": Tensor("BF16", array_of("BF16", (9,), 2), uneven, ((0, 1, 4),), at),
        "boxes": Tensor("C128", array_of("C128", (4, 4), 3), odd, ((2, -1, 3),)),
        "whole": Tensor("U8", array_of("U8", (7,), 4), files=((3, 0, 1),)),
    }


def of_ranks() -> dict[str, Tensor]:
    return {
        f"rng.@{rank}.state": Tensor("U8", array_of("U8", (9,), rank), files=((rank, 0, 1),))
        for rank in range(2)
    }


def consolidated() -> dict[str, Tensor]:
    grid = (((0, 2), (0, 3)), ((2, 4), (0, 3)))
    rows = (StoredCut(step=2), StoredCut(step=3))
    return {
        "embed.weight": Tensor("BF16", array_of("BF16", (4, 3), 8)),
        "x[0:2]": Tensor("F32", array_of("F32", (2,), 9)),
        "head.weight": Tensor("BF16", array_of("BF16", (4, 3), 8), files=((1, 0, 1),)),
        "optimizer.state.embed.weight.exp_avg": Tensor(
            "F32", array_of("F32", (4, 3), 7), grid, ((2, 1, 2),), rows
        ),
    }


def compressible() -> dict[str, Tensor]:
    steps = np.arange(2 * CHUNK_BYTES // 4 + 1000, dtype=np.int32) // 1000
    ones = np.ones(5000, np.float32)
    return {
        "several chunks": Tensor("I32", steps),
        "weights": Tensor("BF16", (array_of("I8", (4000,), 5) / 64).astype(ml_dtypes.bfloat16)),
        "ones": Tensor("F32", ones),
        "flags": Tensor("BOOL", ones.astype(np.bool_)),
        "incompressible": Tensor("U8", array_of("U8", (3000,), 6)),
        "complex": Tensor("C128", np.zeros(300, np.complex128)),
        "scalar": Tensor("F64", np.array(0.5)),
        "none": Tensor("F64", np.zeros((0, 3))),
    }


def make(storage) -> None:
    """Every golden checkpoint of format 1."""
    base = commit(storage, 1, "plain", plain())
    commit(storage, 2, "sliced", sliced())
    for number, (name, level) in enumerate(COMPRESSED.items(), 3):
        commit(storage, number, f"compressed/{name}", compressible(), level=level)
    metrics = {"loss": 0.25, "steps": 7, "nan": math.nan, "inf": -math.inf}
    facts = {"step": 12, "metrics": metrics, "fence": 2, "shard_format": "single_file"}
    commit(storage, 6, "values", {}, tree=VALUES, custom=encode_value(VALUES), **facts)
    (file,) = base.files
    borrowed = StoredFile(
        name=file.name, size_bytes=file.size_bytes, digest=file.digest, prefix="plain"
    )
    some = {name: base.tensors[name] for name in ("some F32", "some BF16")}
    tree = {name: LeafRef(kind="tensor", name=name) for name in some}
    commit(storage, 7, "reference", {}, borrowed=[borrowed], more=some, tree=tree)
    tombstone = CommitRecord(
        state="tombstone",
        ordinal=0,
        attempt=f"{8:016x}",
        created=CREATED,
        world_size=1,
        writer=WRITER,
        fence=1,
    )
    storage.create("tombstone/metadata.json", encode_record(tombstone))
    states = [LeafRef(kind="array", name=name) for name in of_ranks()]
    values = PerRank(({"state": states[0], "spare": None}, {"state": states[1], "spare": 0.5}))
    commit(storage, 9, "ranks", of_ranks(), tree={"rng": values, "step": 3})
    commit(storage, 10, "consolidated", consolidated(), models=2, shard_format="consolidated")


def expected(catalog: Catalog) -> dict[str, object]:
    """What reading them gives, by digests, and the values by what Python prints of them."""
    found = {}
    for info in sorted(catalog.list(), key=lambda info: info.prefix):
        opened = catalog.open(info.prefix)
        found[info.prefix] = {
            "info": repr(info),
            "custom": repr(opened.custom),
            "tree": "" if opened.tensors else repr(opened.read_tree()),
            "tensors": {
                name: [
                    opened.tensors[name].dtype,
                    list(opened.tensors[name].shape),
                    str(array.dtype),
                    hashlib.sha256(array.tobytes()).hexdigest(),
                ]
                for name, array in opened.read_all().items()
            },
        }
    return found


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    if folder.exists():
        sys.exit(f"{folder} exists: golden files are never made again, only added to")
    golden = MemoryStorage()
    make(golden)
    for info in golden.list():
        path = folder / info.key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(golden.read(info.key))
    text = json.dumps(expected(Catalog(golden)), indent=1, ensure_ascii=True)
    (folder / "expected.json").write_text(text + "\n")
