"""Writes a tree of values and NumPy arrays as one checkpoint, from one process.

Knows how leaves become shards and shards a record. The commit itself is ``_attempt``'s.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

import holdfast
from holdfast.catalog._attempt import Attempt
from holdfast.catalog._committed import COMMITTED, utc_now
from holdfast.catalog._placing import box_bounds, placement_of_boxes
from holdfast.catalog._shard_write import (
    ArraySource,
    Source,
    Tick,
    WrittenShard,
    raw_bytes,
    write_shard,
)
from holdfast.contracts import SMALL_OBJECT_BYTES, Storage
from holdfast.errors import SaveError
from holdfast.format import (
    CommitRecord,
    CompressionLevel,
    LeafRef,
    ShardEntry,
    StoredFile,
    StoredTensor,
    ValuePath,
    dtype_of_numpy,
    encode_value,
)
from holdfast.reshard import Box, IndexRuns, split_box

COMPRESSED_FILE_BYTES: Final = 64 * 1024 * 1024
"""Raw bytes after which a compressed file is closed: it is held in memory until its header, which
comes first, is known."""

PLAIN_FILE_BYTES: Final = 64 * 1024 * 1024 * 1024
"""Bytes after which any other file is closed: object stores have a largest object, and a file that
is damaged or has to be written again should not be everything."""

MULTI_SHARD: Final = "multi_shard"
"""The record's word for a checkpoint of any number of files from any number of ranks."""

_HEADER_BYTES: Final = 16 * 1024 * 1024
_ENTRY_HEADER_BYTES: Final = 160
_NAME_CHARS: Final = 1000

Array = npt.NDArray[np.generic]


