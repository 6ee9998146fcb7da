"""One file that holds a tree of values and tensors, and proves every byte of itself.

Knows the house's shards and the storage; knows no optimizer. The file is a shard as any other, and
so a safetensors file, with two entries more: ``values``, the JSON of the tree, in which a tensor is
a reference, and ``seal``, the digest of the header. So the seal proves the header, the chunk table
all entries, and they prove the table: a shard of a checkpoint has a commit record for that.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import torch

from holdfast.catalog._shard_read import MAX_TABLE_BYTES, ChunkRun, OpenShard, read_bytes, read_runs
from holdfast.catalog._shard_write import Source, write_shard
from holdfast.contracts import SMALL_OBJECT_BYTES, Storage
from holdfast.distributed._tensor_source import TensorSource, rechunked
from holdfast.distributed._tensors import (
    Unstorable,
    check_storable,
    code_of,
    empty_local,
    identity,
    is_distributed,
    memory_of,
)
from holdfast.errors import CorruptedError, IncompatibleVersionError, LoadError, SaveError
from holdfast.format import (
    DIGEST_BYTES,
    LeafRef,
    PlacedEntry,
    ShardEntry,
    ShardLayout,
    ValuePath,
    decode_value,
    digest,
    encode_value,
    header_bytes_needed,
    numpy_dtype,
    parse_shard_header,
    parse_table,
    plan_shard,
)
from holdfast.format._strict_json import scan_json
from holdfast.format._value_model import MAX_VALUE_JSON_DEPTH

_VALUES: Final = "values"
_SEAL: Final = "seal"
_FIRST_BYTES: Final = 64 * 1024
_NAME_CHARS: Final = 1000
_ZIP: Final = b"PK\x03\x04"
_VERSION_DIGITS: Final = 9
_FLOATS: Final = {"F32", "F64", "C64", "C128"}


def write_sealed(
    storage: Storage, key: str, tree: object, *, kind: str, version: int, finite: str = ""
) -> None:
    """Write the tree, visible, whole and durable on return; what was there before is replaced at
    that instant, and intact after an error. Tensors are read from where they are.

    ``kind`` and ``version`` are in the file's metadata, for ``read_sealed`` and for people.
    ``finite`` is a part of the tree whose numbers must be. ``SaveError`` for what cannot be
    stored, ``StorageError``.
    """
    leaves = _Leaves(finite)
    values = msgspec.json.encode(encode_value(tree, leaf=leaves.leaf, root="checkpoint"))
    if len(values) > SMALL_OBJECT_BYTES:
        raise SaveError(
            f"the values beside the tensors take {len(values)} bytes, and a file holds "
            f"{SMALL_OBJECT_BYTES}; nothing was written"
        )
    metadata = {kind: str(version)}
    entries = [
        *(source.entry for source in leaves.sources),
        *(_bytes_entry(name, size) for name, size in ((_VALUES, len(values)), (_SEAL, 16))),
    ]
    try:
        layout = plan_shard(entries, metadata=metadata)
    except ValueError as error:
        raise SaveError(f"the state does not fit in one file: {error}") from error
    sources: list[Source] = [*leaves.sources]
    for entry, data in zip(entries[-2:], (values, digest(layout.header)), strict=True):
        sources.append(_BytesSource(entry=entry, data=data))
    try:
        write_shard(storage, key, sources, metadata=metadata)
    except _NotFiniteError:
        names = ", ".join(each.entry.name for each in leaves.checked if not each.is_finite())
        found = names or "a number that has changed meanwhile"
        raise SaveError(f"not finite: {found}; nothing was saved") from None


def read_sealed(storage: Storage, key: str, *, kind: str, newest: int) -> tuple[int, Any]:
    """The version and the tree of a file that may be anything. Its tensors are new, on the CPU.

    Memory is bounded by the file's size, and nothing in it is unpickled or called. Raises
    ``CorruptedError`` for a file that is damaged or cut, ``LoadError`` for one of another kind,
    ``IncompatibleVersionError`` for one that is newer than ``newest``, ``StorageError``.
    """
    size = storage.stat(key).size_bytes
    header = read_bytes(storage, key, 0, min(size, _FIRST_BYTES))
    if header.startswith(_ZIP):
        raise _foreign("it is a zip file, as torch.save makes")
    needed = header_bytes_needed(header, size, path=key)
    if needed > len(header):
        header += read_bytes(storage, key, len(header), needed - len(header))
    layout = parse_shard_header(header[:needed], size, path=key)
    _check_header(storage, key, layout)
    version = _version(layout, kind, newest)
    if layout.table_bytes > MAX_TABLE_BYTES:
        raise LoadError(
            f"its chunk table is said to have {layout.table_bytes} bytes; at most "
            f"{MAX_TABLE_BYTES} are read"
        )
    table = read_bytes(storage, key, layout.table_offset, layout.table_bytes)
    shard = OpenShard(key=key, layout=layout, table=parse_table(layout, table, path=key))
    reader = _Reader(storage, shard)
    reader.small(_SEAL, DIGEST_BYTES)  # which is proven by the chunk table, as all entries are
    tree = _tree(reader.small(_VALUES, SMALL_OBJECT_BYTES), reader)
    reader.fill()
    return version, tree


def _check_header(storage: Storage, key: str, layout: ShardLayout) -> None:
    """Before anything that the header says is believed. What has no seal is of another kind."""
    for placed in layout.entries:
        if placed.entry.name == _SEAL and placed.raw_bytes == DIGEST_BYTES:
            found = read_bytes(storage, key, placed.offset, DIGEST_BYTES)
            if found != digest(layout.header):
                raise CorruptedError("its header is not the one that was written")


def _version(layout: ShardLayout, kind: str, newest: int) -> int:
    if not layout.is_holdfast:
        raise _foreign("it is a safetensors file that another program wrote")
    if kind not in layout.metadata:
        raise _foreign("it is one of the files of a checkpoint: load that with its own loader")
    text = layout.metadata[kind]
    if not (text.isascii() and text.isdigit() and len(text) <= _VERSION_DIGITS and int(text) > 0):
        raise CorruptedError(f"its version is {text[:60]!r}")
    if int(text) > newest:
        raise IncompatibleVersionError(
            f"it is of version {text}, and this holdfast reads versions up to {newest}; use a "
            "newer holdfast. Nothing was changed"
        )
    whole = {placed.entry.name for placed in layout.entries if placed.codec is None}
    if layout.table_beside or len(whole) != len(layout.entries):
        raise CorruptedError("its tensors are not stored as this kind of file has them")
    return int(text)


def _foreign(what: str) -> LoadError:
    return LoadError(f"this is no mixed-precision checkpoint: {what}. Nothing was changed")


def _tree(data: bytes, reader: "_Reader") -> object:
    scan_json(data, max_depth=MAX_VALUE_JSON_DEPTH)
    try:
        encoded = msgspec.json.decode(data)
    except ValueError as error:
        raise CorruptedError(f"its values cannot be read: {error}") from error
    return decode_value(encoded, leaf=reader.tensor, root="checkpoint")


class _Leaves:
    """The tensors of a tree, each stored once however often it is there."""

    def __init__(self, finite: str) -> None:
        self._finite = finite
        self.sources: list[Source] = []
        self.checked: list[_FiniteSource] = []
        self._taken = {_VALUES, _SEAL}
        self._seen: dict[tuple[Any, ...], str] = {}

    def leaf(self, path: ValuePath, value: object) -> LeafRef | None:
        if not isinstance(value, torch.Tensor):
            return None
        key = identity(value)
        if key not in self._seen:
            self._seen[key] = self._add(path, value)
        return LeafRef(kind="tensor", name=self._seen[key])

    def _add(self, path: ValuePath, tensor: torch.Tensor) -> str:
        place = ".".join(map(str, path))
        if is_distributed(tensor):
            raise SaveError(
                f"{place} is sharded over ranks, and this file is of one process; save with "
                "DistributedCheckpoint.save(model, optimizer), which every rank calls"
            )
        try:
            memory, dtype = check_storable(tensor), code_of(tensor.dtype)
        except Unstorable as refusal:
            raise SaveError(f"{place} {refusal}; nothing was saved") from None
        name = self._free(place.encode("utf-8", "backslashreplace").decode()[:_NAME_CHARS])
        entry = ShardEntry(name=name, dtype=dtype.code, shape=tuple(tensor.shape))
        source = TensorSource(entry=entry, tensor=memory)
        if path[:1] == (self._finite,) and dtype.code in _FLOATS:
            self.checked.append(_FiniteSource(entry=entry, source=source))
            self.sources.append(self.checked[-1])
        else:
            self.sources.append(source)
        return name

    def _free(self, name: str) -> str:
        free, n = name, 2
        while free in self._taken:
            free, n = f"{name}~{n}", n + 1
        self._taken.add(free)
        return free


class _NotFiniteError(Exception):
    """Some number is not finite; nothing is to be written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _FiniteSource:
    """Looks at the numbers while they are in the cache, where it costs next to nothing."""

    entry: ShardEntry
    source: TensorSource

    def chunks(self) -> Iterator[memoryview]:
        for chunk in self.source.chunks():
            if not self._are_finite(chunk):
                raise _NotFiniteError
            yield chunk

    def is_finite(self) -> bool:
        return all(map(self._are_finite, self.source.chunks()))

    def _are_finite(self, chunk: memoryview) -> bool:
        numbers = np.frombuffer(chunk, numpy_dtype(self.entry.dtype))
        with np.errstate(all="ignore"):  # a sum is not finite if anything in it is not
            return bool(np.isfinite(numbers.sum()) or np.isfinite(numbers).all())


