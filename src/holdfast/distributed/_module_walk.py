"""A walk through a module: names without the traces of wrappers, which memory is whose, and whether
loading is its own.

Knows torch's wrappers; changes nothing.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from holdfast.distributed._tensors import local_of

Position = tuple[object, ...]
"""Which elements of which memory a tensor is."""

_WRAPPERS: Final[Mapping[tuple[str, str], str]] = {
    ("torch._dynamo.eval_frame", "OptimizedModule"): "_orig_mod",
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
    ): "_checkpoint_wrapped_module",
    ("torch.nn.parallel.data_parallel", "DataParallel"): "module",
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): "module",
}
"""Classes that only wrap a module, by name so that none has to be imported, and where it is."""

_FSDP1: Final = (
    "torch.distributed.fsdp.fully_sharded_data_parallel",
    "FullyShardedDataParallel",
)


def is_fsdp1(module: nn.Module) -> bool:
    """Whether parameters are in flat pieces that only FSDP1 can put together."""
    return any(
        (kind.__module__, kind.__name__) == _FSDP1
        for inner in module.modules()
        for kind in type(inner).__mro__
    )


def _wrapped(module: nn.Module) -> str | None:
    """Where a wrapper keeps its module; ``None`` if this is no wrapper."""
    for kind in type(module).__mro__:
        if (kind.__module__, kind.__name__) in _WRAPPERS:
            return _WRAPPERS[kind.__module__, kind.__name__]
    return None


def clean_name(module: nn.Module, key: str) -> str:
    """A key of the module's state without the steps into wrapped modules. Some wrappers leave
    those out of their keys themselves."""
    rest = key
    clean = ""
    while True:
        step = _wrapped(module)
        first, dot, after = rest.partition(".")
        if step is not None and step in module._modules:  # noqa: SLF001
            if dot and first == step:
                rest = after
        elif dot and first in module._modules:  # noqa: SLF001
            step, rest = first, after
            clean += f"{first}."
        else:
            return clean + rest
        child = module._modules[step]  # noqa: SLF001
        if child is None:
            return clean + rest
        module = child


def walk(module: nn.Module, place: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module, in the order of ``state_dict``, and what its names start with when clean. One
    in two places comes twice."""
    yield place, module
    wrapped = _wrapped(module)
    for name, child in module._modules.items():  # noqa: SLF001
        if child is not None:
            yield from walk(child, place if name == wrapped else f"{place}{name}.")


def persistent_buffers(module: nn.Module) -> Iterator[str]:
    for name, buffer in module._buffers.items():  # noqa: SLF001
        if buffer is not None and name not in module._non_persistent_buffers_set:  # noqa: SLF001
            yield name


def tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    for _, owner in walk(module):
        for held in (owner._parameters, owner._buffers):  # noqa: SLF001
            yield from (tensor for tensor in held.values() if tensor is not None)


def storage_of(tensor: torch.Tensor) -> int | None:
    """What two tensors have in common if they share memory."""
    if not _has_storage(tensor):
        return None
    return int(local_of(tensor).untyped_storage()._cdata)  # noqa: SLF001


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not is_lazy(tensor)


def position_of(tensor: torch.Tensor) -> Position:
    """What two tensors have in common if they are the same elements of the same memory."""
    if not _has_storage(tensor):
        return (None, id(tensor))
    local = local_of(tensor)
    memory = local.untyped_storage()._cdata  # noqa: SLF001
    return (memory, local.storage_offset(), local.shape, local.stride(), local.dtype)


def has_own_loading(module: nn.Module, *, not_torchs: bool = False) -> bool:
    """Whether something else than torch's plain copying happens in ``load_state_dict``;
    ``not_torchs``: something that is not part of torch."""
    return any(
        not (not_torchs and _is_torchs(function))
        for _, owner in walk(module)
        for function in _loading(owner)
    )


def _loading(module: nn.Module) -> Iterator[Callable[..., Any]]:
    for name in ("load_state_dict", "_load_from_state_dict"):
        function = getattr(module, name)
        if getattr(function, "__func__", None) is not getattr(nn.Module, name):
            yield function
    if type(module).set_extra_state is not nn.Module.set_extra_state:
        yield module.set_extra_state
    for hook in module._load_state_dict_pre_hooks.values():  # noqa: SLF001
        yield getattr(hook, "hook", hook)
    yield from module._load_state_dict_post_hooks.values()  # noqa: SLF001


def _is_torchs(function: Callable[..., Any]) -> bool:
    return str(getattr(function, "__module__", "")).partition(".")[0] == "torch"
