"""A process that says how many bytes it holds: ``_precision_memory.py kind parameters steps``.

``fused``, ``remainder`` and ``not fused`` are AdamW with BF16 weights after so many steps,
gradients included, ``by its own step`` is one that is stepped all at once; ``growth`` is what that
many steps add to the first 100.
"""

import ctypes
import gc
import os
import sys
from pathlib import Path

import torch

from holdfast.precision import MixedPrecisionOptimizer, MixedPrecisionOptions

PAGE = os.sysconf("SC_PAGE_SIZE")


def held() -> int:
    """What the process has, once memory that is free is given back: of the FP32 weights that were
    there first the allocator keeps holes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def made(kind: str, parameters: int) -> MixedPrecisionOptimizer:
    weights = [torch.nn.Parameter(torch.randn(2**20)) for _ in range(parameters // 2**20)]
    storage = "remainder" if kind == "remainder" else "fp32"
    options = MixedPrecisionOptions.for_bf16(max_grad_norm=1.0, master_storage=storage)
    inner = torch.optim.AdamW(weights, fused=kind in {"fused", "remainder"})
    if kind == "by its own step":
        inner.register_step_post_hook(lambda *_: None)  # which is called by that step only
    return MixedPrecisionOptimizer(inner, options)


def step(optimizer: MixedPrecisionOptimizer) -> None:
    for weight in optimizer.training_weights.values():
        weight.grad = torch.full_like(weight, 0.01)
    optimizer.step()


def main() -> None:
    kind, (parameters, steps) = sys.argv[1], map(int, sys.argv[2:])
    step(made(kind, 2**20))  # whatever torch makes at a first step is none of the model's
    if kind == "growth":
        small = made("fused", parameters)
        for _ in range(100):
            step(small)
        before = held()
        for _ in range(steps):
            step(small)
        print(held() - before)
        return
    before = held()
    optimizer = made(kind, parameters)
    for _ in range(steps):
        step(optimizer)
    print(held() - before)


if __name__ == "__main__":
    main()