class Retry(Protocol):
    """``FaultToleranceHandler.execute_with_retry``."""

    def __call__(self, operation: Callable[[], WrittenShard], /) -> WrittenShard: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a checkpoint says of itself beside its state, each already fit for the record."""

    step: int | None = None
    metrics: Mapping[str, float] | None = None
    custom: object = None


def collect_leaves(state: object) -> tuple[object, dict[str, Array]]:
    """The tree as the record keeps it, and the arrays it refers to by name.

    A leaf is called after its place, ``model.weight`` for ``state["model"]["weight"]``; if that
    is taken, ``~2`` and so on is added. ``SaveError`` for what cannot be stored.
    """
    leaves: dict[str, Array] = {}

    def leaf(path: ValuePath, value: object) -> LeafRef | None:
        array = storable_array(value)
        if array is None:
            return None
        name = _free_name(_leaf_name(path), leaves)
        leaves[name] = array
        return LeafRef(kind="array", name=name)

    return encode_value(state, leaf=leaf), leaves


def write_leaves(
    storage: Storage,
    attempt: Attempt,
    leaves: Mapping[str, Array],
    *,
    level: CompressionLevel,
    tick: Tick,
    retry: Retry,
) -> tuple[list[StoredFile], dict[str, StoredTensor]]:
    """Write every leaf, a file again if ``retry`` says so. Nothing exists yet for others when
    this returns."""
    files: list[StoredFile] = []
    placed: dict[str, list[tuple[Box, int]]] = {name: [] for name in leaves}
    for part, sources in enumerate(grouped(_sources(leaves, level), level)):
        key = attempt.shard_key(0, part)
        arrays = [source.source for source in sources]
        written = retry(partial(write_shard, storage, key, arrays, level=level, tick=tick))
        files.append(written.file)
        for source in sources:
            placed[source.name].append((source.box, part))
    tensors = {}
    for name, boxes in placed.items():
        shape = leaves[name].shape
        runs = IndexRuns.of([part for _, part in boxes])
        placement = placement_of_boxes(shape, [box for box, _ in boxes], runs)
        code = dtype_of_numpy(leaves[name].dtype).code
        tensors[name] = StoredTensor(dtype=code, shape=shape, placement=placement)
    return files, tensors


def check_record_size(tree: object, custom: object, storage: Storage, prefix: str) -> None:
    """``SaveError`` if the values beside the arrays are too many for a commit record."""
    size = sum(len(msgspec.json.encode(value)) for value in (tree, custom))
    if size > SMALL_OBJECT_BYTES:
        raise SaveError(
            f"the values beside the arrays take {size} bytes, and a commit record holds "
            f"{SMALL_OBJECT_BYTES}; nothing was written. Store what is large as an array, text as "
            "np.frombuffer(text.encode(), np.uint8)",
            path=f"{storage.url}/{prefix}",
        )


def record_of(
    attempt: Attempt,
    facts: Facts,
    *,
    tree: object,
    files: Sequence[StoredFile],
    tensors: Mapping[str, StoredTensor],
    world_size: int = 1,
    shard_format: str = MULTI_SHARD,
) -> CommitRecord:
    """The commit record of a checkpoint that ``world_size`` ranks wrote. Its ordinal is the
    commit's."""
    return CommitRecord(
        state=COMMITTED,
        ordinal=0,
        attempt=attempt.intent.attempt,
        created=utc_now(),
        world_size=world_size,
        writer=f"holdfast {holdfast.__version__}",
        step=facts.step,
        metrics=dict(facts.metrics or {}),
        custom=facts.custom,
        tree=tree,
        shard_format=shard_format,
        files=tuple(files),
        tensors=dict(tensors),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxSource:
    """A box of a leaf, and where its bytes come from."""

    name: str
    box: Box
    source: Source


def grouped(
    sources: Iterable[BoxSource], level: CompressionLevel, limit: int | None = None
) -> Iterator[list[BoxSource]]:
    """What goes into one file, file by file. ``limit`` is other than the level's own."""
    limit = file_bytes(level) if limit is None else limit
    file: list[BoxSource] = []
    size = header = 0
    for source in sources:
        nbytes = raw_bytes(source.source.entry)
        named = _ENTRY_HEADER_BYTES + 6 * len(source.name)
        if file and (size + nbytes > limit or header + named > _HEADER_BYTES):
            yield file
            file, size, header = [], 0, 0
        file.append(source)
        size += nbytes
        header += named
    if file:
        yield file


def file_bytes(level: CompressionLevel) -> int:
    return PLAIN_FILE_BYTES if level is CompressionLevel.NONE else COMPRESSED_FILE_BYTES


def _sources(leaves: Mapping[str, Array], level: CompressionLevel) -> Iterator[BoxSource]:
    for name, array in leaves.items():
        whole = Box.whole(array.shape)
        dtype = dtype_of_numpy(array.dtype)
        for box in split_box(whole, file_bytes(level) // dtype.itemsize):
            where = tuple(map(slice, box.start, box.stop))
            entry = ShardEntry(
                name=name,
                dtype=dtype.code,
                shape=box.shape,
                box=None if box == whole else box_bounds(box),
            )
            yield BoxSource(name=name, box=box, source=ArraySource(entry=entry, array=array[where]))


def storable_array(value: object) -> Array | None:
    """``value`` as an array for a shard, in this machine's byte order, or ``None`` if it is no
    array or of a dtype that no shard has."""
    if type(value) is np.memmap:
        value = value.view(np.ndarray)
    if type(value) is not np.ndarray:
        return None
    native = value.dtype.newbyteorder("=") if value.dtype.names is None else value.dtype
    try:
        dtype_of_numpy(native)
    except ValueError:
        return None
    return value.astype(native, copy=False)


def _leaf_name(path: ValuePath) -> str:
    name = ".".join(str(part) for part in path) or "state"
    return name.encode("utf-8", "backslashreplace").decode()[:_NAME_CHARS]


def _free_name(name: str, taken: Mapping[str, Any]) -> str:
    if name not in taken:
        return name
    return next(new for n in range(2, len(taken) + 3) if (new := f"{name}~{n}") not in taken)
