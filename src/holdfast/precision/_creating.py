"""Copies all that a mixed-precision optimizer is into a checkpoint. Knows no file."""

import copy
from collections import OrderedDict
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import torch

from holdfast import _checks
from holdfast.distributed._tensors import Like, identity, is_distributed, local_of, wrap
from holdfast.format import encode_value
from holdfast.precision._checkpoint import MixedPrecisionCheckpoint
from holdfast.precision._optimizer import MixedPrecisionOptimizer
from holdfast.precision._state import tree_of


def create_checkpoint(
    optimizer: MixedPrecisionOptimizer,
    metadata: Mapping[str, Any] | None = None,
    *,
    training_weights: bool = True,
) -> MixedPrecisionCheckpoint:
    """Everything that ``optimizer`` is, copied: later steps do not alter it.

    The copies are in this process's memory, and a sharded master's is this rank's part of it.
    Without ``training_weights`` these are left out: they are cast from the masters when restored.
    ``metadata`` is plain values by name, kept as they are. Gradients are not in it: call it after
    ``step``. ``SaveError`` for metadata that no file could hold.
    """
    _checks.instance("optimizer", optimizer, MixedPrecisionOptimizer)
    given = dict(_checks.instance("metadata", metadata or {}, Mapping))  # type: ignore[type-abstract]
    encode_value(given, root="metadata")
    tree = tree_of(optimizer)
    copies = _Copies()
    return MixedPrecisionCheckpoint(
        version=tree.version,
        timestamp=datetime.now(UTC),
        master_weights=copies.of(tree.masters),
        training_weights=copies.of(tree.training) if training_weights else {},
        base_optimizer_state=copies.of(tree.inner),
        scaler=tree.scaler,
        options=tree.options,
        step_count=tree.step_count,
        skipped_steps=tree.skipped_steps,
        has_fallback=tree.has_fallback,
        metadata=copy.deepcopy(given),
    )


class _Copies:
    """Copies of values, one for each tensor however often it is met: a layer that stays in FP32
    is its own master."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], torch.Tensor] = {}

    def of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            key = identity(value)
            if key not in self._known:
                self._known[key] = _copy(value)
            return self._known[key]
        if isinstance(value, OrderedDict):
            return OrderedDict((key, self.of(item)) for key, item in value.items())
        if isinstance(value, Mapping):
            return {key: self.of(item) for key, item in value.items()}
        if type(value) in {list, tuple}:
            return type(value)(map(self.of, value))
        return copy.deepcopy(value)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    local = local_of(tensor)
    if not is_distributed(tensor):
        return local.to("cpu", copy=True)
    return wrap(local.clone(), Like.of(tensor), tuple(tensor.shape))
