"""Gradients without the loss scale, for whoever looks at them or changes them before a step. Knows
pairs, and no norm."""

from collections.abc import Iterable
from typing import final

import torch

from holdfast.precision._masters import NARROW, Pair, set_grad


@final
class Unscaling:
    """What ``unscale_`` has done since the last step.

    The gradient is shown twice, by the weight and by its master, and is one: whichever is changed,
    or replaced, is what the step takes.
    """

    def __init__(self) -> None:
        self.is_done = False
        self._shown: dict[int, tuple[torch.Tensor, torch.dtype]] = {}

    def show(self, pairs: Iterable[Pair], scale: float) -> None:
        """Divide the gradients of the weights, which are FP32 from now on. Once per step."""
        if self.is_done:
            raise RuntimeError("unscale_() was called already since the last step() or zero_grad()")
        for pair in pairs:
            gradient = pair.weight.grad
            if gradient is None:
                continue
            if gradient.dtype in NARROW:
                wide = gradient.float().coalesce() if gradient.is_sparse else gradient.float()
                set_grad(pair.weight, wide.div_(scale), torch.float32)
            else:
                gradient.div_(scale)
            if pair.is_split:
                pair.master.grad = pair.weight.grad
            self._shown[id(pair)] = pair.weight.grad, gradient.dtype
        self.is_done = True

    def gradient(self, pair: Pair) -> torch.Tensor | None:
        """What a step is to take."""
        if self.is_done and pair.weight.grad is not None and id(pair) not in self._shown:
            raise RuntimeError(
                f"{pair.name!r} got its gradient after unscale_(), which is to be called after "
                "backward(). Nothing was changed"
            )
        if not pair.is_split or pair.master.grad is None:
            return pair.weight.grad
        if not self.is_done:
            raise RuntimeError(
                f"the master of {pair.name!r} has a gradient that backward() did not make: "
                "gradients are those of the model's parameters. torch.distributed.checkpoint's "
                "get_optimizer_state_dict sets such, and a learning rate of 0; save with "
                "holdfast's DistributedCheckpoint. No weight was changed"
            )
        shown, _ = self._shown.get(id(pair), (None, None))
        return pair.weight.grad if pair.master.grad is shown else pair.master.grad

    def end(self, pairs: Iterable[Pair]) -> None:
        """Give the gradients the dtypes they had. Idempotent."""
        for pair in pairs if self.is_done else ():
            if pair.is_split:
                pair.master.grad = None
            _, dtype = self._shown.get(id(pair), (None, None))
            if dtype is not None and pair.weight.grad_dtype is not dtype:
                set_grad(pair.weight, pair.weight.grad, dtype)
        self._shown.clear()
        self.is_done = False
