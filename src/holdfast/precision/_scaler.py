"""The loss scale, and how it follows overflows. Knows numbers, and no gradient.

torch's ``GradScaler`` has no smallest scale: 166 overflows in a row take it to 0, and the next
gradient that is finite then writes infinity into the weights. This one stays where it is told to.
"""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, Final, final

import torch

from holdfast.precision._options import LEAST_SCALE, MixedPrecisionOptions, converted

_log: Final = logging.getLogger("holdfast.precision")

__all__ = ["DynamicLossScaler", "LossScalerStats", "ScalerState"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScalerState:
    """All there is to a loss scaler: where it stands, and what it was told.

    ``growth_tracker``: applied steps since the last growth or overflow. ``hysteresis_left``: how
    many more overflows in a row shrink the scale. The rest is as in ``MixedPrecisionOptions``.
    """

    scale: float
    growth_tracker: int = 0
    hysteresis_left: int = 1
    steps_since_overflow: int = 0
    consecutive_overflows: int = 0
    total_overflows: int = 0
    dynamic: bool = True
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float = 1.0
    max_scale: float = 2.0**24

    @classmethod
    def of(cls, options: MixedPrecisionOptions) -> "ScalerState":
        """Of a scaler that has seen nothing yet."""
        return cls(
            scale=options.initial_scale,
            hysteresis_left=options.hysteresis,
            dynamic=options.dynamic_scaling,
            growth_factor=options.growth_factor,
            backoff_factor=options.backoff_factor,
            growth_interval=options.growth_interval,
            hysteresis=options.hysteresis,
            min_scale=options.min_scale,
            max_scale=options.max_scale,
        )

    def plain(self) -> dict[str, Any]:
        """As a dict of numbers; ``from_plain`` makes the same state of it."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def from_plain(cls, plain: object) -> "ScalerState":
        """Raises ``ValueError`` for what is no such dict, or holds numbers no scaler can have."""
        state = converted(plain, cls, "this is no state of a loss scaler")
        problems = state.problems()
        if problems:
            raise ValueError(f"this is no state of a loss scaler: {'; '.join(problems)}")
        return state

    def problems(self) -> list[str]:
        """What no scaler can have; empty if all is well."""
        counts = (
            *("growth_tracker", "hysteresis_left", "steps_since_overflow"),
            *("consecutive_overflows", "total_overflows"),
        )
        found = [f"{name} is {getattr(self, name)}" for name in counts if getattr(self, name) < 0]
        if not LEAST_SCALE <= self.scale < float("inf"):
            found.append(f"scale is {self.scale}")
        elif self.dynamic and not self.min_scale <= self.scale <= self.max_scale:
            found.append(f"scale {self.scale:g} is not in {self.min_scale:g}..{self.max_scale:g}")
        try:
            MixedPrecisionOptions(
                dynamic_scaling=self.dynamic,
                initial_scale=self.min_scale,
                growth_factor=self.growth_factor,
                backoff_factor=self.backoff_factor,
                growth_interval=self.growth_interval,
                hysteresis=self.hysteresis,
                min_scale=self.min_scale,
                max_scale=self.max_scale,
            )
        except ValueError as error:
            found.append(str(error))
        return found

    def after(self, *, overflow: bool) -> "ScalerState":
        """What follows a step that overflowed, or one that was applied."""
        if overflow:
            left = max(self.hysteresis_left - 1, 0)
            smaller = max(self.scale * self.backoff_factor, self.min_scale)
            return dataclasses.replace(
                self,
                scale=smaller if self.dynamic and left == 0 else self.scale,
                growth_tracker=0,
                hysteresis_left=left,
                steps_since_overflow=0,
                consecutive_overflows=self.consecutive_overflows + 1,
                total_overflows=self.total_overflows + 1,
            )
        tracker = self.growth_tracker + 1
        grows = self.dynamic and tracker >= self.growth_interval
        return dataclasses.replace(
            self,
            scale=min(self.scale * self.growth_factor, self.max_scale) if grows else self.scale,
            growth_tracker=0 if tracker >= self.growth_interval else tracker,
            hysteresis_left=self.hysteresis,
            steps_since_overflow=self.steps_since_overflow + 1,
            consecutive_overflows=0,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LossScalerStats:
    """What a loss scaler has seen."""

    current_scale: float
    steps_since_last_overflow: int
    consecutive_overflows: int
    total_overflows: int


@final
class DynamicLossScaler:
    """Holds the loss scale. Not thread-safe; the same on every rank, if each is told the same.

    It is a part of ``MixedPrecisionOptimizer``, and can be used by itself::

        >>> scaler = DynamicLossScaler(MixedPrecisionOptions.for_fp16())
        >>> scaler.update(overflow=True)
        32768.0
    """

    def __init__(self, options: MixedPrecisionOptions | None = None) -> None:
        self.state = ScalerState.of(options or MixedPrecisionOptions.for_fp16())
        self._is_heeded = False

    @property
    def scale(self) -> float:
        return self.state.scale

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """In FP32, or FP64 if it is: 2¹⁶ times anything of FP16 is infinite."""
        self._is_heeded = True
        wide = loss if loss.dtype is torch.float64 else loss.float()
        return wide * self.scale

    def update(self, *, overflow: bool) -> float:
        """Take note of a step that overflowed or was applied; the scale of the next."""
        self.state = self.state.after(overflow=overflow)
        return self.scale

    def check_heeded(self) -> None:
        """Log once if gradients came that are divided by a scale nobody ever asked for."""
        if self.scale != 1 and not self._is_heeded:
            _log.warning(
                "gradients are divided by the loss scale %g, but scale_loss() was never called: "
                "call backward() of scale_loss(loss), or they are too small",
                self.scale,
            )
        self._is_heeded = True

    def retire(self) -> None:
        """Stay at 1 from now on, as FP32 gradients need no scale. Goes on counting."""
        self.state = dataclasses.replace(self.state, scale=1.0, dynamic=False)

    def get_stats(self) -> LossScalerStats:
        return LossScalerStats(
            current_scale=self.scale,
            steps_since_last_overflow=self.state.steps_since_overflow,
            consecutive_overflows=self.state.consecutive_overflows,
            total_overflows=self.state.total_overflows,
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything, hyper-parameters included, as a dict of numbers."""
        return self.state.plain()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raises ``ValueError`` for what is no scaler's state, and stays as it was."""
        self.state = ScalerState.from_plain(dict(state_dict))
