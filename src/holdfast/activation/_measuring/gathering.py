"""The storages behind what a call is given, and behind all that Python can see. Knows where to
look, not what keeps them alive."""

import gc
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from holdfast.activation._storages import storages

_MEMORY = (torch.Tensor, torch.UntypedStorage)
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_NOTHING = frozenset({int, float, bool, str, type(None)})
_has_storage = torch._C._has_storage  # noqa: SLF001 -- the only question that does not raise


def gather(value: Any, found: list[Any]) -> None:
    """Add the storages of all tensors in what a call is given or returns."""
    if value.__class__ in _PLAIN and _has_storage(value) and not value.is_meta:
        found.append(value.untyped_storage())
    elif isinstance(value, torch.Tensor):
        found += storages(value)
    elif isinstance(value, list | tuple):
        gather_each(value, found)
    elif isinstance(value, dict):
        gather_each(value.values(), found)
    elif isinstance(value, torch.UntypedStorage):
        found.append(value)


def gather_each(values: Iterable[Any], found: list[Any]) -> None:
    """The same of several. This is done for every call: what is met most often is asked first."""
    for each in values:
        kind = each.__class__
        if kind in _PLAIN and _has_storage(each) and not each.is_meta:
            found.append(each.untyped_storage())
        elif kind not in _NOTHING:
            gather(each, found)


def visible() -> Iterator[Any]:
    """Every tensor that Python can see, its gradient, and every storage."""
    objects = gc.get_objects()
    # By class: isinstance would ask strange objects, some of which warn or load modules.
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, _MEMORY)}
    found = [each for each in objects if type(each) in kinds]
    del objects
    while found:
        each = found.pop()
        yield each
        if isinstance(each, torch.Tensor) and each.is_leaf and each.grad is not None:
            yield each.grad
