"""An optimizer's state as a tree whose parameters are called by their names, and such trees read.

Knows torch's optimizers and the protocol of those that override it; changes nothing.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.optim import Optimizer

from holdfast.errors import CheckpointError, LoadError, SaveError
from holdfast.format import ValuePath

STATE: Final = "state"
GROUPS: Final = "param_groups"
OTHER: Final = "other"
PARAMS: Final = "params"
PARAM_NAMES: Final = "param_names"

_METHODS: Final = ("state_dict", "load_state_dict")
_HOOKS: Final = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A group of parameters: their names, and everything else of the group."""

    names: tuple[str, ...]
    hyper: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerTree:
    """The state of an optimizer by names. ``other`` is state under keys that are no parameters;
    ``rest`` is what else an own ``state_dict`` returned, all of it if it is not made as torch's.
    """

    state: Mapping[str, Mapping[Any, Any]] = field(default_factory=dict)
    groups: tuple[Group, ...] | None = None
    other: Mapping[Any, Any] = field(default_factory=dict)
    rest: Mapping[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, object]:
        """As dicts and lists; ``None`` groups are left out and have no state."""
        if self.groups is None:
            return dict(self.rest)
        tree: dict[str, object] = {
            STATE: {name: dict(held) for name, held in self.state.items()},
            GROUPS: [{PARAMS: list(group.names), **group.hyper} for group in self.groups],
        }
        if self.other:
            tree[OTHER] = dict(self.other)
        return {**tree, **self.rest}

    def group_of(self) -> dict[str, int]:
        """Which group has each parameter."""
        groups = enumerate(self.groups or ())
        return {name: index for index, group in groups for name in group.names}


def is_plain(optimizer: Optimizer) -> bool:
    """Whether the state is all in ``state`` and ``param_groups``, and loading it just sets them."""
    kind = type(optimizer)
    overridden = any(
        getattr(kind, method) is not getattr(Optimizer, method) or method in vars(optimizer)
        for method in _METHODS
    )
    return not overridden and not any(getattr(optimizer, hooks, None) for hooks in _HOOKS)


def group_names(
    optimizer: Optimizer, names: Mapping[int, str], failed: type[CheckpointError]
) -> list[list[str]]:
    """The names of the parameters of every group; ``failed`` is raised if two have the same."""
    found: list[list[str]] = []
    seen: set[str] = set()
    for index, group in enumerate(optimizer.param_groups):
        own = group.get(PARAM_NAMES) or ()
        found.append([])
        for position, parameter in enumerate(group[PARAMS]):
            name = names.get(id(parameter))
            if name is None:
                name = own[position] if position < len(own) else f"group{index}.{position}"
            if name in seen:
                raise failed(
                    f"two parameters of the optimizer are called {name!r}; give the optimizer "
                    "parameters of one module only, or by names of their own (named_parameters)"
                )
            seen.add(name)
            found[-1].append(name)
    return found


def read_optimizer(
    optimizer: Optimizer, names: Mapping[int, str], *, failed: type[CheckpointError] = SaveError
) -> OptimizerTree:
    """The state of an optimizer; its tensors are the live ones. Calls an overridden ``state_dict``
    and hooks."""
    called = group_names(optimizer, names, failed)
    if not is_plain(optimizer):
        return _of_protocol(optimizer.state_dict(), called, failed)
    by_id = {
        id(parameter): name
        for group, of_group in zip(optimizer.param_groups, called, strict=True)
        for parameter, name in zip(group[PARAMS], of_group, strict=True)
    }
    state: dict[str, Mapping[Any, Any]] = {name: {} for name in by_id.values()}
    other: dict[Any, Any] = {}
    for key, held in optimizer.state.items():
        if not isinstance(key, torch.Tensor):
            other[key] = held
        elif id(key) in by_id:
            state[by_id[id(key)]] = held
        elif held:
            raise failed(
                f"the optimizer has state for a tensor of shape {tuple(key.shape)} that is in none "
                "of its param_groups; remove it from optimizer.state"
            )
    return OptimizerTree(
        state={name: held for name, held in state.items() if held},
        groups=_groups(optimizer.param_groups, called),
        other=other,
    )


def ids_of(optimizer: Optimizer, called: list[list[str]]) -> dict[str, Any]:
    """What an own ``state_dict`` calls the parameters, by our names for them."""
    packed = optimizer.state_dict()[GROUPS]
    return {
        name: number
        for group, of_group in zip(packed, _fitting(packed, called), strict=True)
        for number, name in zip(group[PARAMS], of_group, strict=True)
    }


