"""Gradients that are added up in FP32. Knows that DDP does not.

64 micro-batches added up in BF16 lose half a percent of their sum.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from holdfast.precision._masters import Pair, set_grad
from holdfast.precision._wrappers import ddp_over


def add_up_in_fp32(pairs: Sequence[Pair]) -> None:
    """Have autograd keep the gradients of 16-bit weights in FP32. Idempotent."""
    for pair in pairs:
        if not pair.stays and pair.weight.grad_dtype is not torch.float32:
            set_grad(pair.weight, pair.weight.grad, torch.float32)


def refuse_ddp_when_called(model: nn.Module, pairs: Sequence[Pair]) -> None:
    """Raise ``ValueError`` from the first call of ``model`` if it is wrapped by then: DDP's buckets
    have the dtype of the weights, and backward would fail with no word about why."""

    def check(_module: nn.Module, _args: Any) -> None:
        handle.remove()
        if ddp_over(pair.weight for pair in pairs):
            raise ValueError(
                "grad_accumulation='fp32' does not work under DistributedDataParallel, which "
                "averages gradients in the dtype of the weights; use grad_accumulation='training', "
                "or FSDP2 with MixedPrecisionPolicy(reduce_dtype=torch.float32)"
            )

    handle = model.register_forward_pre_hook(check)
