"""What DCP wants to know of a checkpoint, from its commit record. Nothing in it is trusted."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from holdfast.catalog._committed import Found
from holdfast.catalog._names import record_key
from holdfast.catalog._opened import decoded
from holdfast.distributed._tensors import Unstorable, known_dtype
from holdfast.errors import CorruptedError, IncompatibleVersionError, LoadError
from holdfast.format import LeafRef, StoredTensor
from holdfast.integrations.dcp._record import NOTES
from holdfast.integrations.dcp._tree import Tree, leaves_of


class _Parts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor of which only parts are stored, each under a name and from a start."""

    shape: tuple[int, ...]
    starts: dict[str, tuple[int, ...]]


class _Notes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: str
    save_id: str
    whole: tuple[tuple[str | int, ...], ...] = ()
    is_flat: bool = False
    planner_data: Any = None
    parts: dict[str, _Parts] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """``metadata`` is DCP's. ``names`` has the stored name of every chunk in it, and ``values``
    everything that is no tensor by its key, with ``LeafRef`` in the place of tensors in it."""

    metadata: Metadata
    save_id: str
    names: Mapping[MetadataIndex, str]
    values: Mapping[str, Any]


def listed(found: Found, path: str) -> Listed:
    """``LoadError`` if DCP did not save it, ``CorruptedError`` if the record is not sound.

    A tensor that is stored whole is one chunk, however many ranks have written it: what is read of
    it is any box, so that DCP need not plan for each stored part.
    """
    notes = _notes(found, path)
    tree: Any = decoded(found, found.record.tree)
    if notes.is_flat:
        if type(tree) is not dict:
            raise CorruptedError("the state is no dict of values by key", path=path)
        by_key, planner_data = tree, notes.planner_data
    else:
        leaves = [*leaves_of(Tree(root=tree, whole=notes.whole))]
        by_key = {key: value for key, _, value in leaves}
        planner_data = {key: each for key, each, _ in leaves}
    kinds: dict[str, Any] = {}
    names: dict[MetadataIndex, str] = {}
    values: dict[str, Any] = {}
    for key, value in by_key.items():
        if key in notes.parts:
            parts = notes.parts[key]
            shape, starts = parts.shape, parts.starts
        elif isinstance(value, LeafRef) and value.name == key:  # others are values, as arrays
            shape = _tensor(found, value.name, path).shape
            starts = {value.name: (0,) * len(shape)}
        else:
            kinds[key], values[key] = BytesStorageMetadata(), value
            continue
        names |= {MetadataIndex(key, start): name for name, start in starts.items()}
        kinds[key] = _kind(found, shape, starts, path)
    return Listed(
        metadata=Metadata(kinds, planner_data=planner_data, version=notes.version),
        save_id=notes.save_id,
        names=names,
        values=values,
    )


def _notes(found: Found, path: str) -> _Notes:
    custom = decoded(found, found.record.custom, root="custom")
    if not isinstance(custom, Mapping) or NOTES not in custom:
        raise LoadError(
            "this checkpoint was not saved with HoldfastWriter, so DCP's names for what is in it "
            "are not known; load it with holdfast.load or DistributedCheckpoint",
            path=path,
        )
    try:
        return msgspec.convert(custom[NOTES], _Notes)
    except msgspec.ValidationError as error:
        raise CorruptedError(
            f"what the record says for DCP is not sound: {error}", path=record_key(found.prefix)
        ) from error


def _kind(
    found: Found, shape: tuple[int, ...], starts: Mapping[str, tuple[int, ...]], path: str
) -> TensorStorageMetadata:
    tensors = {name: _tensor(found, name, path) for name in starts}
    codes = {tensor.dtype for tensor in tensors.values()}
    if len(codes) != 1 or any(len(each) != len(shape) for each in starts.values()):
        raise CorruptedError(
            f"the parts {', '.join(starts)} are of no one tensor", path=record_key(found.prefix)
        )
    try:
        dtype = known_dtype(codes.pop())
    except Unstorable as refusal:
        raise IncompatibleVersionError(f"{next(iter(starts))!r} {refusal}", path=path) from None
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype),
        size=torch.Size(shape),
        chunks=[
            ChunkStorageMetadata(torch.Size(start), torch.Size(tensors[name].shape))
            for name, start in starts.items()
        ],
    )


def _tensor(found: Found, name: str, path: str) -> StoredTensor:
    try:
        return found.record.tensors[name]
    except KeyError:
        raise CorruptedError(f"the record has no tensor {name!r}", path=path) from None
