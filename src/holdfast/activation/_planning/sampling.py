"""One training step on the user's sample, up to and without the optimizer. Knows how a model is
called and what its loss is, not what is measured."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """How the user's model is called in a step, and what of its output is the loss."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], Any] | None

    @classmethod
    def of(cls, sample: Any, loss: Callable[[Any], Any] | None) -> "Sample":
        """A mapping is given as keywords, a tuple or list as arguments, all else as the one."""
        if loss is not None and not callable(loss):
            raise ValueError(f"loss must be a function of the model's output, not {loss!r:.200}")
        if isinstance(sample, Mapping):
            return cls(args=(), kwargs=dict(sample), loss=loss)
        if isinstance(sample, tuple | list):
            return cls(args=tuple(sample), kwargs={}, loss=loss)
        return cls(args=(sample,), kwargs={}, loss=loss)

    def forward(self, model: Any) -> Any:
        """The loss."""
        # Loops enter autocast for each forward, and leave it before backward: with the casts that a
        # caller's autocast keeps from step to step, the steps here would take less than theirs.
        torch.clear_autocast_cache()
        loss = self._loss(model(*self.args, **self.kwargs))
        torch.clear_autocast_cache()
        return loss

    def step(self, model: Any) -> None:
        self.forward(model).backward()

    def _loss(self, output: Any) -> Any:
        loss = _own_loss(output) if self.loss is None else self.loss(output)
        if not (isinstance(loss, torch.Tensor) and loss.numel() == 1):
            told = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise PlanError(
                f"the loss must be a tensor with one value, not {told}. Pass loss=, a function "
                "that gives it for the model's output, as in loss=lambda output: "
                "cross_entropy(output, target)"
            )
        if not loss.requires_grad:
            raise PlanError(
                "the loss needs no gradient, so there is nothing a plan could save: are all "
                "parameters frozen, or was it computed under torch.no_grad()?"
            )
        return loss


def _own_loss(output: Any) -> Any:
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    return getattr(output, "loss", output)
