"""Models that ranks train together: DDP, whose dtypes must stay, and FSDP2, whose parameters are
the masters. Knows torch's wrappers.

DDP hooks the gradients a parameter has when it is wrapped. A parameter that gets another dtype
afterwards is no longer averaged, and nothing says so: each rank trains on by itself.
"""

import gc
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from holdfast.precision._options import MixedPrecisionOptions


def ddp_over(parameters: Iterable[torch.Tensor]) -> DistributedDataParallel | None:
    """The DDP wrapper that averages the gradients of any of these, wherever it is.

    Looks through all objects of the process: for the few moments when dtypes change."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    wanted = {id(parameter) for parameter in parameters}
    for found in gc.get_objects():
        if issubclass(type(found), DistributedDataParallel) and any(
            id(parameter) in wanted for parameter in found.parameters()
        ):
            return found
    return None


def is_sharded(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether any is a DTensor."""
    return any(isinstance(parameter, DTensor) for parameter in parameters)


def check_sharded(
    parameters: Sequence[torch.Tensor], model: nn.Module | None, options: MixedPrecisionOptions
) -> None:
    """Raise ``ValueError`` unless FSDP2 keeps these in FP32 and computes in what ``options`` ask
    for: then they are the masters."""
    if model is None:
        raise ValueError("with parameters that are DTensors the model must be given (model=model)")
    policies = {
        module._get_fsdp_state()._mp_policy.param_dtype  # noqa: SLF001 -- FSDP2 shows it nowhere
        for module in model.modules()
        if isinstance(module, FSDPModule)
    }
    if not policies:
        raise ValueError(
            "parameters are DTensors without FSDP2 (fully_shard), whose MixedPrecisionPolicy is "
            "what casts them; tensor parallelism alone is not supported"
        )
    narrow = [parameter.dtype for parameter in parameters if parameter.dtype is not torch.float32]
    if narrow:
        raise ValueError(
            f"FSDP2 shards parameters of {narrow[0]}, of which no FP32 master can be made; shard "
            "the FP32 model, with MixedPrecisionPolicy(param_dtype=...)"
        )
    wanted = options.precision.dtype
    if wanted not in {policy or torch.float32 for policy in policies}:
        found = ", ".join(sorted(str(policy) for policy in policies))
        raise ValueError(
            f"precision is {options.precision.value!r}, but FSDP2 computes in {found}; shard with "
            f"MixedPrecisionPolicy(param_dtype={wanted})"
        )
    if options.fp32_layer_patterns:
        raise ValueError(
            "fp32_layer_patterns do not work under FSDP2, which casts by unit; give those layers "
            "a fully_shard of their own, with MixedPrecisionPolicy(), and leave the patterns out"
        )
    if options.master_storage == "remainder":
        raise ValueError("master_storage 'remainder' is not for FSDP2, whose weights are FP32")
