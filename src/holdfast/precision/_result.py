"""What a step did, and what all of them did, as values."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.precision._scaler import LossScalerStats

if TYPE_CHECKING:
    from holdfast.precision._optimizer import MixedPrecisionOptimizer

__all__ = ["MixedPrecisionStats", "StepResult"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What ``MixedPrecisionOptimizer.step`` did. True if the step was applied.

    ``scale``: the loss scale the gradients had. ``grad_norm``: of all gradients together, without
    the scale and before they were clipped; not finite if the step was skipped. ``nonfinite``: the
    parameters whose gradients were not finite. ``fell_back``: from this step on the model is FP32.
    """

    applied: bool
    scale: float
    grad_norm: float
    nonfinite: tuple[str, ...] = ()
    fell_back: bool = False

    def __bool__(self) -> bool:
        return self.applied


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPrecisionStats:
    """What a ``MixedPrecisionOptimizer`` has done. ``step_count`` counts calls of ``step``, the
    skipped ones too."""

    step_count: int
    skipped_steps: int
    has_fallback: bool
    loss_scaler: LossScalerStats

    @property
    def applied_steps(self) -> int:
        return self.step_count - self.skipped_steps

    @property
    def skip_rate(self) -> float:
        """Of all steps; 0 before the first."""
        return self.skipped_steps / self.step_count if self.step_count else 0.0


def stats_of(optimizer: "MixedPrecisionOptimizer") -> MixedPrecisionStats:
    return MixedPrecisionStats(
        step_count=optimizer.step_count,
        skipped_steps=optimizer.skipped_steps,
        has_fallback=optimizer.has_fallback,
        loss_scaler=optimizer.scaler.get_stats(),
    )
