"""What a MixedPrecisionOptimizer refuses to take over. Knows arguments, and changes nothing."""

import inspect
from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.precision._kernels import kind_of
from holdfast.precision._options import MixedPrecisionOptions
from holdfast.precision._wrappers import ddp_over


def check_arguments(
    optimizer: object, options: MixedPrecisionOptions, model: nn.Module | None
) -> None:
    """Raise ``ValueError`` for what cannot be."""
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"optimizer must be an optimizer of torch, not {optimizer!r}")  # noqa: TRY004
    if hasattr(optimizer, "master_weights"):
        raise ValueError("the optimizer has masters already; give the one inside of it")
    if not isinstance(options, MixedPrecisionOptions):
        raise ValueError(f"options must be MixedPrecisionOptions, not {options!r}")  # noqa: TRY004
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__} steps only by closures, which are refused: what a closure "
            "did could not be undone if its gradients overflow"
        )
    if options.fp32_layer_patterns and model is None:
        raise ValueError(
            "fp32_layer_patterns are names of the model's layers; give the model too (model=model)"
        )
    if options.master_storage == "remainder" and kind_of(optimizer) is None:
        raise ValueError(
            "master_storage 'remainder' is for Adam, AdamW and SGD with fused=True, not "
            f"{type(optimizer).__name__} as it is; use master_storage='fp32'"
        )


def refuse_ddp(weights: Sequence[torch.Tensor]) -> None:
    """Raise ``ValueError`` if DDP averages the gradients of any of these, whose dtype is to
    change."""
    if ddp_over(weights) is not None:
        raise ValueError(
            "the model is wrapped in DistributedDataParallel, and to change the dtype of its "
            "weights now would silently end the averaging of its gradients. Wrap it after: "
            "MixedPrecisionOptimizer(optimizer, options, model=model), then "
            "DistributedDataParallel(model). Nothing was changed"
        )
