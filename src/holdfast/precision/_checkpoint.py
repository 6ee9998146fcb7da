"""A mixed-precision training at one moment, as a value: all that an exact resume needs.

Knows what there is to keep; knows no file and no live optimizer.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, final

import torch

from holdfast.precision._moment import Moment
from holdfast.precision._options import MixedPrecisionOptions
from holdfast.precision._scaler import ScalerState
from holdfast.precision._state_tree import StateTree

_TENSORS: Final = ("master_weights", "training_weights", "base_optimizer_state")


@dataclass(frozen=True, slots=True)
class Later:
    """In place of a field: one of the trees of a moment, which is copied when it is looked at."""

    moment: Moment
    name: str


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MixedPrecisionCheckpoint:
    """What ``create_checkpoint`` makes and ``restore_checkpoint`` gives back, by parameter name.

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

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        return value.moment.tree(value.name) if type(value) is Later else value

    def tree(self) -> StateTree:
        """The same for ``apply_tree``."""
        return self._tree({name: getattr(self, name) for name in _TENSORS})

    @contextlib.contextmanager
    def held(self) -> Iterator[StateTree]:
        """The same, to be read only and by this thread only: nothing is copied for it."""
        fields = {name: object.__getattribute__(self, name) for name in _TENSORS}
        later = fields["master_weights"]
        if type(later) is not Later:
            yield self.tree()
            return
        with later.moment.held() as trees:
            yield self._tree(trees)

    def _tree(self, tensors: Mapping[str, Any]) -> StateTree:
        return StateTree(
            version=self.version,
            options=self.options,
            masters=tensors["master_weights"],
            training=tensors["training_weights"],
            inner=tensors["base_optimizer_state"],
            scaler=self.scaler,
            step_count=self.step_count,
            skipped_steps=self.skipped_steps,
            has_fallback=self.has_fallback,
        )


def field_problems(checkpoint: MixedPrecisionCheckpoint) -> Iterator[str]:
    """What is wrong with the fields that no optimizer has."""
    fields: dict[str, tuple[object, type]] = {
        "timestamp": (checkpoint.timestamp, datetime),
        "metadata": (checkpoint.metadata, Mapping),
    }
    for name, (value, kind) in fields.items():
        if not isinstance(value, kind):
            yield f"{name} is no {kind.__name__} but {value!r:.200}"
