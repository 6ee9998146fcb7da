"""Models that ranks train together: DDP, whose dtypes must stay, and FSDP2, whose parameters are
the masters. Knows torch's wrappers.

DDP hooks the gradients a parameter has when it is wrapped. A parameter that gets another dtype
afterwards is no longer averaged, and nothing says so: each rank trains on by itself.
"""

import gc
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from holdfast.precision._blocks import flat
from holdfast.precision._masters import Pair
from holdfast.precision._options import MixedPrecisionOptions


def ddp_over(parameters: Iterable[torch.Tensor]) -> list[DistributedDataParallel]:
    """The DDP wrappers that average the gradients of any of these, wherever they are.

    Looks through all objects of the process: for the few moments when dtypes change."""
    if not dist.is_available() or not dist.is_initialized():
        return []
    wanted = {id(parameter) for parameter in parameters}
    return [
        found
        for found in gc.get_objects()
        if issubclass(type(found), DistributedDataParallel)
        and any(id(parameter) in wanted for parameter in found.parameters())
    ]


def share_masters(pairs: Sequence[Pair]) -> None:
    """Give all ranks the masters of the rank whose weights DDP gave them when it wrapped a model.
    Without DDP nothing happens; with it every rank calls this in the same step.

    Of another rank's weights they have but the 16 bits, and would each go on from other masters.
    """
    for ddp in ddp_over(pair.weight for pair in pairs):
        averaged = {id(parameter) for parameter in ddp.parameters()}
        for pair in pairs:
            if id(pair.weight) not in averaged:
                continue
            if pair.remainder is not None:  # as bytes: gloo sends no 16-bit integers
                dist.broadcast(flat(pair.remainder).view(torch.uint8), **_first(ddp))
            elif pair.is_split:
                dist.broadcast(flat(pair.master.detach()), **_first(ddp))
                pair.cast()


def _first(ddp: DistributedDataParallel) -> dict[str, Any]:
    return {"group": ddp.process_group, "group_src": 0}


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
