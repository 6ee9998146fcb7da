"""Which leaves go as whole tensors into which files, by the format of a checkpoint. Pure.

The rest is written by every rank for itself, as the save plan says.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.distributed._assembling import Step, plan_steps
from holdfast.distributed._options import CheckpointFormat
from holdfast.distributed._summary import OwnLeaf
from holdfast.format import dtype_of
from holdfast.reshard import Box, Leaf, LeafList, RankGroup, SavePlan, plan_save

MODEL_FILE_BYTES: Final = 5 * 1000**3
"""About the size of a model's files, as Hugging Face has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """``steps`` bring whole tensors to the ranks that write them, into ``files`` files; ``rest``
    is the plan of all other leaves."""

    steps: tuple[Step, ...]
    files: int
    rest: SavePlan
    whole: SavePlan

    def is_sending(self) -> bool:
        """Whether any tensor has to travel between ranks."""
        return any(owner != step.writer for step in self.steps for owner, _ in step.cells)


def arrange(
    groups: Sequence[RankGroup],
    form: CheckpointFormat,
    *,
    model: Collection[str],
    own: Sequence[Sequence[OwnLeaf]],
    world_size: int,
) -> Arrangement:
    """``model`` names the leaves of the model, ``own`` are the leaves of each rank's own."""
    if form is CheckpointFormat.MULTI_SHARD:
        nothing = plan_save([])
        return Arrangement(steps=(), files=0, rest=plan_save(groups), whole=nothing)
    if form is CheckpointFormat.CONSOLIDATED:
        chosen = _only(groups, lambda leaf: leaf.name in model)
        rest = plan_save(_only(groups, lambda leaf: leaf.name not in model))
    else:
        chosen, rest = list(groups), plan_save([])
    plan = plan_save(chosen)
    leaves = [tensor.leaf for tensor in plan.tensors]
    # As a shard orders its entries, so that tensors are written in the order they arrive in.
    leaves.sort(key=lambda leaf: -dtype_of(leaf.dtype).alignment)
    limit = MODEL_FILE_BYTES if form is CheckpointFormat.CONSOLIDATED else None
    files = _split(leaves, limit)
    steps = plan_steps(plan, leaves, files, world_size=world_size)
    if form is CheckpointFormat.SINGLE_FILE:
        steps += [_own_step(rank, leaf) for rank, each in enumerate(own) for leaf in each]
        steps.sort(key=lambda step: -dtype_of(step.leaf.dtype).alignment)
        files = files or [[]]
    return Arrangement(steps=tuple(steps), files=len(files), rest=rest, whole=plan)


def _only(groups: Sequence[RankGroup], wanted: Callable[[Leaf], bool]) -> list[RankGroup]:
    return [
        RankGroup(
            ranks=group.ranks,
            leaves=LeafList(
                leaves=tuple(leaf for leaf in group.leaves.leaves if wanted(leaf)),
                layouts=group.leaves.layouts,
            ),
        )
        for group in groups
    ]


def _split(leaves: Sequence[Leaf], limit: int | None) -> list[list[int]]:
    files: list[list[int]] = []
    size = 0
    for index, leaf in enumerate(leaves):
        nbytes = Box.whole(leaf.shape).size * leaf.itemsize
        if not files or (limit is not None and size and size + nbytes > limit):
            files.append([])
            size = 0
        files[-1].append(index)
        size += nbytes
    return files


def _own_step(rank: int, own: OwnLeaf) -> Step:
    leaf = Leaf(
        name=own.name, dtype=own.dtype, itemsize=dtype_of(own.dtype).itemsize, shape=own.shape
    )
    cells = () if rank == 0 else ((rank, Box.whole(own.shape)),)
    return Step(leaf=leaf, writer=0, file=0, cells=cells)
