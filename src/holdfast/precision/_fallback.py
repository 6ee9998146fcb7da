"""How a model that keeps overflowing goes on in FP32. Knows when it can, and no step.

It goes on from the masters: nothing that was learned is rounded away.
"""

import logging
from collections.abc import Callable
from typing import Final

import torch
from torch import nn

from holdfast.errors import FallbackRequiresRewrapError
from holdfast.precision._boundaries import Boundaries
from holdfast.precision._masters import Masters
from holdfast.precision._naming import unwrapped
from holdfast.precision._wrappers import ddp_over, is_sharded

Rewrap = Callable[[nn.Module], nn.Module]

_log: Final = logging.getLogger("holdfast.precision")


def refusal(masters: Masters) -> str | None:
    """Why the dtype of these weights cannot change now; ``None`` if it can."""
    weights = [pair.weight for pair in masters]
    if is_sharded(weights):
        return "it is sharded by FSDP2, whose MixedPrecisionPolicy cannot be changed"
    if ddp_over(weights) is not None:
        return "it is wrapped in DistributedDataParallel, which would stop averaging its gradients"
    return None


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


def fall_back(
    masters: Masters,
    boundaries: Boundaries | None,
    model: nn.Module | None,
    rewrap: Rewrap | None,
    overflows: int,
) -> nn.Module | None:
    """Go on in FP32. Returns the model, wrapped anew if it had to be. Every rank calls it in the
    same step.

    Raises ``FallbackRequiresRewrapError``, with nothing changed, for a wrapped model if there is no
    ``rewrap``.
    """
    why = refusal(masters)
    if why is not None and (rewrap is None or model is None):
        raise FallbackRequiresRewrapError(
            f"{overflows} steps in a row overflowed, and the model should go on in FP32, but "
            f"{why}. The masters are intact, no weight was changed. Give MixedPrecisionOptimizer "
            "model=model and rewrap=function, which returns the model wrapped anew, or save, and "
            "resume with Precision.FP32"
        )
    if why is None or not is_sharded(pair.weight for pair in masters):
        to_fp32(masters, boundaries)
    _log.warning("%d steps in a row overflowed: the model goes on in FP32", overflows)
    if why is None or model is None or rewrap is None:
        return model
    return rewrap(unwrapped(model))
