"""Memory for what a load reads, before anything of the state is changed.

One array for each leaf and way it is to lie on this rank, however many places it goes to. Knows
the record's tensors and memory; reads nothing itself.
"""

import contextlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import torch

from holdfast.catalog._reading import Want
from holdfast.catalog._shard_write import as_bytes
from holdfast.distributed._tensors import (
    Like,
    Unstorable,
    empty_local,
    known_dtype,
    memory_of,
    wrap,
)
from holdfast.errors import LoadError
from holdfast.format import LeafRef, StoredTensor, dtype_of, numpy_dtype
from holdfast.reshard import Box, Part

_SHORT_BYTES: Final = 64 * 1024
"""Up to how many bytes arrays are allocated together."""

_NOTHING: Final = memoryview(b"")


class Slot(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """A leaf that is wanted at a place, laid out as ``like``. ``direct`` is memory of the state
    itself that may be read into, if the caller gives up on all or nothing. ``is_kept`` if what is
    read becomes a tensor of the state."""

    place: str
    ref: LeafRef
    like: Like
    direct: torch.Tensor | None = None
    is_kept: bool = False


class Staged(msgspec.Struct, kw_only=True, eq=False, gc=False):
    """One array to be read: which parts of which leaf are in it. ``is_lent`` if it is a part of
    memory that others are in, too."""

    name: str
    like: Like
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    parts: tuple[Part, ...]
    array: Any = None
    memory: memoryview = _NOTHING
    is_lent: bool = False
    is_given: bool = False
    is_taken: bool = False
    copy: Any = None

    def wants(self) -> Iterator[Want]:
        for part in self.parts:
            yield Want(self.name, part, self.memory)


class Staging:
    """``add`` all slots, ``allocate``, have ``staged`` read, then ``get`` or ``take`` each. Used by
    one thread."""

    def __init__(self, tensors: Mapping[str, StoredTensor], path: str) -> None:
        self._tensors = tensors
        self._path = path
        self._staged: dict[Any, Staged] = {}
        self._first: list[Slot] = []
        self._by_slot: dict[int, Staged] = {}

    @property
    def staged(self) -> Collection[Staged]:
        return self._staged.values()

    def bytes_of(self, wants: Iterable[Want]) -> int:
        return sum(
            want.part.box.size * dtype_of(self._tensors[want.name].dtype).itemsize for want in wants
        )

    def add(self, slot: Slot) -> None:
        """Have a slot staged, which must be kept. Takes no memory yet."""
        key = _key(slot)
        staged = self._staged.get(key)
        if staged is None:
            name, like = slot.ref.name, slot.like
            shape = self._tensors[name].shape
            local, parts = like.parts(shape)
            staged = Staged(name=name, like=like, shape=shape, local_shape=local, parts=parts)
            self._staged[key] = staged
            self._first.append(slot)
        self._by_slot[id(slot)] = staged

    def boxes(self) -> list[tuple[str, Box]]:
        """What is to be read, to be checked before there is memory for it."""
        return [(each.name, part.box) for each in self.staged for part in each.parts]

    def allocate(self) -> None:
        """Make the memory."""
        short: dict[str, list[Staged]] = {}
        for slot in self._first:
            staged = self._by_slot[id(slot)]
            code = self._tensors[staged.name].dtype
            if slot.direct is not None:
                staged.array, staged.memory = slot.direct, memory_of(slot.direct)
            elif slot.ref.kind == "array":
                with self._telling(slot, staged):
                    shape = (*staged.shape, *dtype_of(code).numpy_tail)
                    staged.array = np.empty(shape, numpy_dtype(code))
                    staged.memory = as_bytes(staged.array) if staged.array.nbytes else _NOTHING
            elif not slot.is_kept and _is_short(staged, code):
                short.setdefault(code, []).append(staged)
            else:
                with self._telling(slot, staged):
                    staged.array = empty_local(staged.local_shape, code)
                    staged.memory = memory_of(staged.array)
        for code, together in short.items():
            with self._telling(self._first[0], together[0]):
                _allocate_together(together, known_dtype(code))

    def get(self, slot: Slot) -> Any:
        """What was read for a slot, to be kept: an array, or a tensor on the device and laid out as
        the slot says. Slots of one leaf get the same memory, so that what was tied stays tied."""
        staged = self._by_slot[id(slot)]
        staged.is_given = True
        if staged.copy is None and (staged.is_taken or staged.is_lent):
            staged.copy = _copied(staged.array)
        array = staged.array if staged.copy is None else staged.copy
        if slot.ref.kind == "array":
            return array
        if array.device != slot.like.device:
            array = array.to(slot.like.device)
        return wrap(array, slot.like, staged.shape)

    def take(self, slot: Slot) -> Any:
        """What was read for a slot, in this process's memory, for the caller to change."""
        staged = self._by_slot[id(slot)]
        is_kept = staged.is_given and staged.copy is None
        array = staged.array
        if is_kept or staged.is_taken:
            array = _copied(array)
        else:
            staged.is_taken = True
        return array

    @contextlib.contextmanager
    def _telling(self, slot: Slot, staged: Staged) -> Iterator[None]:
        """Errors that say for what there is no memory."""
        try:
            yield
        except (MemoryError, RuntimeError, ValueError) as error:
            itemsize = dtype_of(self._tensors[staged.name].dtype).itemsize
            raise LoadError(
                f"there is no memory for the {math.prod(staged.local_shape) * itemsize:,} bytes "
                f"of {slot.place}",
                path=self._path,
            ) from error
        except Unstorable as refusal:
            raise LoadError(f"{slot.place} {refusal}", path=self._path) from None


def _is_short(staged: Staged, code: str) -> bool:
    return math.prod(staged.local_shape) * dtype_of(code).itemsize <= _SHORT_BYTES


def _allocate_together(staged: Sequence[Staged], dtype: torch.dtype) -> None:
    """Memory for many short arrays, made at once: in a tenth of the time."""
    sizes = [math.prod(each.local_shape) for each in staged]
    memory = torch.empty(sum(sizes), dtype=dtype, device="cpu")
    view = memory_of(memory)
    at = 0
    for each, array, size in zip(staged, memory.split(sizes), sizes, strict=True):
        end = at + size * dtype.itemsize
        each.array = array if len(each.local_shape) == 1 else array.view(each.local_shape)
        each.memory, each.is_lent = view[at:end], True
        at = end


def _copied(array: Any) -> Any:
    return array.clone() if isinstance(array, torch.Tensor) else array.copy()


def _key(slot: Slot) -> Any:
    """The same for slots that one array is enough for."""
    like, ref = slot.like, slot.ref
    if like.mesh is None and slot.direct is None and ref.kind == "tensor":
        return ref.name
    direct = None if slot.direct is None else slot.direct.data_ptr()
    return (ref.name, ref.kind, like.mesh, like.placements, direct)
