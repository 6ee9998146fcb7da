"""Reads a checkpoint of holdfast's, on any storage, every byte compared with its digest."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from holdfast.catalog import OpenCheckpoint
from holdfast.catalog._opened import decoded
from holdfast.catalog._shard_write import as_bytes
from holdfast.catalog._writing import Facts, storable_array
from holdfast.cli._converting.contents import Contents, Tensor, is_container, rebuilt
from holdfast.cli._stored import StoredTensors
from holdfast.errors import CorruptedError
from holdfast.format import LeafRef, dtype_of_numpy


def read_checkpoint(opened: OpenCheckpoint) -> Contents:
    """The state as it was saved. ``CorruptedError`` if it has tensors that its state does not name:
    there would be no telling where they belong."""
    stored = StoredTensors(opened)
    record = opened.found.record
    made: dict[str, Tensor] = {}

    def leaf(ref: LeafRef) -> Tensor:
        if ref.name not in made:
            made[ref.name] = _tensor(stored, ref)
        return made[ref.name]

    tree = decoded(opened.found, record.tree, leaf=leaf)
    stray = [name for name in record.tensors if name not in made]
    if stray:
        raise CorruptedError(
            f"its state does not say where tensor {stray[0]!r} belongs, which one rank may have "
            "saved alone",
            path=f"{opened.storage.url}/{opened.found.prefix}",
        )
    return Contents(
        tree=_lifted(tree),
        facts=Facts(step=record.step, metrics=dict(record.metrics), custom=record.custom),
    )


def _tensor(stored: StoredTensors, ref: LeafRef) -> Tensor:
    name = ref.name
    tensor = stored.tensor(name)

    def pieces() -> Iterator[memoryview]:
        for box in stored.pieces(name):
            array = stored.read(name, box)
            if array.nbytes:
                yield as_bytes(array)

    return Tensor(dtype=tensor.dtype, shape=tensor.shape, pieces=pieces, kind=ref.kind)


def _lifted(value: Any) -> Any:
    """The same with small arrays, which stand in the record itself, as tensors, too."""
    array = storable_array(value)
    if array is not None:
        return array_tensor(array)
    return rebuilt(value, _lifted) if is_container(value) else value


def array_tensor(array: np.ndarray[Any, Any]) -> Tensor:
    """A tensor that is in memory already."""
    contiguous = np.ascontiguousarray(array).reshape(array.shape)

    def pieces() -> Iterator[memoryview]:
        if contiguous.nbytes:
            yield as_bytes(contiguous)

    code = dtype_of_numpy(array.dtype).code
    return Tensor(dtype=code, shape=array.shape, pieces=pieces, kind="array")