@dataclass(frozen=True, slots=True, kw_only=True)
class _BytesSource:
    entry: ShardEntry
    data: bytes

    def chunks(self) -> Iterator[memoryview]:
        return rechunked([memoryview(self.data)])


def _bytes_entry(name: str, size: int) -> ShardEntry:
    return ShardEntry(name=name, dtype="U8", shape=(size,))


class _Reader:
    """The entries of an open file, which are read once the tree has said which there are."""

    def __init__(self, storage: Storage, shard: OpenShard) -> None:
        self._storage = storage
        self._shard = shard
        self._placed: Mapping[str, PlacedEntry] = {
            placed.entry.name: placed for placed in shard.layout.entries
        }
        self._tensors: dict[str, torch.Tensor] = {}

    def small(self, name: str, most: int) -> bytes:
        """The bytes of an entry, read at once."""
        placed = self._placed.get(name)
        if placed is None or placed.raw_bytes > most:
            raise CorruptedError(f"its entry {name!r} is missing or too long")
        data = bytearray(placed.raw_bytes)
        self._read([self._run(placed, memoryview(data))])
        return bytes(data)

    def tensor(self, ref: LeafRef) -> torch.Tensor:
        """The tensor of an entry, which ``fill`` fills."""
        found = self._tensors.get(ref.name)
        if found is not None:
            return found
        placed = self._placed.get(ref.name)
        if placed is None or ref.name in {_VALUES, _SEAL}:
            raise CorruptedError(f"its values name a tensor {ref.name[:200]!r} that it has not")
        try:
            made = empty_local(placed.entry.shape, placed.entry.dtype)
        except Unstorable as refusal:
            raise IncompatibleVersionError(f"{ref.name} {refusal}") from None
        except RuntimeError as error:  # torch's word for having no memory
            raise LoadError(
                f"there is no memory for {ref.name}, {placed.raw_bytes} bytes"
            ) from error
        self._tensors[ref.name] = made
        return made

    def fill(self) -> None:
        """Read every tensor that was asked for. All there are must have been: what nobody reads,
        nobody has proven."""
        rest = self._placed.keys() - self._tensors.keys() - {_VALUES, _SEAL}
        if rest:
            raise CorruptedError(f"its values do not name its tensor {min(rest)[:200]!r}")
        wanted = ((self._placed[name], tensor) for name, tensor in self._tensors.items())
        runs = [self._run(placed, memory_of(tensor)) for placed, tensor in wanted if tensor.numel()]
        self._read(sorted(runs, key=lambda run: run.placed.offset))

    def _run(self, placed: PlacedEntry, into: memoryview) -> ChunkRun:
        return ChunkRun(shard=self._shard, placed=placed, first=0, last=placed.chunks, into=into)

    def _read(self, runs: list[ChunkRun]) -> None:
        if not runs:
            return
        bad = read_runs(self._storage, runs)
        if bad:
            raise bad[0].error()
