"""What ``torch.save`` can hold so that ``torch.load(weights_only=True)`` reads it back. Knows no
file."""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any, Final

import torch

from holdfast.cli._converting.contents import Tensor, is_container, members, rebuilt
from holdfast.distributed._tensors import torch_dtype
from holdfast.format import PerRank, ValuePath

_VALUES: Final = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
)
_CONTAINERS: Final = frozenset({dict, OrderedDict, Counter, list, tuple})


def as_torchs(value: Any) -> Any:
    """What stands for the same in a state dict of torch's: a list for values of each rank, and
    numbers for the parameters of an optimizer, where a checkpoint has names."""
    if type(value) is PerRank:
        return [as_torchs(each) for each in value.values]
    if not is_container(value):
        return value
    made = rebuilt(value, as_torchs)
    return _numbered(made) if isinstance(made, dict) else made


def without_ranks(value: Any) -> Any:
    """As ``as_torchs``, but parameters keep their names, as DCP has them."""
    if type(value) is PerRank:
        return [without_ranks(each) for each in value.values]
    return rebuilt(value, without_ranks) if is_container(value) else value


def problem_of(_: ValuePath, value: Any) -> str | None:
    """Why torch cannot hold a value or a tensor, or ``None``."""
    if isinstance(value, Tensor):
        return None if torch_dtype(value.dtype) else f"a tensor of {value.dtype}"
    if type(value) is set:
        return next((p for each in value if (p := problem_of((), each))), None)
    return None if type(value) in _VALUES else type(value).__name__


def container_problem(value: Any) -> str | None:
    """Why torch cannot hold a container that is in a value, or ``None``."""
    if not is_container(value):
        return None
    if type(value) not in _CONTAINERS:
        return type(value).__name__
    return next((p for _, each in members(value) if (p := container_problem(each))), None)


def _numbered(tree: dict[Any, Any]) -> dict[Any, Any]:
    """The state of an optimizer with its parameters counted, if it is one with names."""
    state, groups = tree.get("state"), tree.get("param_groups")
    if not isinstance(state, Mapping) or not isinstance(groups, list):
        return tree
    if not all(isinstance(group, dict) and _are_names(group.get("params")) for group in groups):
        return tree
    names = [name for group in groups for name in group["params"]]
    number = {name: nth for nth, name in enumerate(names)}
    if len(number) < len(names) or not state.keys() <= number.keys():
        return tree
    counted = [
        # torch's own order: what a group has, and its parameters last.
        {
            **{key: value for key, value in group.items() if key != "params"},
            "params": [number[name] for name in group["params"]],
        }
        for group in groups
    ]
    by_number = {number[name]: held for name, held in state.items()}
    return {**tree, "state": dict(sorted(by_number.items())), "param_groups": counted}


def _are_names(params: Any) -> bool:
    return isinstance(params, list) and all(type(name) is str for name in params)
