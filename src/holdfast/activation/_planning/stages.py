"""The stages of a model, and the forward that stands in for theirs while they are observed or
planned. Knows modules; not what is decided for them."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from holdfast.activation._layers.candidates import named, part_of, repeated
from holdfast.activation._layers.checkpointed import refuse_taken
from holdfast.activation._layers.layer_forward import Arguments, Forward, install, remove
from holdfast.activation._regions.inputs import leaves

Call = Callable[[str, Any, Forward, Arguments], Any]


def stages_of(model: Any, patterns: Sequence[str] | None) -> dict[str, Any]:
    """The modules that are planned, by name in the order of the model: those that ``patterns``
    name, or the repeated layers. ``ValueError`` if there are none, or one is taken already."""
    whole = part_of(model)
    if patterns is None:
        parts = repeated(whole, "stages=[...]")
    elif not isinstance(patterns, list | tuple) or not all(
        isinstance(each, str) for each in patterns
    ):
        raise ValueError(f"stages must be a list of names or patterns, not {patterns!r:.200}")
    elif not patterns:
        raise ValueError("stages is empty: leave it out to plan the repeated layers")
    else:
        parts = named(whole, patterns, "stages")
    refuse_taken(model)
    _refuse_compiled(model, [part.name for part in parts])
    return {part.name: model.get_submodule(part.name) for part in parts}


def _refuse_compiled(model: Any, stages: Sequence[str]) -> None:
    """``ValueError`` if stages are code that ``torch.compile`` made, or inside it: what stands in
    for them would be traced, and what they save is not what was measured."""
    for name, module in model.named_modules():
        wraps = type(module).__name__ == "OptimizedModule"
        if not wraps and getattr(module, "_compiled_call_impl", None) is None:
            continue
        for stage in stages:
            if stage == name or stage.startswith(name and f"{name}."):
                raise ValueError(
                    f"stage {stage!r} is compiled: plan the model before torch.compile, and "
                    "compile it with the plan applied"
                )


class Stand:
    """Stands in for the stages: every call in training goes through ``call``."""

    def __init__(self, call: Call) -> None:
        self._through = call

    def _call(self, name: str, module: Any, forward: Forward, call: Arguments) -> Any:
        return self._through(name, module, forward, call)

    def _recomputes(self, name: str) -> bool:
        del name
        return False


@contextlib.contextmanager
def standing_in(stages: Mapping[str, Any], call: Call) -> Iterator[None]:
    """Every stage's forward goes through ``call(name, module, forward, (args, kwargs))``."""
    stand: Any = Stand(call)
    try:
        for name, module in stages.items():
            install(module, name, stand)
        yield
    finally:
        for module in stages.values():
            remove(module, stand)


def parameters_of(module: Any) -> int:
    """How many numbers a module learns, whether they are sharded or not."""
    return sum(each.numel() for each in module.parameters())


def weights_of(module: Any) -> tuple[str, ...]:
    """What kinds of numbers a module's parameters are and where they lie, each once."""
    found = {(str(each.dtype), each.device.type) for each in module.parameters()}
    return tuple(sorted(f"{dtype.removeprefix('torch.')} on {device}" for dtype, device in found))


def tensors_of(tree: Any) -> list[Any]:
    return [each for each in leaves(tree) if isinstance(each, torch.Tensor)]


def roots_of(output: Any, given: Arguments) -> list[Any]:
    """The nodes of a call's own outputs, each once."""
    passed = {id(each) for each in tensors_of(given)}
    found = {
        each.grad_fn: None
        for each in tensors_of(output)
        if each.grad_fn is not None and id(each) not in passed
    }
    return list(found)


def keeping(name: str, module: Any, forward: Forward, call: Arguments) -> Any:
    """The stage as it is."""
    del name, module
    args, kwargs = call
    return forward(*args, **kwargs)
