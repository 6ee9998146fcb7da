"""One training step on the user's sample, up to and without the optimizer. Knows how a model is
called and what its loss is, not what is measured."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from holdfast.activation._planning.stages import tensors_of
from holdfast.activation._regions.found import version_of
from holdfast.errors import PlanError


class Lent:
    """A tensor of the sample. A model that writes into it finds it the next time as it was."""

    __slots__ = ("_copy", "_tensor", "_version")

    def __init__(self, tensor: Any) -> None:
        self._tensor = _solid(tensor)
        self._copy = self._tensor.clone()
        self._version = version_of(tensor)

    def give_back(self) -> None:
        if version_of(self._tensor) != self._version:
            self._tensor.copy_(self._copy)
            self._version = version_of(self._tensor)


def _solid(tensor: Any) -> Any:
    """``tensor`` without what ``expand`` repeats, into which nothing can be written."""
    tensor = tensor.detach()
    if tensor.layout is torch.strided:
        for dimension, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.shape[dimension] > 1:
                tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """How the user's model is called in a step, and what of its output is the loss. ``between`` is
    called in every step between its forward and its backward."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], Any] | None
    lent: tuple[Lent, ...] = ()
    between: Callable[[], None] = _nothing

    @classmethod
    def of(cls, sample: Any, loss: Callable[[Any], Any] | None) -> "Sample":
        """A mapping is given as keywords, a tuple or list as arguments, all else as the one."""
        if loss is not None and not callable(loss):
            raise ValueError(f"loss must be a function of the model's output, not {loss!r:.200}")
        args: tuple[Any, ...] = ()
        kwargs: dict[str, Any] = {}
        if isinstance(sample, Mapping):
            kwargs = dict(sample)
        elif isinstance(sample, tuple | list):
            args = tuple(sample)
        else:
            args = (sample,)
        lent = tuple(map(Lent, tensors_of((args, kwargs))))
        return cls(args=args, kwargs=kwargs, loss=loss, lent=lent)

    def calling(self, between: Callable[[], None]) -> "Sample":
        return replace(self, between=between)

    def forward(self, model: Any) -> tuple[Any, Any]:
        """The loss, and the output that it is of."""
        self.give_back()
        # Loops enter autocast for each forward, and leave it before backward: with the casts that a
        # caller's autocast keeps from step to step, the steps here would take less than theirs.
        torch.clear_autocast_cache()
        output = model(*self.args, **self.kwargs)
        loss = self._loss(output)
        torch.clear_autocast_cache()
        return loss, output

    def step(self, model: Any) -> None:
        """As in a training loop, the output is alive until backward is done."""
        loss, _output = self.forward(model)
        self.between()
        loss.backward()

    def give_back(self) -> None:
        """Undo what a model wrote into the tensors of the sample."""
        for each in self.lent:
            each.give_back()

    def _loss(self, output: Any) -> Any:
        loss = _own_loss(output) if self.loss is None else self.loss(output)
        if not (isinstance(loss, torch.Tensor) and loss.numel() == 1):
            told = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            example = "output[0]" if isinstance(output, tuple) else "cross_entropy(output, target)"
            raise PlanError(
                f"the loss must be a tensor with one value, not {told}. Pass loss=, a function "
                f"that gives it for the model's output, as in loss=lambda output: {example}"
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
