"""What the tests of the catalog share: storages that watch, checkpoints made by hand, and ways to
look at what is left behind."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from holdfast.catalog import Catalog
from holdfast.catalog._attempt import Attempt
from holdfast.catalog._committed import utc_now
from holdfast.catalog._placing import box_bounds, placement_of_grid
from holdfast.catalog._shard_write import ArraySource, write_shard
from holdfast.contracts import ObjectInfo, ReadRange
from holdfast.format import (
    CommitRecord,
    CompressionLevel,
    LeafRef,
    ShardEntry,
    StoredFile,
    StoredPlacement,
    StoredTensor,
    dtype_of_numpy,
    encode_record,
    encode_value,
)
from holdfast.reshard import Box, Grid, IndexRuns
from holdfast.storage import MemoryStorage
from holdfast.storage._wrapped import WrappedStorage


class Observed(WrappedStorage):
    """Tells of every call, before and after it; lets the storage's time run ahead by ``age_s``
    for everything that is older than that."""

    def __init__(
        self,
        storage,
        before: Callable[[str, str | None], None] = lambda method, key: None,
        after: Callable[[str, str | None], None] = lambda method, key: None,
    ) -> None:
        super().__init__(storage)
        self.before = before
        self.after = after
        self.ages: dict[str, float] = {}
        self.read_bytes: dict[str, int] = {}
        self._lock = threading.Lock()

    def read_into(self, key: str, ranges: Sequence[ReadRange]) -> None:
        with self._lock:
            size = sum(wanted.into.nbytes for wanted in ranges)
            self.read_bytes[key] = self.read_bytes.get(key, 0) + size
        super().read_into(key, ranges)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for info in super().list(prefix):
            yield self._aged(info)

    def stat(self, key: str) -> ObjectInfo:
        return self._aged(super().stat(key))

    def _aged(self, info: ObjectInfo) -> ObjectInfo:
        age_s = sum(age for part, age in self.ages.items() if part in info.key)
        return replace(info, modified_s=info.modified_s - age_s)

    def _through(self, method, key, call, /):
        self.before(method, key)
        result = call()
        self.after(method, key)
        return result


def aged(storage, **ages: float) -> Catalog:
    """A catalog that sees keys that contain a word (``intent``) as so many seconds older."""
    observed = Observed(storage)
    observed.ages = ages
    return Catalog(observed)


def files_of(storage) -> dict[str, bytes]:
    return {info.key: storage.read(info.key) for info in storage.list()}


def memory_of(files: Mapping[str, bytes]) -> MemoryStorage:
    storage = MemoryStorage()
    for key, data in files.items():
        put(storage, key, data)
    return storage


def put(storage, key: str, data: bytes) -> None:
    """Whatever stood there before."""
    with storage.open_writer(key) as writer:
        writer.write_at(0, data)
        writer.finish()


def reread(record: CommitRecord, **changes) -> bytes:
    """The bytes of a record with some fields changed."""
    return encode_record(msgspec.structs.replace(record, **changes))


@dataclass(frozen=True)
class Part:
    """A box of a tensor, and in which of the files it is to be."""

    box: Box
    file: int


def grid_parts(grid: Grid, files: Sequence[int]) -> list[Part]:
    return [Part(grid.box(cell), files[cell]) for cell in range(grid.cells)]


def write_parts(
    storage,
    prefix: str,
    tensors: Mapping[str, tuple[np.ndarray, Grid | None, Sequence[Part]]],
    *,
    level: CompressionLevel = CompressionLevel.NONE,
    attempt: str = "00000000000000aa",
    created: str | None = None,
    ordinal: int = 1,
    borrowed: Sequence[StoredFile] = (),
    more: Mapping[str, StoredTensor] | None = None,
) -> CommitRecord:
    """Commit a checkpoint as many ranks would write it: one file for each of them.

    ``borrowed`` are files of other checkpoints, ``more`` tensors that stand in them.
    """
    count = max((part.file + 1 for _, _, parts in tensors.values() for part in parts), default=0)
    sources: list[list[ArraySource]] = [[] for _ in range(count)]
    stored: dict[str, StoredTensor] = {}
    for name, (array, grid, parts) in tensors.items():
        code = dtype_of_numpy(array.dtype).code
        whole = Box.whole(array.shape)
        for part in parts:
            entry = ShardEntry(
                name=name,
                dtype=code,
                shape=part.box.shape,
                box=None if part.box == whole else box_bounds(part.box),
            )
            where = tuple(map(slice, part.box.start, part.box.stop))
            sources[part.file].append(ArraySource(entry=entry, array=array[where]))
        runs = IndexRuns.of([part.file for part in parts])
        if grid is not None:
            placement = placement_of_grid(grid, runs)
        else:
            boxes = tuple(tuple(box_bounds(part.box)) for part in parts)
            placement = StoredPlacement(boxes=boxes, files=runs.runs)
        stored[name] = StoredTensor(dtype=code, shape=array.shape, placement=placement)
    files = [
        write_shard(storage, f"{prefix}/shard-{rank}-{attempt}.safetensors", each, level=level).file
        for rank, each in enumerate(sources)
    ]
    refs = {name: LeafRef(kind="array", name=name) for name in [*stored, *(more or {})]}
    record = CommitRecord(
        state="committed",
        ordinal=ordinal,
        attempt=attempt,
        created=created or utc_now(),
        world_size=max(count, 1),
        writer="holdfast test",
        tree=encode_value(refs),
        files=(*files, *borrowed),
        tensors={**stored, **(more or {})},
    )
    storage.create(f"{prefix}/metadata.json", encode_record(record))
    return record


def leftovers(storage) -> list[str]:
    """Every object that belongs to no committed checkpoint. Those that do must all be there."""
    catalog = Catalog(storage)
    named = set()
    for info in catalog.list():
        record = catalog.open(info.prefix)._found.record
        named.add(f"{info.prefix}/metadata.json")
        named |= {f"{file.prefix or info.prefix}/{file.name}" for file in record.files}
    keys = [info.key for info in storage.list()]
    assert named <= set(keys)
    return [key for key in keys if key not in named]


def begun(storage, prefix: str, array: np.ndarray, **options) -> tuple[Attempt, CommitRecord]:
    """An attempt that wrote its only file and has everything to commit."""
    attempt = Attempt.begin(storage, prefix, **options)
    code = dtype_of_numpy(array.dtype).code
    entry = ShardEntry(name="x", dtype=code, shape=array.shape)
    file = write_shard(storage, attempt.shard_key(0), [ArraySource(entry=entry, array=array)]).file
    record = CommitRecord(
        state="committed",
        ordinal=1,
        attempt=attempt.intent.attempt,
        created=utc_now(),
        world_size=1,
        writer="holdfast test",
        tree=encode_value({"x": LeafRef(kind="array", name="x")}),
        files=(file,),
        tensors={
            "x": StoredTensor(
                dtype=code,
                shape=array.shape,
                placement=placement_of_grid(Grid.whole(array.shape), IndexRuns.of([0])),
            )
        },
    )
    return attempt, record
