"""Training in FP16 or BF16 with FP32 masters, and all of it saved and resumed bit for bit.

``MixedPrecisionOptimizer`` takes over a torch optimizer and a model; ``MixedPrecisionOptions`` say
how, and each step says what it did in a ``StepResult``.
"""

from holdfast.errors import FallbackRequiresRewrapError
from holdfast.precision._checkpoint import MixedPrecisionCheckpoint
from holdfast.precision._creating import create_checkpoint
from holdfast.precision._files import load_checkpoint, save_checkpoint
from holdfast.precision._migrating import take_over
from holdfast.precision._optimizer import MixedPrecisionOptimizer
from holdfast.precision._options import MixedPrecisionOptions, Precision
from holdfast.precision._restoring import load_and_restore, restore_checkpoint
from holdfast.precision._result import MixedPrecisionStats, StepResult
from holdfast.precision._scaler import DynamicLossScaler, LossScalerStats
from holdfast.precision._validating import validate_checkpoint

__all__ = [
    "DynamicLossScaler",
    "FallbackRequiresRewrapError",
    "LossScalerStats",
    "MixedPrecisionCheckpoint",
    "MixedPrecisionOptimizer",
    "MixedPrecisionOptions",
    "MixedPrecisionStats",
    "Precision",
    "StepResult",
    "create_checkpoint",
    "load_and_restore",
    "load_checkpoint",
    "restore_checkpoint",
    "save_checkpoint",
    "take_over",
    "validate_checkpoint",
]
