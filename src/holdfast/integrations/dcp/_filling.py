"""Reads what a plan of DCP's asks for into the tensors that its planner gives.

Tensors in this process's memory are read into as they are. What lies elsewhere, is not contiguous
or of another dtype is read into memory of its own first, a part at a time.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from holdfast.catalog._reading import TensorReader, Want
from holdfast.catalog._shard_write import as_bytes
from holdfast.distributed._collecting import collecting_later
from holdfast.distributed._stored import refs_in
from holdfast.distributed._tensors import empty_local, has_memory, known_dtype, memory_of
from holdfast.errors import LoadError
from holdfast.format import LeafRef, StoredTensor, dtype_of, numpy_dtype
from holdfast.integrations.dcp._contents import Listed
from holdfast.integrations.dcp._values import pickled, with_leaves
from holdfast.reshard import Box, Part

_STAGED_BYTES: Final = 128 * 1024 * 1024
"""About how much is read at once of what cannot be read to where it belongs."""


class _Target(NamedTuple):
    request: ReadItem
    name: str
    box: Box
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Filling:
    """One load, on one rank. After an error the tensors hold anything."""

    reader: TensorReader
    tensors: Mapping[str, StoredTensor]
    listed: Listed
    planner: LoadPlanner
    path: str

    def run(self, items: Sequence[ReadItem]) -> None:
        self._load_values([item for item in items if item.type is LoadItemType.BYTE_IO])
        with collecting_later():
            targets = self._targets(items)
            direct = [each for each in targets if self._is_direct(each)]
        with collecting_later(moved_bytes=sum(each.tensor.nbytes for each in direct)):
            self._fill((each.name, each.box, memory_of(each.tensor)) for each in direct)
        for each in direct:
            if not each.tensor.is_inference():
                torch.autograd.graph.increment_version(each.tensor)
            self.planner.commit_tensor(each.request, each.tensor)
        taken = {id(each) for each in direct}
        for some in self._batches(each for each in targets if id(each) not in taken):
            self._stage(some)

    def _targets(self, items: Sequence[ReadItem]) -> list[_Target]:
        """About in the order of the files, where larger types come first: neighbours are read
        together."""
        targets = [self._target(item) for item in items if item.type is not LoadItemType.BYTE_IO]
        order = {name: nth for nth, name in enumerate(self.tensors)}
        sizes = {name: -dtype_of(tensor.dtype).itemsize for name, tensor in self.tensors.items()}
        targets.sort(key=lambda each: (sizes[each.name], order[each.name], each.box.start))
        return targets

    def _target(self, item: ReadItem) -> _Target:
        key = item.storage_index.fqn
        name = self.listed.names.get(item.storage_index)
        if name is None:
            raise LoadError(
                f"the checkpoint has nothing of {key!r} at {item.storage_index.offset}",
                path=self.path,
            )
        start, shape = tuple(item.storage_offsets), tuple(item.lengths)
        box = Box(start, tuple(map(sum, zip(start, shape, strict=True))))
        stored = self.tensors[name].shape
        if len(start) != len(stored) or not Box.whole(stored).contains(box):
            raise LoadError(f"{box} is not within {key!r}, which is of {stored}", path=self.path)
        tensor = self.planner.resolve_tensor(item).detach()
        if tuple(tensor.shape) != shape:
            raise LoadError(
                f"{key!r}: {shape} elements are to be read into a tensor of shape "
                f"{tuple(tensor.shape)}",
                path=self.path,
            )
        return _Target(item, name, box, tensor)

    def _is_direct(self, target: _Target) -> bool:
        tensor = target.tensor
        return (
            type(tensor) is torch.Tensor
            and tensor.device.type == "cpu"
            and tensor.layout is torch.strided
            and tensor.dtype == known_dtype(self.tensors[target.name].dtype)
            and tensor.is_contiguous()
            and not tensor.is_conj()
            and not tensor.is_neg()
            and has_memory(tensor)
        )

    def _stage(self, targets: Sequence[_Target]) -> None:
        staged = [empty_local(each.box.shape, self.tensors[each.name].dtype) for each in targets]
        self._fill(
            (each.name, each.box, memory_of(memory))
            for each, memory in zip(targets, staged, strict=True)
        )
        for each, memory in zip(targets, staged, strict=True):
            each.tensor.copy_(memory)
            self.planner.commit_tensor(each.request, each.tensor)

    def _batches(self, targets: Iterable[_Target]) -> Iterator[list[_Target]]:
        """As many as may be staged at once; one that is larger is alone."""
        some: list[_Target] = []
        size = 0
        for each in targets:
            nbytes = each.box.size * dtype_of(self.tensors[each.name].dtype).itemsize
            if some and size + nbytes > _STAGED_BYTES:
                yield some
                some, size = [], 0
            some.append(each)
            size += nbytes
        if some:
            yield some

    def _load_values(self, items: Sequence[ReadItem]) -> None:
        values = {}
        for item in items:
            key = item.storage_index.fqn
            if key not in self.listed.values:
                raise LoadError(f"the checkpoint has no value {key!r}", path=self.path)
            values[key] = self.listed.values[key]
        inner = {ref.name: ref for value in values.values() for _, ref in refs_in(value)}
        leaves = {name: self._empty(ref) for name, ref in inner.items()}
        self._fill(
            (name, Box.whole(self.tensors[name].shape), _memory(array))
            for name, array in leaves.items()
        )
        for item in items:
            value = with_leaves(values[item.storage_index.fqn], leaves)
            self.planner.load_bytes(item, pickled(value))

    def _empty(self, ref: LeafRef) -> Any:
        stored = self.tensors[ref.name]
        if ref.kind == "tensor":
            return empty_local(stored.shape, stored.dtype)
        shape = (*stored.shape, *dtype_of(stored.dtype).numpy_tail)
        return np.empty(shape, numpy_dtype(stored.dtype))

    def _fill(self, wanted: Iterable[tuple[str, Box, memoryview]]) -> None:
        self.reader.fill(
            Want(name, Part.alone(box), memory) for name, box, memory in wanted if not box.is_empty
        )


def _memory(array: Any) -> memoryview:
    if isinstance(array, torch.Tensor):
        return memory_of(array)
    return as_bytes(array) if array.nbytes else memoryview(b"")
