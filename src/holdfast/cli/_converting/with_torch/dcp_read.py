"""Reads a folder that ``torch.distributed.checkpoint`` wrote with its own storage, a part of a
tensor at a time. Nothing in it is run: see ``unpickling`` and ``torch_read``."""

import io
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from holdfast.cli._converting.contents import MOST_DEEP, Contents, Tensor, check_tree
from holdfast.cli._converting.file_parts import FilePart, file_in, file_view, tensor_in_files
from holdfast.cli._converting.recognising import DCP_METADATA
from holdfast.cli._converting.with_torch.torch_read import check_within, lifted, loaded
from holdfast.cli._converting.with_torch.unpickling import read_metadata
from holdfast.distributed._tensors import Unstorable, code_of
from holdfast.errors import CorruptedError, IncompatibleVersionError
from holdfast.reshard import Box

_MOST_MEMBERS: Final = 1_000_000


def read_folder(folder: Path, *, tensors_only: bool) -> Contents:
    """The state as a tree, if DCP flattened it, else by DCP's keys. With ``tensors_only`` values
    are not even looked at, so that those which torch refuses do not matter."""
    path = folder / DCP_METADATA
    metadata = read_metadata(path)
    try:
        flat = {
            key: _tensor(folder, metadata, key, kind)
            if isinstance(kind, TensorStorageMetadata)
            else _value(folder, metadata, key, kind)
            for key, kind in metadata.state_dict_metadata.items()
            if isinstance(kind, TensorStorageMetadata) or not tensors_only
        }
        paths = metadata.planner_data
        if paths is not None:
            _check_paths(paths)
            flat = unflatten_state_dict(flat, {key: paths[key] for key in flat})
            check_tree(flat, str(path))
    except (AttributeError, LookupError, TypeError, ValueError, AssertionError) as error:
        raise CorruptedError(
            f"this metadata is damaged: {type(error).__name__}: {error}", path=str(path)
        ) from error
    return Contents(tree=flat)


def _check_paths(paths: Any) -> None:
    """A number in a path is that of a member of a list, all of which is made."""
    for key, path in paths.items():
        if len(path) > MOST_DEEP:
            raise ValueError(f"{key!r} is more than {MOST_DEEP} deep")
        for step in path:
            if type(step) is not str and (type(step) is not int or not 0 <= step < _MOST_MEMBERS):
                raise ValueError(f"{key!r} is at {path!r}")


def _tensor(folder: Path, metadata: Any, key: str, kind: Any) -> Tensor:
    try:
        dtype = str(code_of(kind.properties.dtype).code)
    except Unstorable as refusal:
        raise IncompatibleVersionError(f"{key!r} {refusal}", path=str(folder)) from None
    shape = tuple(kind.size)
    if 0 in shape:
        return tensor_in_files(key, dtype, shape, [])
    parts = []
    for chunk in kind.chunks:
        start, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        box = Box(start, tuple(map(sum, zip(start, sizes, strict=True))))
        if box.is_empty:
            continue
        info = _info(folder, metadata, MetadataIndex(key, start))
        parts.append(_part(folder, info, box, kind.properties.dtype, key))
    return tensor_in_files(key, dtype, shape, parts)


def _part(folder: Path, info: Any, box: Box, dtype: Any, key: str) -> FilePart:
    """Where in a file the bytes of a chunk are, which is an archive of one tensor there."""
    path = folder / info.relative_path
    with file_view(path, info.offset, info.length) as file:
        tensor = loaded(file, path, "meta")
    found = type(tensor), getattr(tensor, "dtype", None), tuple(getattr(tensor, "shape", ()))
    if found != (torch.Tensor, dtype, box.shape):
        raise CorruptedError(
            f"{key!r} is said to be {dtype} of shape {box.shape} here, and is {found[1]} of "
            f"{found[2]}",
            path=str(path),
        )
    itemsize = tensor.element_size()
    storage = tensor.untyped_storage()
    offset = storage._checkpoint_offset  # noqa: SLF001 -- where torch tells it, and nowhere else
    first = info.offset + offset + tensor.storage_offset() * itemsize
    strides = tuple(step * itemsize for step in tensor.stride())
    part = FilePart(box=box, path=path, offset=first, strides=strides)
    end = info.offset + min(info.length, offset + storage.nbytes())
    check_within(part, itemsize, end, info.length)
    return part


def _value(folder: Path, metadata: Any, key: str, kind: Any) -> Any:
    if not isinstance(kind, BytesStorageMetadata):
        raise CorruptedError(f"{key!r} is a {type(kind).__name__}", path=str(folder))
    info = _info(folder, metadata, MetadataIndex(key))
    path = folder / info.relative_path
    with path.open("rb") as file:
        file.seek(info.offset)
        data = file.read(info.length)
    try:
        value = loaded(io.BytesIO(data), path, "cpu")
    except CorruptedError as error:
        raise CorruptedError(
            f"value {key!r}: {error.message} (--tensors-only leaves values out)", path=str(path)
        ) from error
    check_tree(value, str(path))
    return lifted(value, path, size=info.length, known={})


def _info(folder: Path, metadata: Any, index: Any) -> Any:
    """Where something is. ``CorruptedError`` if that is nowhere in the folder."""
    info = metadata.storage_data.get(index)
    name = None if info is None else info.relative_path
    path = file_in(folder, name)
    if path is None:
        raise CorruptedError(
            f"the file of {index.fqn!r} is not there: {str(name)[:200]}", path=str(folder)
        )
    if info.transform_descriptors:
        raise IncompatibleVersionError(
            f"{index.fqn!r} was changed by an extension of DCP's ({info.transform_descriptors[0]})",
            path=str(path),
        )
    size = path.stat().st_size
    if not 0 <= info.offset <= info.offset + info.length <= size:
        raise CorruptedError(
            f"{index.fqn!r} ends at byte {info.offset + info.length} of a file that has {size}; it "
            "is cut short",
            path=str(path),
        )
    return info
