"""One rank reads what several want, and sends it to them: the ``"broadcast"`` strategy.

Who reads what is dealt out as the writing of replicated leaves is, so that every rank reads about
the same. Knows staged memory and the other ranks; knows no storage.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from holdfast.catalog._reading import Want
from holdfast.contracts import Operation
from holdfast.distributed._agree import share_lists
from holdfast.distributed._bulk import Course
from holdfast.distributed._staging import Staged
from holdfast.distributed._tools import Tools
from holdfast.format import StoredTensor, dtype_of
from holdfast.reshard import Layout, Leaf, LeafList, Part, Replicate, SavePlan, plan_save


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedReading:
    """What this rank reads itself, and who has the rest. ``staged`` is by the names of the plan."""

    plan: SavePlan
    staged: Mapping[str, Staged]
    rank: int
    itemsizes: Mapping[str, int]

    def wants(self) -> Iterator[Want]:
        """What this rank reads: its share of what several want, and what only it wants."""
        for write in self.plan.writes_of(self.rank):
            staged = self.staged[write.leaf.name]
            if not write.part.box.is_empty:
                yield Want(name=staged.name, part=write.part, into=staged.memory)

    def is_sending(self) -> bool:
        return any(len(_replicas(tensor.layout, 0)) > 1 for tensor in self.plan.tensors)

    def exchange(self, course: Course) -> None:
        """Send what was read to those that want it too, and receive theirs. All ranks walk through
        the same cells in the same order."""
        for tensor in self.plan.tensors:
            staged = self.staged.get(tensor.leaf.name)
            mine = () if staged is None else staged.parts
            for cell, reader in enumerate(tensor.writers):
                holders = _holders(tensor.layout, reader)
                if self.rank not in holders or len(holders) == 1:
                    continue
                box = tensor.grid.box(cell)
                part = next((each for each in mine if each.box.contains(box)), None)
                if part is not None:
                    self._pass_on(course, tensor.leaf.name, part.within(box), reader, holders)
        course.flush()

    def _pass_on(
        self, course: Course, name: str, part: Part, reader: int, holders: Sequence[int]
    ) -> None:
        staged = self.staged[name]
        array = torch.frombuffer(staged.memory, dtype=torch.uint8)
        itemsize = self.itemsizes[name]
        view = array.view(*part.array_shape, itemsize)
        where = tuple(map(slice, part.local.start, part.local.stop))
        box = view[where]
        if reader == self.rank:
            data = box.contiguous().view(-1)
            for holder in holders:
                if holder != reader:
                    course.send(holder, data)
            return
        contiguous = box.is_contiguous()
        data = box if contiguous else torch.empty(box.shape, dtype=torch.uint8, device="cpu")
        course.receive(reader, data.view(-1))
        if not contiguous:
            box.copy_(data)


def share_reading(
    operation: Operation,
    tools: Tools,
    staged: Sequence[Staged],
    tensors: Mapping[str, StoredTensor],
) -> SharedReading:
    """Agree with the other ranks on who reads what. All ranks call this."""
    layouts: dict[Layout, int] = {}
    leaves: list[Leaf] = []
    by_name: dict[str, Staged] = {}
    itemsizes: dict[str, int] = {}
    rank_of = tools.rank_of()
    for each in staged:
        layout = each.like.layout(len(each.shape), rank_of)
        # Ranks may hold a leaf in layouts of their own, as over the rows of a mesh, and a rank may
        # want it twice: only what is laid out alike is shared.
        first = f"{each.name} {layout}"
        name, number = first, 1
        while name in by_name:
            number += 1
            name = f"{first} {number}"
        by_name[name] = each
        dtype = dtype_of(tensors[each.name].dtype)
        itemsizes[name] = dtype.itemsize
        leaves.append(
            Leaf(
                name=name,
                dtype=dtype.code,
                itemsize=dtype.itemsize,
                shape=each.shape,
                layout=None if layout is None else layouts.setdefault(layout, len(layouts)),
            )
        )
    own = LeafList(leaves=tuple(leaves), layouts=tuple(layouts))
    plan = plan_save(share_lists(operation, own))
    return SharedReading(plan=plan, staged=by_name, rank=operation.rank, itemsizes=itemsizes)


def _holders(layout: Layout, rank: int) -> list[int]:
    """The ranks that hold the same as ``rank``, itself among them."""
    ranks = layout.ranks.array()
    found = np.flatnonzero(ranks == rank)
    return [rank] if not len(found) else _replicas(layout, int(found[0]))


def _replicas(layout: Layout, index: int) -> list[int]:
    at = np.unravel_index(index, layout.mesh_shape)
    cube = layout.ranks.array().reshape(layout.mesh_shape)
    where = tuple(
        slice(None) if isinstance(placement, Replicate) else slice(int(i), int(i) + 1)
        for i, placement in zip(at, layout.placements, strict=True)
    )
    return [int(rank) for rank in cube[where].ravel()]
