"""Which ranks share out a tensor, and sums over them. Knows meshes, and no gradient's meaning."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate


@dataclass(frozen=True, slots=True)
class Sharing:
    """A mesh, and the dimensions of it along which ranks hold different parts."""

    mesh: Any
    dimensions: tuple[int, ...]


def sharing_of(tensor: torch.Tensor) -> Sharing | None:
    """``None`` if every rank that has the tensor has all of it."""
    if not isinstance(tensor, DTensor):
        return None
    placements = enumerate(tensor.placements)
    split = tuple(number for number, each in placements if not isinstance(each, Replicate))
    return Sharing(tensor.device_mesh, split) if split else None


def sum_of(value: torch.Tensor, sharing: Sharing) -> torch.Tensor:
    """The sum of what the ranks give, which all of them call."""
    value = value.to(sharing.mesh.device_type)
    for dimension in sharing.dimensions:
        dist.all_reduce(value, group=sharing.mesh.get_group(dimension))
    return value


def any_of(flags: Sequence[bool], sharings: Sequence[Sharing]) -> list[bool]:
    """Each flag, if any rank of any of the meshes has set it. All of their ranks call it."""
    if not sharings:
        return list(flags)
    for sharing in sharings:
        held = torch.tensor(flags, dtype=torch.int32, device=sharing.mesh.device_type)
        for dimension in sharing.dimensions:
            group = sharing.mesh.get_group(dimension)
            dist.all_reduce(held, op=dist.ReduceOp.MAX, group=group)
        flags = [bool(flag) for flag in held.tolist()]
    return list(flags)
