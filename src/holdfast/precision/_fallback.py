"""How a model that keeps overflowing goes on in FP32. Knows when it can, and no step.

It goes on from the masters: nothing that was learned is rounded away.
"""

from collections.abc import Callable

import torch
from torch import nn

from holdfast.errors import FallbackRequiresRewrapError
from holdfast.precision._boundaries import Boundaries
from holdfast.precision._masters import Masters
from holdfast.precision._options import MixedPrecisionOptions, Precision
from holdfast.precision._scaler import ScalerState
from holdfast.precision._wrappers import ddp_over, is_sharded

Rewrap = Callable[[nn.Module], nn.Module]


def is_due(options: MixedPrecisionOptions, scaler: ScalerState) -> bool:
    """Whether a model that is not FP32 has overflowed too often in a row."""
    most = options.max_consecutive_overflows
    if most is None or options.precision is Precision.FP32:
        return False
    return scaler.consecutive_overflows >= most


def refusal(masters: Masters) -> str | None:
    """Why the dtype of these weights cannot change now; ``None`` if it can."""
    weights = [pair.weight for pair in masters]
    if is_sharded(weights):
        return "it is sharded by FSDP2, whose MixedPrecisionPolicy cannot be changed"
    if ddp_over(weights):
        return "it is wrapped in DistributedDataParallel, which would stop averaging its gradients"
    return None


def must_rewrap(masters: Masters, overflows: int, *, can_rewrap: bool) -> bool:
    """Whether a model that is to go on in FP32 must be wrapped anew. Raises
    ``FallbackRequiresRewrapError`` if it must be, and cannot."""
    why = refusal(masters)
    if why is None:
        return False
    sharded = is_sharded(pair.weight for pair in masters)
    if can_rewrap and not sharded:
        return True
    way = (
        "Save with DistributedCheckpoint, and load that in a new process that shards the model "
        "with MixedPrecisionPolicy() and has options of Precision.FP32"
        if sharded
        else "Give MixedPrecisionOptimizer model=model and rewrap=function, which returns the "
        "model wrapped anew. Or save_checkpoint() on one rank, and load_and_restore() it in a new "
        "process with options of Precision.FP32"
    )
    raise FallbackRequiresRewrapError(
        f"{overflows} steps in a row overflowed, and the model should go on in FP32, but {why}. "
        f"The masters are intact, no weight was changed; zero_grad() ends the overflow. {way}"
    )


def to_fp32(masters: Masters, boundaries: Boundaries | None) -> None:
    """Make weights, and the model's buffers and frozen parameters, FP32."""
    masters.merge()
    if boundaries is not None:
        boundaries.become(torch.float32)
        boundaries.cast_rest({id(pair.weight) for pair in masters})


def to_training(masters: Masters, boundaries: Boundaries | None, dtype: torch.dtype) -> None:
    """The way back, for a state that was saved before the fallback."""
    masters.split()
    if boundaries is not None:
        boundaries.become(dtype)
        boundaries.cast_rest({id(pair.weight) for pair in masters})
