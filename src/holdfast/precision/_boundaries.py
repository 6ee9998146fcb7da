"""Where dtypes meet inside of a model: hooks that cast, so that no user code needs to. Knows
modules, and no optimizer.

A bare FP32 norm hands FP32 to the next BF16 layer, which refuses it. Here a layer that stays FP32
has its floating inputs cast up and its outputs cast back, and what the model is called with is cast
to the dtype it has at the time.
"""

from collections.abc import Iterator
from typing import Any, final

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from holdfast.precision._masters import FLOATS, set_data
from holdfast.precision._options import MixedPrecisionOptions


@final
class Boundaries:
    """The hooks of one model, and the dtype it has now."""

    def __init__(self, model: nn.Module, options: MixedPrecisionOptions) -> None:
        self._model = model
        self._options = options
        self._dtype = options.precision.dtype
        self._kept = list(_outermost(model, options))

    def kept(self) -> set[int]:
        """The ids of parameters and buffers in layers that stay FP32."""
        return {
            id(tensor)
            for module in self._kept
            for tensor in (*module.parameters(), *module.buffers())
        }

    def install(self) -> None:
        """Put the hooks in place."""
        if self._options.cast_inputs:
            self._model.register_forward_pre_hook(self._cast_model_inputs, with_kwargs=True)
        if self._options.precision.dtype is not torch.float32:
            for module in self._kept:
                module.register_forward_pre_hook(self._cast_up, with_kwargs=True)
                module.register_forward_hook(self._cast_back)

    def rest(self, parameters: set[int]) -> Iterator[tuple[torch.Tensor, torch.dtype]]:
        """Parameters and buffers that are not among ``parameters`` and have another dtype than they
        should, with that."""
        kept = self.kept()
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            wanted = torch.float32 if id(tensor) in kept else self._dtype
            if id(tensor) not in parameters and tensor.dtype in FLOATS and tensor.dtype != wanted:
                yield tensor, wanted

    def cast_rest(self, parameters: set[int]) -> None:
        """Give frozen parameters and buffers the model's dtype, as ``Module.to`` would. They have
        no masters."""
        for tensor, wanted in list(self.rest(parameters)):
            set_data(tensor, tensor.detach().to(wanted))

    def become(self, dtype: torch.dtype) -> None:
        """What the model's dtype is from now on; the caller casts it."""
        self._dtype = dtype

    def _cast_model_inputs(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _cast((args, kwargs), self._dtype)

    def _cast_up(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _cast((args, kwargs), torch.float32)

    def _cast_back(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        return _cast(output, self._dtype)


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.dtype in FLOATS else tensor

    return tree_map_only(torch.Tensor, cast, tree)


def _outermost(
    module: nn.Module, options: MixedPrecisionOptions, name: str = ""
) -> Iterator[nn.Module]:
    """The layers that stay FP32, without those inside of another such."""
    if options.keeps_fp32(name, type(module).__name__):
        yield module
        return
    for part, child in module.named_children():
        yield from _outermost(child, options, f"{name}.{part}" if name else part)
