"""Reads safetensors files, and Hugging Face folders of them. Needs no torch, trusts no header."""

from pathlib import Path
from typing import Final

import msgspec

from holdfast.cli._converting.contents import Contents, Tensor
from holdfast.cli._converting.file_parts import (
    FilePart,
    file_in,
    file_pieces,
    row_major,
    tensor_in_files,
)
from holdfast.cli._converting.recognising import model_files
from holdfast.cli._exits import MisuseError
from holdfast.contracts import SMALL_OBJECT_BYTES
from holdfast.errors import CorruptedError
from holdfast.format import dtype_of, header_bytes_needed, parse_shard_header
from holdfast.reshard import Box

_LENGTH_BYTES: Final = 8


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def read_file(path: Path) -> Contents:
    """All tensors of a file, by name."""
    return Contents(tree=_tensors(path))


def read_folder(folder: Path) -> Contents:
    """The tensors that the index of a folder lists, or those of its only file."""
    index, files = model_files(folder)
    if index is None:
        model = folder / "model.safetensors"
        return read_file(model if model in files else files[0])
    try:
        if index.stat().st_size > SMALL_OBJECT_BYTES:
            raise CorruptedError("this index is too large to be one", path=str(index))
        listed = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except (ValueError, RecursionError) as error:
        raise CorruptedError(f"this is no index of a model: {error}", path=str(index)) from error
    by_file: dict[str, dict[str, Tensor]] = {}
    for file in dict.fromkeys(listed.values()):
        path = file_in(folder, file)
        if path is None:
            why = "which is not there" if Path(file).name == file else "a file elsewhere"
            raise CorruptedError(f"the index names {file[:200]!r}, {why}", path=str(index))
        by_file[file] = _tensors(path)
    missing = [name for name, file in listed.items() if name not in by_file[file]]
    if missing:
        raise CorruptedError(
            f"the index says that {listed[missing[0]]!r} has {missing[0]!r}, and it has not",
            path=str(index),
        )
    return Contents(tree={name: by_file[file][name] for name, file in listed.items()})


def _tensors(path: Path) -> dict[str, Tensor]:
    size = path.stat().st_size
    first = b"".join(file_pieces(path, 0, min(size, _LENGTH_BYTES)))
    needed = header_bytes_needed(first, size, path=str(path))
    header = b"".join(file_pieces(path, 0, needed))
    layout = parse_shard_header(header, size, path=str(path))
    found = {}
    for placed in layout.entries:
        entry = placed.entry
        if placed.codec is not None or entry.box is not None:
            raise MisuseError(
                "this file is a part of a holdfast checkpoint; give the checkpoint", path=str(path)
            )
        strides = row_major(entry.shape, dtype_of(entry.dtype).itemsize)
        part = FilePart(
            box=Box.whole(entry.shape), path=path, offset=placed.offset, strides=strides
        )
        found[entry.name] = tensor_in_files(entry.name, entry.dtype, entry.shape, [part])
    return found
