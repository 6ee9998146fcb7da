"""Where dtypes meet inside of a model: hooks that cast, so that no user code needs to. Knows
modules, and no optimizer.

A bare FP32 norm hands FP32 to the next BF16 layer, which refuses it. Here a layer that stays FP32
has its floating inputs cast up and its outputs cast back, and what the model is called with is cast
to the dtype it has at the time.
"""

from collections.abc import Iterator
from dataclasses import replace
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
        self._hooks: list[Any] = []
        _check_patterns(model, options)
        self._kept = _with_tied(model, list(_outermost(model, options)))

    def kept(self) -> set[int]:
        """The ids of parameters and buffers in layers that stay FP32."""
        return {
            id(tensor)
            for module in self._kept
            for tensor in (*module.parameters(), *module.buffers())
        }

    def install(self) -> None:
        """Put the hooks in place, instead of those of an optimizer that had the model before."""
        for former in _installed(self._model):
            former.remove()
        if self._options.cast_inputs:
            cast = self._model.register_forward_pre_hook(self._cast_model_inputs, with_kwargs=True)
            self._hooks.append(cast)
        if self._options.precision.dtype is not torch.float32:
            for module in self._kept:
                up = module.register_forward_pre_hook(self._cast_up, with_kwargs=True)
                self._hooks += [up, module.register_forward_hook(self._cast_back)]

    def remove(self) -> None:
        """Take the hooks away. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

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


def _installed(model: nn.Module) -> list[Boundaries]:
    """Those that have hooks in the model."""
    hooks = (
        hook
        for module in model.modules()
        for held in (module._forward_pre_hooks, module._forward_hooks)  # noqa: SLF001
        for hook in held.values()
    )
    owners = (getattr(hook, "__self__", None) for hook in hooks)
    return [*{id(owner): owner for owner in owners if isinstance(owner, Boundaries)}.values()]


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.dtype in FLOATS else tensor

    return tree_map_only(torch.Tensor, cast, tree)


def _check_patterns(model: nn.Module, options: MixedPrecisionOptions) -> None:
    """Raise ``ValueError`` for a pattern that is no layer's: it was meant to be one's."""
    layers = [(name, type(module).__name__) for name, module in model.named_modules()]
    for pattern in options.fp32_layer_patterns or ():
        only = replace(options, fp32_layer_patterns=(pattern,))
        if not any(only.keeps_fp32(name, kind) for name, kind in layers):
            raise ValueError(
                f"fp32_layer_patterns has {pattern!r}, and the model has no layer of such a name "
                "or class"
            )


def _with_tied(model: nn.Module, kept: list[nn.Module]) -> list[nn.Module]:
    """The layers that stay FP32, and those that share a parameter with one, FP32 there, too."""
    inside = {id(part) for module in kept for part in module.modules()}
    own = {id(parameter) for module in kept for parameter in module.parameters()}
    tied = [
        module
        for module in model.modules()
        if id(module) not in inside
        and any(id(parameter) in own for parameter in module.parameters(recurse=False))
    ]
    return [*kept, *tied]


def _outermost(
    module: nn.Module, options: MixedPrecisionOptions, name: str = ""
) -> Iterator[nn.Module]:
    """The layers that stay FP32, without those inside of another such."""
    if options.keeps_fp32(name, type(module).__name__):
        yield module
        return
    for part, child in module.named_children():
        yield from _outermost(child, options, f"{name}.{part}" if name else part)
