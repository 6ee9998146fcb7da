"""A step of any optimizer, by its own ``step()``. Knows pairs, and nothing of the optimizer.

Masters get FP32 gradients, in memory that is kept for the next step: 4 bytes more per parameter
than a blocked step holds. To make it anew each time would cost more than to fill it.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch.optim import Optimizer

from holdfast.precision._blocks import Scratch
from holdfast.precision._gradients import Gradient, Measured, measured
from holdfast.precision._masters import Pair, local_of


@final
class PlainStep:
    """Steps the masters of any optimizer."""

    def __init__(self, inner: Optimizer) -> None:
        self._inner = inner
        self._scratch = Scratch()
        self._held: dict[torch.Tensor, torch.Tensor] = {}

    def measure(self, gradients: Sequence[Gradient], pairs: Sequence[Pair]) -> Measured:
        """Also casts the gradients, on the way."""
        return measured(gradients, pairs, self._scratch, self._target)

    def apply(self, gradients: Sequence[Gradient], divisor: float) -> None:
        """Step by what was measured, divided by ``divisor``. Gradients that are FP32 already are
        divided in place."""
        values = [self._target(each) if each.needs_cast else each.value for each in gradients]
        if divisor != 1:
            dense = [value for value in values if not value.is_sparse]
            sparse = [value._values() for value in values if value.is_sparse]  # noqa: SLF001
            torch._foreach_mul_([*dense, *sparse], 1 / divisor)
        for each, value in zip(gradients, values, strict=True):
            if each.pair.is_split:
                each.pair.master.grad = value
            elif each.is_sparse:
                each.pair.weight.grad = value
            elif value is not local_of(each.pair.weight.grad):  # laid out anew
                local_of(each.pair.weight.grad).copy_(value)
        self._inner.step()
        split = [each.pair for each in gradients if each.pair.is_split]
        for pair in split:
            pair.master.grad = None
        if split:  # torch refuses to copy nothing
            torch._foreach_copy_(
                [pair.weight.detach() for pair in split], [pair.master.detach() for pair in split]
            )

    def _target(self, gradient: Gradient) -> torch.Tensor:
        master = gradient.pair.master
        if master not in self._held:
            self._held[master] = torch.empty_like(master, dtype=torch.float32).detach()
        return self._held[master]
