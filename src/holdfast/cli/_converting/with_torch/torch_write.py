"""Writes a file as ``torch.save`` does, a piece of a tensor at a time.

``torch.save`` wants all tensors in memory. The file is a zip archive: one pickle in which a tensor
is a reference to a storage, and one record of bytes for each storage, aligned to 64 bytes so that
``torch.load(mmap=True)`` works. Before it is published, torch loads it, without its bytes.
"""

import io
import pickle
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import torch

from holdfast.cli._converting.choosing import check_fits
from holdfast.cli._converting.contents import Tensor, is_container, rebuilt, tensors_in
from holdfast.cli._converting.publishing import new_file
from holdfast.cli._converting.with_torch.torch_read import loaded
from holdfast.cli._converting.with_torch.torch_values import (
    as_torchs,
    container_problem,
    problem_of,
)
from holdfast.cli._exits import MisuseError
from holdfast.cli._progress import Tick
from holdfast.distributed._tensors import known_dtype

_ALIGNMENT: Final = 64
_ARCHIVE: Final = "archive"
_FIXED_HEADER_BYTES: Final = 30
_ZIP64_BYTES: Final = 20
_ZIP64_FROM: Final = 2_000_000_000
_PADDING_ID: Final = b"FB"
_PROTOCOL: Final = 2
_STORAGES: Final = {
    dtype: getattr(torch, name)
    for dtype, name in torch.storage._dtype_to_storage_type_map().items()  # noqa: SLF001
}


def write_file(tree: Any, target: Path, *, overwrite: bool, tick: Tick) -> None:
    """A state that ``torch.load(weights_only=True)`` reads. Tensors that are one in the source
    share their memory."""
    state = as_torchs(tree)
    check_fits(state, problem_of, "torch.save")
    if problem := container_problem(state):
        raise MisuseError(f"torch.save cannot hold a {problem}; nothing was written")
    keys: dict[int, str] = {}
    storages: list[Tensor] = []
    for _, tensor in tensors_in(state):
        if id(tensor) not in keys:
            keys[id(tensor)] = str(len(storages))
            storages.append(tensor)
    with new_file(target, overwrite=overwrite) as file:
        with zipfile.ZipFile(file, "w") as archive:
            _put(archive, "data.pkl", _pickled(_seen(state, keys)))
            _put(archive, "byteorder", b"little")
            for key, tensor in enumerate(storages):
                with _record(archive, f"data/{key}", tensor.nbytes) as record:
                    for piece in tensor.pieces():
                        record.write(piece)
                        tick(len(piece))
            _put(archive, "version", b"3\n")
        file.flush()
        with Path(file.name).open("rb") as again:
            loaded(again, target, "meta")


@dataclass(frozen=True, slots=True, eq=False)
class _Storage:
    """The bytes of a tensor, by the number of their record."""

    kind: Any
    key: str
    elements: int


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """A tensor as the pickle has it: how to make it of its storage."""

    tensor: Tensor
    key: str

    def rebuilding(self) -> tuple[Any, tuple[Any, ...]]:
        dtype = known_dtype(self.tensor.dtype)
        shape = self.tensor.shape
        elements = 1
        strides: list[int] = []
        for size in reversed(shape):
            strides.insert(0, elements)
            elements *= max(size, 1)
        count = 0 if 0 in shape else elements
        hooks: OrderedDict[str, Any] = OrderedDict()
        view = (0, shape, tuple(strides), False, hooks)
        if dtype in _STORAGES:
            storage = _Storage(_STORAGES[dtype], self.key, count)
            return torch._utils._rebuild_tensor_v2, (storage, *view)  # noqa: SLF001 -- as torch.save
        storage = _Storage(torch.UntypedStorage, self.key, self.tensor.nbytes)
        return torch._utils._rebuild_tensor_v3, (storage, *view, dtype)  # noqa: SLF001 -- as above


class _Pickler(pickle.Pickler):
    """As torch's own, for tensors that are not in memory."""

    def reducer_override(self, obj: Any) -> Any:
        return obj.rebuilding() if isinstance(obj, _Seen) else NotImplemented

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Storage):
            return ("storage", obj.kind, obj.key, "cpu", obj.elements)
        return None


def _seen(value: Any, keys: dict[int, str]) -> Any:
    if isinstance(value, Tensor):
        return _Seen(value, keys[id(value)])
    return rebuilt(value, lambda each: _seen(each, keys)) if is_container(value) else value


def _pickled(state: Any) -> bytes:
    data = io.BytesIO()
    _Pickler(data, protocol=_PROTOCOL).dump(state)
    return data.getvalue()


def _put(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    with _record(archive, name, len(data)) as record:
        record.write(data)


def _record(archive: zipfile.ZipFile, name: str, nbytes: int) -> IO[bytes]:
    """A record that begins at a multiple of the alignment, by padding in its header."""
    info = zipfile.ZipInfo(f"{_ARCHIVE}/{name}")
    info.file_size = nbytes
    is_large = nbytes > _ZIP64_FROM
    header = _FIXED_HEADER_BYTES + len(info.filename) + 4 + (_ZIP64_BYTES if is_large else 0)
    padding = -(archive.start_dir + header) % _ALIGNMENT
    info.extra = _PADDING_ID + padding.to_bytes(2, "little") + b"Z" * padding
    return archive.open(info, "w", force_zip64=is_large)
