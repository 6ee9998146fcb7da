"""Memory for what a load reads, before anything of the state is changed.

One array for each leaf and way it is to lie on this rank, however many places it goes to. Knows
the record's tensors and memory; reads nothing itself.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from holdfast.catalog._reading import Want
from holdfast.catalog._shard_write import as_bytes
from holdfast.distributed._tensors import Like, Unstorable, empty_local, memory_of, wrap
from holdfast.errors import LoadError
from holdfast.format import LeafRef, StoredTensor, dtype_of, numpy_dtype
from holdfast.reshard import Box, Part


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Slot:
    """A leaf that is wanted at a place, laid out as ``like``. ``direct`` is memory of the state
    itself that may be read into, if the caller gives up on all or nothing."""

    place: str
    ref: LeafRef
    like: Like
    direct: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Staged:
    """One array to be read: which parts of which leaf are in it."""

    name: str
    like: Like
    shape: tuple[int, ...]
    array: Any
    memory: memoryview
    parts: tuple[Part, ...]

    def wants(self) -> Iterator[Want]:
        for part in self.parts:
            yield Want(name=self.name, part=part, into=self.memory)


class Staging:
    """Used by one thread."""

    def __init__(self, tensors: Mapping[str, StoredTensor], path: str) -> None:
        self._tensors = tensors
        self._path = path
        self._staged: dict[tuple[Any, ...], Staged] = {}
        self._given: set[tuple[Any, ...]] = set()
        self._taken: dict[tuple[Any, ...], Any] = {}

    @property
    def staged(self) -> Iterable[Staged]:
        return self._staged.values()

    def bytes_of(self, wants: Iterable[Want]) -> int:
        return sum(
            want.part.box.size * dtype_of(self._tensors[want.name].dtype).itemsize for want in wants
        )

    def boxes_of(self, slot: Slot) -> list[tuple[str, Box]]:
        """What is to be read for a slot, to be checked before there is memory for it."""
        _, parts = slot.like.parts(self._tensors[slot.ref.name].shape)
        return [(slot.ref.name, part.box) for part in parts]

    def add(self, slot: Slot) -> None:
        key = _key(slot)
        if key not in self._staged:
            self._staged[key] = self._make(slot)

    def get(self, slot: Slot) -> Any:
        """What was read for a slot, to be kept: an array, or a tensor on the device and laid out as
        the slot says. Slots of one leaf get the same memory, so that what was tied stays tied."""
        key = _key(slot)
        staged = self._staged[key]
        array = staged.array
        if key in self._taken:
            if self._taken[key] is None:
                self._taken[key] = _copied(array)
            array = self._taken[key]
        self._given.add(key)
        if slot.ref.kind == "array":
            return array
        if array.device != slot.like.device:
            array = array.to(slot.like.device)
        return wrap(array, slot.like, staged.shape)

    def take(self, slot: Slot) -> Any:
        """What was read for a slot, in this process's memory, for the caller to change."""
        key = _key(slot)
        staged = self._staged[key]
        array = _copied(staged.array) if key in self._given else staged.array
        if key not in self._given:
            self._given.add(key)
            self._taken[key] = None
        return array if slot.ref.kind == "array" else wrap(array, slot.like, staged.shape)

    def _make(self, slot: Slot) -> Staged:
        name = slot.ref.name
        tensor = self._tensors[name]
        shape, parts = slot.like.parts(tensor.shape)
        try:
            if slot.direct is not None:
                array: Any = slot.direct
                memory = memory_of(slot.direct)
            elif slot.ref.kind == "array":
                tail = dtype_of(tensor.dtype).numpy_tail
                array = np.empty((*tensor.shape, *tail), numpy_dtype(tensor.dtype))
                memory = as_bytes(array) if array.nbytes else memoryview(b"")
            else:
                array = empty_local(shape, tensor.dtype)
                memory = memory_of(array)
        except (MemoryError, RuntimeError, ValueError) as error:
            size = int(np.prod(shape, dtype=object)) * dtype_of(tensor.dtype).itemsize
            raise LoadError(
                f"there is no memory for the {size:,} bytes of {slot.place}", path=self._path
            ) from error
        except Unstorable as refusal:
            raise LoadError(f"{slot.place} {refusal}", path=self._path) from None
        filled = tuple(part for part in parts if not part.box.is_empty)
        return Staged(
            name=name, like=slot.like, shape=tensor.shape, array=array, memory=memory, parts=filled
        )


def _copied(array: Any) -> Any:
    return array.clone() if isinstance(array, torch.Tensor) else array.copy()


def _key(slot: Slot) -> tuple[Any, ...]:
    direct = None if slot.direct is None else slot.direct.data_ptr()
    return (slot.ref.name, slot.ref.kind, slot.like.mesh, slot.like.placements, direct)
