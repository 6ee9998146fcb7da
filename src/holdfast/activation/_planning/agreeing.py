"""One plan for all ranks. Knows torch.distributed's default group.

Ranks plan in step, for the model's forward and backward may call collectives: ranks that decided
apart would run different numbers of steps, and wait for each other for ever.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from holdfast.activation._planning.seen import StageProfile
from holdfast.errors import PlanError

T = TypeVar("T")


def gathered(value: T) -> list[T]:
    """What every rank has."""
    if not _has_others():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def agreed(weight: int, *values: Any) -> tuple[Any, ...]:
    """``values`` as the rank has them whose ``weight`` is highest."""
    if not _has_others():
        return values
    weights = gathered(weight)
    source = weights.index(max(weights))
    sent = list(values) if dist.get_rank() == source else [None] * len(values)
    dist.broadcast_object_list(sent, src=source)
    return tuple(sent)


def reconcile(stages: Sequence[StageProfile]) -> None:
    """What only some ranks can do, none does. ``PlanError`` on all if they ran other stages."""
    ranks = gathered(
        [(each.name, each.kind, each.replayable, each.communicates) for each in stages]
    )
    ran = [[stage[:2] for stage in stages] for stages in ranks]
    for rank, other in enumerate(ran):
        if other != ran[0]:
            unlike = sorted({name for name, _ in {*other} ^ {*ran[0]}}) or "in another order"
            raise PlanError(
                f"rank {rank} ran other stages than rank 0: {unlike}. One plan is made for all "
                "ranks, so they must have the same model and call holdfast.plan with the same "
                "stages. The model is as it was"
            )
    for number, stage in enumerate(stages):
        stage.replayable = all(rank[number][2] for rank in ranks)
        stage.communicates = any(rank[number][3] for rank in ranks)


def _has_others() -> bool:
    return bool(dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
