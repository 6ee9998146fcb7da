"""Writes safetensors files, and Hugging Face folders of them. Needs no torch.

The metadata of a file is ``{"format": "pt"}``: Hugging Face's libraries want to know which library
a model is of.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from holdfast.catalog._names import MODEL_INDEX
from holdfast.cli._converting.choosing import check_fits
from holdfast.cli._converting.contents import Tensor, tensors_in
from holdfast.cli._converting.publishing import new_file, new_folder
from holdfast.cli._exits import MisuseError
from holdfast.cli._progress import Tick
from holdfast.format import ValuePath, dtype_of

_METADATA: Final = "__metadata__"
_MOST_HEADER_BYTES: Final = 100_000_000
"""What the safetensors library reads of a header."""


def write_file(tree: Any, target: Path, *, overwrite: bool, tick: Tick) -> None:
    """One file with all tensors."""
    named = _named(tree)
    with new_file(target, overwrite=overwrite) as file:
        _write(named, file, tick)


def write_folder(tree: Any, target: Path, *, overwrite: bool, file_bytes: int, tick: Tick) -> None:
    """Files of up to ``file_bytes``, but for tensors that are larger, and their index."""
    groups = _grouped(_named(tree), file_bytes)
    count = len(groups)
    names = [f"model-{nth:05}-of-{count:05}.safetensors" for nth in range(1, count + 1)]
    if count == 1:
        names = ["model.safetensors"]
    with new_folder(target, overwrite=overwrite) as folder:
        for name, group in zip(names, groups, strict=True):
            with (folder / name).open("xb") as file:
                _write(group, file, tick)
                file.flush()
                os.fsync(file.fileno())
        if count > 1:
            with (folder / MODEL_INDEX).open("xb") as file:
                file.write(_index(names, groups))
                file.flush()
                os.fsync(file.fileno())


def _named(tree: Any) -> dict[str, Tensor]:
    """Every tensor by the name of its place. ``MisuseError`` for all that has no room here."""
    check_fits(tree, _problem, "safetensors")
    named: dict[str, Tensor] = {}
    for name, tensor in tensors_in(tree):
        if name in named or name in {_METADATA, ""}:
            problem = "two tensors are" if name in named else "a tensor is"
            raise MisuseError(f"{problem} called {name!r}, which safetensors cannot hold")
        named[name] = tensor
    return named


def _problem(_: ValuePath, value: Any) -> str | None:
    if not isinstance(value, Tensor):
        return type(value).__name__
    dtype = dtype_of(value.dtype)
    return None if dtype.stored == dtype.code else f"a tensor of {dtype.torch_name}"


def _grouped(named: Mapping[str, Tensor], file_bytes: int) -> list[dict[str, Tensor]]:
    groups: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in named.items():
        if groups[-1] and size + tensor.nbytes > file_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = tensor
        size += tensor.nbytes
    return groups


def _write(named: Mapping[str, Tensor], file: BinaryIO, tick: Tick) -> None:
    # As the library itself orders them, so that every tensor is aligned in a file that is mapped.
    ordered = dict(sorted(named.items(), key=lambda each: -dtype_of(each[1].dtype).itemsize))
    file.write(_header(ordered))
    for tensor in ordered.values():
        for piece in tensor.pieces():
            file.write(piece)
            tick(len(piece))


def _header(named: Mapping[str, Tensor]) -> bytes:
    listed: dict[str, Any] = {_METADATA: {"format": "pt"}}
    offset = 0
    for name, tensor in named.items():
        end = offset + tensor.nbytes
        listed[name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": (offset, end),
        }
        offset = end
    text = msgspec.json.encode(listed)
    text += b" " * (-len(text) % 8)
    if len(text) > _MOST_HEADER_BYTES:
        raise MisuseError(f"the names of {len(named)} tensors are too long for one file")
    return len(text).to_bytes(8, "little") + text


def _index(names: Sequence[str], groups: Sequence[Mapping[str, Tensor]]) -> bytes:
    total = sum(tensor.nbytes for group in groups for tensor in group.values())
    files = {key: name for name, group in zip(names, groups, strict=True) for key in group}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
    return msgspec.json.format(msgspec.json.encode(index), indent=2) + b"\n"
