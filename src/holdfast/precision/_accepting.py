"""What a MixedPrecisionOptimizer refuses to take over. Knows arguments, and changes nothing."""

import inspect
import logging
from collections.abc import Sequence
from typing import Final

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.precision._masters import NARROW
from holdfast.precision._options import MixedPrecisionOptions, Precision
from holdfast.precision._stepping import stepping_of
from holdfast.precision._wrappers import ddp_over

_log: Final = logging.getLogger("holdfast.precision")


def check_arguments(
    optimizer: object, options: MixedPrecisionOptions, model: nn.Module | None
) -> None:
    """Raise ``ValueError`` for what cannot be."""
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"optimizer must be an optimizer of torch, not {optimizer!r}")  # noqa: TRY004
    if hasattr(optimizer, "master_weights"):
        raise ValueError("the optimizer has masters already; give the one inside of it")
    if any(isinstance(part, Optimizer) for part in vars(optimizer).values()):
        raise ValueError(
            f"{type(optimizer).__name__} steps parameters by an optimizer inside of it, which "
            "would never see the masters; give the one inside, and shard with FSDP2"
        )
    if getattr(optimizer, "_is_taken_over", False):
        raise ValueError(
            "the optimizer was taken over already, and its groups hold the masters of that time; "
            "make a new one of the model's parameters"
        )
    if model is not None and not isinstance(model, nn.Module):
        raise ValueError(f"model must be a module of torch, not {model!r:.200}")
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
    stepping_of(optimizer, remainders=options.master_storage == "remainder")


def refuse_other_model(weights: Sequence[torch.Tensor], model: nn.Module | None) -> None:
    """Raise ``ValueError`` if the optimizer trains nothing of the model."""
    own = set() if model is None else {id(parameter) for parameter in model.parameters()}
    if model is not None and weights and not any(id(weight) in own for weight in weights):
        raise ValueError(
            "the optimizer has no parameter of the model; make it of model.parameters(), and give "
            "that model"
        )


def warn(weights: Sequence[torch.Tensor], options: MixedPrecisionOptions) -> None:
    """Log what is hardly meant: masters that are made of 16-bit weights, whose other bits are
    lost, and FP16 without a loss scale."""
    unscaled = not options.dynamic_scaling and options.initial_scale == 1
    if options.precision is Precision.FP16 and unscaled:
        _log.warning("FP16 without a loss scale: small gradients become 0; see for_fp16()")
    narrow = sum(weight.dtype in NARROW for weight in weights)
    if narrow:
        _log.warning("%d weights are 16-bit already: their masters have no more bits", narrow)


def refuse_closure(closure: object) -> None:
    """Raise ``ValueError`` if a step is given one."""
    if closure is not None:
        raise ValueError(
            "closures are refused: step() could not undo what a closure did if its gradients "
            "overflow; call scale_loss(loss).backward() and then step()"
        )


def refuse_ddp(weights: Sequence[torch.Tensor]) -> None:
    """Raise ``ValueError`` if DDP averages the gradients of any of these, whose dtype is to
    change."""
    if ddp_over(weights):
        raise ValueError(
            "the model is wrapped in DistributedDataParallel, and to change the dtype of its "
            "weights now would silently end the averaging of its gradients. Wrap it after: "
            "MixedPrecisionOptimizer(optimizer, options, model=model), then "
            "DistributedDataParallel(model). Nothing was changed"
        )
