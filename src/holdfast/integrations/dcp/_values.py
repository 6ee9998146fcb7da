"""What DCP pickles: the values of a state that are no tensors. Here they are typed values.

DCP hands a storage the pickle of each such value, and loads one with plain ``pickle`` again. So
nothing of it is written: the value itself is stored as ``holdfast.format`` stores values, and what
that has no tag for is refused. On the way back a value that was read is pickled in memory, for
DCP's planner to load; no byte of a checkpoint is ever unpickled.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from holdfast.catalog._shard_write import ArraySource, Source
from holdfast.catalog._writing import BoxSource, storable_array
from holdfast.distributed._stored import DICTS, LISTS, mapped
from holdfast.distributed._tensor_source import TensorSource
from holdfast.distributed._tensors import Unstorable, check_storable, code_of, is_distributed
from holdfast.errors import SaveError
from holdfast.format import LeafRef, ShardEntry, ValuePath, dtype_of_numpy, encode_value
from holdfast.reshard import Box

_INLINE_BYTES: Final = 64 * 1024
"""Up to how many bytes an array inside of a value is stored in the record, with the value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredValue:
    """A value as the record keeps it, and the tensors and arrays in it, which go to the shard."""

    encoded: object
    inner: Sequence[BoxSource]


def value_of(planner: SavePlanner, item: WriteItem) -> object:
    """The value of an item. A planner that makes bytes of its own is asked for these, which must
    then be loadable with ``weights_only=True``; any other for the value itself."""
    if _gives_values(planner):
        return planner.lookup_object(item.index)
    data = planner.resolve_data(item)
    try:
        data.seek(0)
        return torch.load(data, map_location="cpu", weights_only=True)
    except Exception as error:
        raise SaveError(
            f"{item.index.fqn!r} is bytes of {type(planner).__name__}'s own, and torch.load cannot "
            f"read them with weights_only=True: {_first_line(error)}; nothing was committed"
        ) from error


def stored_value(key: str, value: object) -> StoredValue:
    """``SaveError`` names the key and the place in its value of what cannot be stored."""
    inner: list[BoxSource] = []

    def leaf(path: ValuePath, found: object) -> LeafRef | None:
        name = "::".join((key, ".".join(map(str, path))))
        if isinstance(found, torch.Tensor):
            inner.append(_whole(name, _tensor_source(key, name, found)))
            return LeafRef(kind="tensor", name=name)
        array = storable_array(found)
        if array is None or array.nbytes <= _INLINE_BYTES:
            return None
        code = dtype_of_numpy(array.dtype).code
        entry = ShardEntry(name=name, dtype=code, shape=array.shape)
        inner.append(_whole(name, ArraySource(entry=entry, array=array)))
        return LeafRef(kind="array", name=name)

    return StoredValue(encoded=encode_value(value, leaf=leaf, root=repr(key)), inner=inner)


def with_leaves(value: Any, leaves: Mapping[str, Any]) -> Any:
    """A stored value with the tensors and arrays in the place of references to them."""
    if isinstance(value, LeafRef):
        return leaves[value.name]
    if type(value) in DICTS or type(value) in LISTS:
        return mapped(value, lambda _, each: with_leaves(each, leaves))
    return value


def pickled(value: object) -> io.BytesIO:
    """What DCP's planners load a value from."""
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data


def _gives_values(planner: SavePlanner) -> bool:
    """Whether what the planner would pickle is the value, and nothing that it makes of it."""
    kind = type(planner)
    return (
        isinstance(planner, DefaultSavePlanner)
        and kind.resolve_data is DefaultSavePlanner.resolve_data
        and kind.transform_object is DefaultSavePlanner.transform_object
    )


def _tensor_source(key: str, name: str, tensor: torch.Tensor) -> TensorSource:
    if is_distributed(tensor):
        raise SaveError(
            f"a tensor inside of the value {key!r} is spread over ranks; nothing was committed. "
            "Let the planner flatten the state"
        )
    try:
        local = check_storable(tensor)
        entry = ShardEntry(name=name, dtype=code_of(local.dtype).code, shape=tuple(local.shape))
    except Unstorable as refusal:
        raise SaveError(f"a tensor in {key!r} {refusal}; nothing was committed") from None
    return TensorSource(entry=entry, tensor=local)


def _whole(name: str, source: Source) -> BoxSource:
    return BoxSource(name=name, box=Box.whole(source.entry.shape), source=source)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