def parse_tree(stored: object) -> OptimizerTree:
    """A tree as ``OptimizerTree.plain`` makes it; ``LoadError`` if it is none."""
    if not isinstance(stored, Mapping):
        raise _malformed(f"it is a {type(stored).__name__}")
    if not _is_torchs(stored):
        return OptimizerTree(rest=dict(stored))
    groups = []
    for group in stored[GROUPS]:
        called = group[PARAMS]
        if not isinstance(called, list) or not all(isinstance(name, str) for name in called):
            raise _malformed("the parameters of a group are no names")
        hyper = {key: value for key, value in group.items() if key != PARAMS}
        groups.append(Group(names=tuple(called), hyper=hyper))
    every = [name for group in groups for name in group.names]
    if len(set(every)) < len(every):
        raise _malformed("a parameter is in two groups")
    for name, held in stored[STATE].items():
        if not isinstance(held, Mapping):
            raise _malformed(f"the state of {name} is a {type(held).__name__}")
    other = stored.get(OTHER, {})
    if not isinstance(other, Mapping):
        raise _malformed(f"what it has beside parameters is a {type(other).__name__}")
    return OptimizerTree(
        state=dict(stored[STATE]),
        groups=tuple(groups),
        other=dict(other),
        rest={key: v for key, v in stored.items() if key not in {STATE, GROUPS, OTHER}},
    )


def members(value: object) -> Iterator[tuple[Any, Any]]:
    """What is in a container of a tree, with the step to it."""
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple | deque):
        yield from enumerate(value)


def leaves(value: object, path: ValuePath = ()) -> Iterator[tuple[ValuePath, Any]]:
    """Everything in a tree that is no container, with the way to it."""
    if isinstance(value, Mapping | list | tuple | deque):
        for step, item in members(value):
            yield from leaves(item, (*path, step))
    else:
        yield path, value


def at(value: object, path: ValuePath) -> Any:
    """What stands at a place of a tree; ``None`` if nothing does."""
    for step in path:
        value = dict(members(value)).get(step)
    return value


def _of_protocol(
    packed: Mapping[str, Any], called: list[list[str]], failed: type[CheckpointError]
) -> OptimizerTree:
    if not _is_torchs(packed):
        return OptimizerTree(rest=dict(packed))
    if OTHER in packed:
        raise failed(
            f"the state_dict of the optimizer has a key {OTHER!r}, which the checkpoint uses for "
            "state that belongs to no parameter; rename it"
        )
    called = _fitting(packed[GROUPS], called)
    by_number = {
        number: name
        for group, of_group in zip(packed[GROUPS], called, strict=True)
        for number, name in zip(group[PARAMS], of_group, strict=True)
    }
    held = packed[STATE]
    return OptimizerTree(
        state={name: held[number] for number, name in by_number.items() if held.get(number)},
        groups=_groups(packed[GROUPS], called),
        other={key: value for key, value in held.items() if key not in by_number},
        rest={key: value for key, value in packed.items() if key not in {STATE, GROUPS}},
    )


def _groups(groups: list[Any], called: list[list[str]]) -> tuple[Group, ...]:
    return tuple(
        Group(
            names=tuple(of_group),
            # param_names would say the same again, in the order of the saving optimizer.
            hyper={key: v for key, v in group.items() if key not in {PARAMS, PARAM_NAMES}},
        )
        for group, of_group in zip(groups, called, strict=True)
    )


def _fitting(packed: list[Any], called: list[list[str]]) -> list[list[str]]:
    """The names, if the groups of a state dict are those of the optimizer; else their positions."""
    if [len(group[PARAMS]) for group in packed] == [len(of_group) for of_group in called]:
        return called
    return [
        [f"group{index}.{position}" for position in range(len(group[PARAMS]))]
        for index, group in enumerate(packed)
    ]


def _is_torchs(tree: Mapping[Any, Any]) -> bool:
    """Whether a state dict is made as torch's own."""
    groups = tree.get(GROUPS)
    return (
        isinstance(tree.get(STATE), Mapping)
        and isinstance(groups, list)
        and all(isinstance(group, Mapping) and PARAMS in group for group in groups)
    )


def _malformed(why: str) -> LoadError:
    return LoadError(f"the saved state of the optimizer cannot be read: {why}; nothing was changed")
