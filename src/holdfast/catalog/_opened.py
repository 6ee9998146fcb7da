"""One committed checkpoint, open for reading as NumPy. Knows its record and its tensors."""

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from holdfast.catalog._committed import Found
from holdfast.catalog._info import CheckpointInfo, info_of
from holdfast.catalog._names import record_key
from holdfast.catalog._reading import TensorReader, Tick, Want
from holdfast.catalog._shard_write import as_bytes
from holdfast.contracts import Storage
from holdfast.errors import CorruptedError, IncompatibleVersionError, LoadError, TensorNotFoundError
from holdfast.format import LeafRef, StoredTensor, decode_value, dtype_of, numpy_dtype
from holdfast.reshard import Box, Part

Array = npt.NDArray[Any]

_HARMLESS_BYTES: Final = 64 * 1024 * 1024
"""What may be taken in memory before it is known that anything of it is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """What is stored under a name: its dtype code (as safetensors writes it) and whole shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return Box.whole(self.shape).size * dtype_of(self.dtype).itemsize


class OpenCheckpoint:
    """Reads what was committed when it was opened. Thread-safe.

    Everything that is read is verified. bfloat16 and the 8-bit floats come as ``ml_dtypes``;
    types that neither NumPy nor ``ml_dtypes`` has come as ``uint8`` with one more dimension.
    """

    def __init__(self, storage: Storage, found: Found) -> None:
        self._found = found
        self._storage = storage
        self._path = f"{storage.url}/{found.prefix}"
        self._reader = TensorReader(storage, found.prefix, found.record)

    def __repr__(self) -> str:
        return f"OpenCheckpoint({self._path!r})"

    @property
    def storage(self) -> Storage:
        """Where it is."""
        return self._storage

    @property
    def found(self) -> Found:
        """The commit record as it was found."""
        return self._found

    @property
    def info(self) -> CheckpointInfo:
        return info_of(self._found.prefix, self._found.record)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name."""
        return {
            name: TensorInfo(name=name, dtype=tensor.dtype, shape=tensor.shape)
            for name, tensor in self._found.record.tensors.items()
        }

    @property
    def custom(self) -> object:
        """The custom metadata it was saved with."""
        return decoded(self._found, self._found.record.custom, root="custom")

    def read(
        self, name: str, start: tuple[int, ...] | None = None, stop: tuple[int, ...] | None = None
    ) -> Array:
        """A tensor, or the box of it from ``start`` up to ``stop``. Only the chunks that hold it
        are read. ``TensorNotFoundError`` if there is no such tensor."""
        tensor = self._reader.tensor(name)
        whole = Box.whole(tensor.shape)
        box = Box(start or whole.start, stop or whole.stop)
        if len(box.start) != len(whole.start) or not whole.contains(box):
            raise ValueError(f"{box} is not within {name!r}, which is of shape {tensor.shape}")
        return self._read({name: (tensor, box)}, lambda _: None)[name]

    def read_all(
        self, names: Iterable[str] | None = None, *, progress: Tick = lambda _: None
    ) -> dict[str, Array]:
        """The tensors whose names fit one of the patterns (``model.*``), or all of them.

        A pattern that is the name of a tensor means just that one. ``TensorNotFoundError`` for
        one that fits nothing. ``progress`` is told the number of bytes, from several threads, as
        they are read.
        """
        if isinstance(names, str):
            raise ValueError(  # noqa: TRY004 -- as every refusal of an argument
                f"names must be several patterns, as [{names!r}], not one text"
            )
        tensors = self._found.record.tensors
        fitting = tensors.keys() if names is None else self._fitting(list(names))
        wanted = {
            name: (tensor, Box.whole(tensor.shape))
            for name, tensor in tensors.items()
            if name in fitting
        }
        return self._read(wanted, progress)

    def read_tree(
        self, names: Iterable[str] | None = None, *, progress: Tick = lambda _: None
    ) -> object:
        """The state as it was saved. Arrays and tensors whose names fit no pattern are left as
        ``format.LeafRef``."""
        arrays = self.read_all(names, progress=progress)

        def leaf(ref: LeafRef) -> object:
            return arrays.get(ref.name, ref)

        return decoded(self._found, self._found.record.tree, leaf=leaf)

    def read_into(self, arrays: Mapping[str, Array], *, progress: Tick = lambda _: None) -> None:
        """Fill arrays with the tensors of those names. They must be contiguous, writable, and of
        the stored shape and dtype: ``ValueError`` otherwise, before anything is changed. After
        any other error they hold anything."""
        wants = []
        boxes = []
        for name, array in arrays.items():
            tensor = self._reader.tensor(name)
            box = Box.whole(tensor.shape)
            expected = (*box.shape, *dtype_of(tensor.dtype).numpy_tail), numpy_dtype(tensor.dtype)
            if (array.shape, array.dtype) != expected:
                raise ValueError(
                    f"tensor {name!r} is {expected[1]} of shape {expected[0]}, the array to read "
                    f"into is {array.dtype} of shape {array.shape}"
                )
            if not array.flags.c_contiguous or not array.flags.writeable:
                raise ValueError(f"the array for {name!r} must be contiguous and writable")
            boxes.append((name, box))
            if array.nbytes:
                wants.append(Want(name=name, part=Part.alone(box), into=as_bytes(array)))
        self._reader.check_stored(boxes)
        self._reader.fill(wants, tick=progress, checked=True)

    def _fitting(self, patterns: Sequence[str]) -> set[str]:
        tensors = self._found.record.tensors
        fitting: set[str] = set()
        for pattern in patterns:
            found = [pattern] if pattern in tensors else _matching(tensors, pattern)
            if not found:
                raise TensorNotFoundError(f"no tensor fits {pattern!r}", path=self._path)
            fitting.update(found)
        return fitting

    def _read(self, wanted: Mapping[str, tuple[StoredTensor, Box]], tick: Tick) -> dict[str, Array]:
        size = sum([box.size * dtype_of(tensor.dtype).itemsize for tensor, box in wanted.values()])
        checked = size > _HARMLESS_BYTES
        if checked:
            self._reader.check_stored([(name, box) for name, (_, box) in wanted.items()])
        arrays = {name: self._empty(name, *want) for name, want in wanted.items()}
        self._reader.fill(
            [
                Want(name, _alone(box), as_bytes(arrays[name]))
                for name, (_, box) in wanted.items()
                if arrays[name].nbytes
            ],
            tick=tick,
            checked=checked,
        )
        return arrays

    def _empty(self, name: str, tensor: StoredTensor, box: Box) -> Array:
        dtype = dtype_of(tensor.dtype)
        try:
            return np.empty((*box.shape, *dtype.numpy_tail), numpy_dtype(tensor.dtype))
        except (MemoryError, ValueError) as error:
            size = box.size * dtype.itemsize
            raise LoadError(
                f"there is no memory for the {size} bytes of tensor {name!r}", path=self._path
            ) from error


def _alone(box: Box) -> Part:
    """As ``Part.alone``, in a third of the time for all of a tensor; there may be very many."""
    return Part.alone(box) if any(box.start) else Part(box=box, local=box, array_shape=box.stop)


def _matching(names: Iterable[str], pattern: str) -> list[str]:
    return [name for name in names if fnmatch.fnmatchcase(name, pattern)]


def decoded(
    found: Found,
    encoded: object,
    *,
    leaf: Callable[[LeafRef], object] = lambda ref: ref,
    root: str = "state",
) -> object:
    """A value of the record. ``CorruptedError`` if it refers to a tensor that is not there."""

    def known(ref: LeafRef) -> object:
        if ref.name not in found.record.tensors:
            raise CorruptedError(f"{root} refers to a tensor {ref.name!r} that is not there")
        return leaf(ref)

    try:
        return decode_value(encoded, leaf=known, root=root)
    except (CorruptedError, IncompatibleVersionError) as error:
        raise type(error)(error.message, path=record_key(found.prefix)) from error
