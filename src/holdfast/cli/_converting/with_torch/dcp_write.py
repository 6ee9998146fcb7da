"""Writes a folder as ``torch.distributed.checkpoint`` does with its own storage, a part of a tensor
at a time: a large tensor is several chunks, as if several ranks had saved it."""

import io
import os
import pickle
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from holdfast.cli._converting.choosing import check_fits
from holdfast.cli._converting.contents import PIECE_BYTES, Tensor, is_container, leaves, rebuilt
from holdfast.cli._converting.publishing import new_folder
from holdfast.cli._converting.recognising import DCP_METADATA
from holdfast.cli._converting.with_torch.torch_values import (
    container_problem,
    problem_of,
    without_ranks,
)
from holdfast.cli._exits import MisuseError
from holdfast.cli._progress import Tick
from holdfast.distributed._tensors import known_dtype
from holdfast.format import dtype_of
from holdfast.reshard import Box, split_box

_FILE: Final = "__0_0.distcp"


def write_folder(tree: Any, target: Path, *, overwrite: bool, tick: Tick) -> None:
    """DCP's keys are the names of places, and it remembers the tree that they make."""
    state = without_ranks(tree)
    if not isinstance(state, dict):
        raise MisuseError("DCP holds a dict of values by key, and this state is none")
    check_fits(state, problem_of, "DCP")
    stand_ins: dict[int, Tensor] = {}
    try:
        flat, paths = flatten_state_dict(_stood_in(state, stand_ins))
    except ValueError as error:
        raise MisuseError(f"DCP cannot hold this: {error}") from error
    for key, value in flat.items():
        problem = "a tensor in a tuple" if _holds_tensor(value) else container_problem(value)
        if problem and not isinstance(value, torch.Tensor):
            raise MisuseError(f"DCP cannot hold {key} ({problem}); nothing was written")
    kinds: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    with new_folder(target, overwrite=overwrite) as folder:
        with (folder / _FILE).open("xb") as file:
            for key, value in flat.items():
                if isinstance(value, torch.Tensor):
                    tensor = stand_ins[id(value)]
                    kinds[key] = _written(key, tensor, file, places, tick)
                else:
                    kinds[key] = BytesStorageMetadata()
                    places[MetadataIndex(key)] = _saved(value, file)
            file.flush()
            os.fsync(file.fileno())
        metadata = Metadata(
            kinds,
            planner_data=paths,
            storage_data=places,
            storage_meta=StorageMeta(),
            version=CURRENT_DCP_VERSION,
        )
        with (folder / DCP_METADATA).open("xb") as file:
            pickle.dump(metadata, file)
            file.flush()
            os.fsync(file.fileno())


def _written(key: str, tensor: Tensor, file: BinaryIO, places: dict[Any, Any], tick: Tick) -> Any:
    dtype = known_dtype(tensor.dtype)
    chunks = []
    for nth, (box, data) in enumerate(_boxes(tensor)):
        made = torch.frombuffer(data, dtype=torch.uint8).view(dtype) if data else _nothing(dtype)
        places[MetadataIndex(key, box.start, nth)] = _saved(made.reshape(box.shape), file)
        chunks.append(ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.shape)))
        tick(len(data))
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(tensor.shape), chunks)


def _boxes(tensor: Tensor) -> Any:
    """A tensor in boxes, each with its bytes."""
    itemsize = dtype_of(tensor.dtype).itemsize
    pieces = tensor.pieces()
    rest = bytearray()
    for box in split_box(Box.whole(tensor.shape), PIECE_BYTES // itemsize):
        needed = box.size * itemsize
        while len(rest) < needed:
            rest += next(pieces)
        yield box, rest[:needed]
        del rest[:needed]


def _saved(value: Any, file: BinaryIO) -> Any:
    """Append something as ``torch.save`` writes it, and say where it is. By way of memory: an error
    of the file itself does not come through torch."""
    start = file.tell()
    data = io.BytesIO()
    torch.save(value, data)
    file.write(data.getbuffer())
    return _StorageInfo(_FILE, start, file.tell() - start)


def _nothing(dtype: Any) -> Any:
    return torch.empty(0, dtype=dtype)


def _stood_in(value: Any, stand_ins: dict[int, Tensor]) -> Any:
    """The same with tensors of torch's that have no memory, which are what it flattens by."""
    if isinstance(value, Tensor):
        made = torch.empty(value.shape, dtype=known_dtype(value.dtype), device="meta")
        stand_ins[id(made)] = value
        return made
    if is_container(value):
        return rebuilt(value, lambda each: _stood_in(each, stand_ins))
    return value


def _holds_tensor(value: Any) -> bool:
    return is_container(value) and any(isinstance(each, torch.Tensor) for _, each in leaves(value))
