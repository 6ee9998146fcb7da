"""The hyper-parameters of an optimizer's groups: whether saved ones can be those of an optimizer,
and how it gets them. Knows kinds of values, and no optimizer's meaning of them.

What schedulers add to groups is taken as it is. What a saved group lacks, as one of an older torch
may, stays what the optimizer has.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

Groups = Sequence[Mapping[str, Any]]


def hyper_problems(saved: Groups, live: Groups) -> Iterator[str]:
    """Values of another kind than those that the optimizer has in their place."""
    for number, (group, own) in enumerate(zip(saved, live, strict=True)):
        for key, value in group.items():
            if key != "params" and key in own and not _is_like(value, own[key]):
                yield f"{key} of group {number} is {value!r:.60}, where {own[key]!r:.60} is"


def new_values(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of a saved group's values, to be given to ``set_values``."""
    return {
        key: copy.deepcopy(value)
        for key, value in saved.items()
        if key not in {"params", "param_names"}
    }


def set_values(live: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Give a group its values, as they were saved. A tensor stays the one that it is if it can hold
    them, as somebody may have it; else a number that is rounded would be another."""
    for key, value in new.items():
        own: Any = live.get(key)
        if _is_tensor_like(value, own):
            own.copy_(value)
        else:
            live[key] = value


def _is_like(value: object, own: object) -> bool:
    if _is_number(own):
        return _is_number(value)
    if own is None:
        return not isinstance(value, torch.Tensor) or _is_number(value)
    if isinstance(own, bool):
        return value is None or isinstance(value, bool)
    if isinstance(own, list | tuple):
        return (
            isinstance(value, list | tuple)
            and len(value) == len(own)
            and all(map(_is_like, value, own))
        )
    if isinstance(own, torch.Tensor):
        return _is_tensor_like(value, own)
    return isinstance(value, type(own))


def _is_number(value: object) -> bool:
    """Whether it is one, on whatever device: not what no arithmetic can be done with."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and value.layout is torch.strided and not value.is_complex()
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _is_tensor_like(value: Any, own: Any) -> bool:
    if not isinstance(value, torch.Tensor) or not isinstance(own, torch.Tensor):
        return False
    return bool((value.shape, value.dtype) == (own.shape, own.dtype))
