"""A mixed-precision training at one moment, as a value: all that an exact resume needs.

Knows what there is to keep; knows no file and no live optimizer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import torch

from holdfast.precision._options import MixedPrecisionOptions
from holdfast.precision._scaler import ScalerState
from holdfast.precision._state import StateTree


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MixedPrecisionCheckpoint:
    """What ``create_checkpoint`` copies and ``restore_checkpoint`` gives back, by parameter name.

    ``training_weights`` may be empty: they are the masters, rounded. ``scaler`` is the loss scaler
    with its counters and hyper-parameters. ``base_optimizer_state`` is that of the optimizer that
    was taken over: its ``class``, its ``state`` by parameter name and its ``groups``, each tensor
    in its own dtype. ``metadata`` is the user's.
    """

    version: int
    timestamp: datetime
    master_weights: Mapping[str, torch.Tensor] = field(repr=False)
    training_weights: Mapping[str, torch.Tensor] = field(repr=False)
    base_optimizer_state: Mapping[str, Any] = field(repr=False)
    scaler: ScalerState
    options: MixedPrecisionOptions
    step_count: int
    skipped_steps: int
    has_fallback: bool
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def current_loss_scale(self) -> float:
        return self.scaler.scale

    @property
    def steps_since_last_overflow(self) -> int:
        return self.scaler.steps_since_overflow

    @property
    def consecutive_overflows(self) -> int:
        return self.scaler.consecutive_overflows

    @property
    def total_overflows(self) -> int:
        return self.scaler.total_overflows

    def tree(self) -> StateTree:
        """The same for ``apply_tree``. Tensors are not copied."""
        return StateTree(
            version=self.version,
            options=self.options,
            masters=self.master_weights,
            training=self.training_weights,
            inner=self.base_optimizer_state,
            scaler=self.scaler,
            step_count=self.step_count,
            skipped_steps=self.skipped_steps,
            has_fallback=self.has_fallback,
        )
