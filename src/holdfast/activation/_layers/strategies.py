"""Which candidate layers to checkpoint. Decides from names, bytes and times; does nothing.

Replaying a layer brings its dropped bytes back while all that the layers before it keep is still
there. ``memory_aware`` counts that; the others promise shares, not a peak.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from holdfast.activation._layers.config import CheckpointConfig, CheckpointStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """What checkpointing a layer frees and costs in one forward and backward."""

    name: str
    dropped_bytes: int
    replay_ms: float
    device: str = "cpu"


def choose_by_name(config: CheckpointConfig, candidates: Sequence[str]) -> frozenset[str]:
    """The candidates to checkpoint. With a strategy that learns: all, until costs are known."""
    return frozenset(candidates[:: config.interval])  # without an interval, all of them


def choose_by_cost(
    config: CheckpointConfig, costs: Sequence[LayerCost], available: Mapping[str, int]
) -> frozenset[str]:
    """The candidates to checkpoint with a strategy that learns. ``available`` has the bytes that
    can be allocated on each device while no activation is kept; only ``memory_aware`` reads it."""
    if config.strategy is CheckpointStrategy.MEMORY_AWARE:
        return frozenset(_fitting(config.memory_share or 0, costs, available))
    if config.strategy is CheckpointStrategy.SMART:
        return frozenset(_cheapest(config.target_share or 0, costs))
    least = config.min_bytes or 0
    return frozenset(cost.name for cost in costs if cost.dropped_bytes >= least)


def missing_bytes(
    config: CheckpointConfig, costs: Sequence[LayerCost], available: Mapping[str, int]
) -> dict[str, int]:
    """By how much ``memory_share`` of each device is too little with every layer checkpointed; only
    devices where it is. The replay of the largest layer must fit."""
    largest: dict[str, int] = {}
    for cost in costs:
        largest[cost.device] = max(largest.get(cost.device, 0), cost.dropped_bytes)
    short = {
        device: math.ceil(most - (config.memory_share or 0) * available[device])
        for device, most in largest.items()
    }
    return {device: missing for device, missing in short.items() if missing > 0}


def _fitting(
    share: float, costs: Sequence[LayerCost], available: Mapping[str, int]
) -> Iterator[str]:
    for device in dict.fromkeys(cost.device for cost in costs):
        here = [cost for cost in costs if cost.device == device and cost.dropped_bytes]
        heaviest_first = sorted(here, key=lambda cost: -cost.dropped_bytes)
        room = share * available[device]
        kept = sum(cost.dropped_bytes for cost in here)
        replayed = 0
        for cost in heaviest_first:
            if kept + replayed <= room:
                break
            yield cost.name
            kept -= cost.dropped_bytes
            replayed = heaviest_first[0].dropped_bytes


def _cheapest(share: float, costs: Iterable[LayerCost]) -> Iterator[str]:
    worth = [cost for cost in costs if cost.dropped_bytes]
    wanted = share * sum(cost.dropped_bytes for cost in worth)
    freed = 0
    for cost in sorted(worth, key=_ms_per_byte):
        if freed >= wanted:
            break
        yield cost.name
        freed += cost.dropped_bytes


def _ms_per_byte(cost: LayerCost) -> float:
    return cost.replay_ms / cost.dropped_bytes
