"""A step of any optimizer, by its own ``step()``. Knows pairs, and nothing of the optimizer.

Masters get FP32 gradients, in memory that is kept for the next step: 4 bytes more per parameter
than a blocked step holds. To make it anew each time would cost more than to fill it.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch.optim import Optimizer

from holdfast.precision._blocks import Scratch, blocks_of, cut, flat, is_dense
from holdfast.precision._gradients import Gradient, Measured, measured
from holdfast.precision._masters import Pair, local_of


@final
class PlainStep:
    """Steps the masters of any optimizer."""

    def __init__(self, inner: Optimizer) -> None:
        self._inner = inner
        self._scratch = Scratch()
        self._held: dict[torch.Tensor, torch.Tensor] = {}

    def is_right(self) -> bool:
        return True

    def measure(self, gradients: Sequence[Gradient], pairs: Sequence[Pair]) -> Measured:
        return measured(gradients, pairs, self._scratch)

    def apply(self, gradients: Sequence[Gradient], divisor: float) -> None:
        """Step by what was measured, divided by ``divisor``. Gradients that are FP32 already are
        divided in place."""
        factor = 1 / divisor
        self._cast([each for each in gradients if each.needs_cast], factor)
        values = [self._target(each) if each.needs_cast else each.value for each in gradients]
        if factor != 1:
            own = [each.value for each in gradients if not each.needs_cast]
            _multiply([each._values() if each.is_sparse else each for each in own], factor)  # noqa: SLF001
        for each, value in zip(gradients, values, strict=True):
            if each.pair.is_split:
                each.pair.master.grad = value
            elif each.is_sparse:
                each.pair.weight.grad = value
            elif value is not local_of(each.pair.weight.grad):  # laid out anew
                local_of(each.pair.weight.grad).copy_(value)
        split = [each.pair for each in gradients if each.pair.is_split]
        try:
            self._inner.step()
        finally:  # also of a step that failed: a weight must never be other than its master
            for pair in split:
                pair.master.grad = None
            if split:  # torch refuses to copy nothing
                torch._foreach_copy_(
                    [pair.weight.detach() for pair in split],
                    [pair.master.detach() for pair in split],
                )
            for pair in split:
                pair.note()

    def _cast(self, gradients: Sequence[Gradient], factor: float) -> None:
        """Cast 16-bit gradients and multiply them, each block while it is in the cache."""
        for each in gradients:
            if not is_dense(each.value):
                self._target(each).copy_(each.value).mul_(factor)
        dense = [each for each in gradients if is_dense(each.value)]
        sources = [flat(each.value) for each in dense]
        blocks = blocks_of(tuple(source.numel() for source in sources))
        targets = [flat(self._target(each)) for each in dense]
        for into, parts in zip(cut(targets, blocks), cut(sources, blocks), strict=True):
            torch._foreach_copy_(into, parts)
            if factor != 1:
                torch._foreach_mul_(into, factor)

    def _target(self, gradient: Gradient) -> torch.Tensor:
        master = gradient.pair.master
        if master not in self._held:
            self._held[master] = torch.empty_like(master, dtype=torch.float32).detach()
        return self._held[master]


def _multiply(tensors: Sequence[torch.Tensor], factor: float) -> None:
    if tensors:  # torch refuses to multiply nothing
        torch._foreach_mul_(tensors, factor)
