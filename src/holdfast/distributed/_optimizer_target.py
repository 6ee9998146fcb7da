"""How a saved state fits an optimizer: which groups belong together, and how tensors must lie.

Knows torch's optimizers; changes nothing, and knows no checkpoint and no other rank.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, final

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from holdfast.distributed._optimizer_tree import (
    GROUPS,
    OTHER,
    PARAMS,
    STATE,
    Group,
    OptimizerTree,
    at,
    group_names,
    leaves,
    parse_tree,
    read_optimizer,
)
from holdfast.distributed._tensors import Like, local_of
from holdfast.errors import LoadError
from holdfast.format import LeafRef, ValuePath, encode_value

_CPU: Final = torch.device("cpu")


@final
class OptimizerTarget:
    """An optimizer that a saved state is to be loaded into. Nothing is changed by looking.

    ``stored`` is what ``optimizer_state`` returned, with a ``LeafRef`` for each tensor. Parameters
    are matched by name, groups by the parameters in them, groups without any by position.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self.optimizer = optimizer
        self.called = group_names(optimizer, names, LoadError)
        self.current = read_optimizer(optimizer, names, failed=LoadError)
        self.parameters: dict[str, torch.Tensor] = {
            name: parameter
            for group, of_group in zip(optimizer.param_groups, self.called, strict=True)
            for parameter, name in zip(group[PARAMS], of_group, strict=True)
        }

    @property
    def groups(self) -> Sequence[Group]:
        return self.current.groups or ()

    def matches(self, tree: OptimizerTree) -> list[int | None]:
        """For each group of the optimizer the saved one that its parameters are in."""
        found: list[int | None] = []
        saved = tree.groups or ()
        group_of = tree.group_of()
        for index, group in enumerate(self.groups):
            if group.names:
                found.append(next(iter(_sources(group_of, group)), None))
            else:
                same = index < len(saved) and not saved[index].names
                found.append(index if same else None)
        return found

    def likes(
        self, stored: object, shape_of: Callable[[str], tuple[int, ...]]
    ) -> Iterator[tuple[ValuePath, LeafRef, Like]]:
        """Every leaf that is wanted, its place in ``stored``, and how it must lie on this rank: an
        array on the CPU.

        ``shape_of`` gives the whole shape of a leaf. What the optimizer has no parameter or group
        for is left out.
        """
        for path, ref, like in self._likes(stored, shape_of):
            yield path, ref, like if ref.kind == "tensor" else Like(device=_CPU)

    def shape_like(self, path: ValuePath) -> tuple[int, ...] | None:
        """The shape of the parameter whose state a place is in; ``None`` if it is in none."""
        parameter = self.parameters.get(str(path[1])) if path[0] == STATE else None
        return None if parameter is None else tuple(parameter.shape)

    def problems(self, stored: object) -> tuple[list[str], list[str], list[str]]:
        """What keeps the saved state from being loaded as it is: places that are missing in it,
        places that the optimizer does not expect, and further reasons in words."""
        tree = parse_tree(stored)
        if (tree.groups is None) != (self.current.groups is None):
            kind = type(self.optimizer).__name__
            return [], [], [f"the saved optimizer's state is made in another way than {kind}'s"]
        saved = tree.group_of()
        here = [name for group in self.groups for name in group.names]
        missing = [f"{STATE}.{name}" for name in here if name not in saved]
        unexpected = [f"{STATE}.{name}" for name in sorted(saved.keys() - set(here))]
        reasons = [
            f"group {index} of the optimizer has parameters of saved groups {first} "
            f"({_member(saved, first, group)}) and {other} ({_member(saved, other, group)}), "
            f"which differ in {', '.join(differing)}"
            for index, group in enumerate(self.groups)
            for first, *others in [_sources(saved, group) or [0]]
            for other in others
            if (differing := _differing(tree, first, other))
        ]
        return missing, unexpected, reasons

    def _likes(
        self, stored: object, shape_of: Callable[[str], tuple[int, ...]]
    ) -> Iterator[tuple[ValuePath, LeafRef, Like]]:
        tree = parse_tree(stored)
        current = self.current.plain()
        group_of, here = tree.group_of(), self.current.group_of()
        for name, held in tree.state.items():
            if name not in group_of or name not in here:
                continue
            hyper = (tree.groups or ())[group_of[name]].hyper
            for path, ref in _refs(held):
                there = at(self.current.state.get(name), path)
                shape = shape_of(ref.name)
                yield (STATE, name, *path), ref, self._like(name, path, shape, there, hyper)
        matched = self.matches(tree)
        for index, source in enumerate(matched):
            # Several groups may take theirs from one saved group, which is loaded once.
            if source is None or source in matched[:index]:
                continue
            hyper = (tree.groups or ())[source].hyper
            for path, ref in _refs(hyper):
                there = at(self.groups[index].hyper, path)
                device = self._device_of(self.groups[index]) if hyper.get("capturable") else _CPU
                yield (GROUPS, source, *path), ref, _as_there(there, shape_of(ref.name), device)
        rest: dict[str, object] = {**tree.rest, **({OTHER: tree.other} if tree.other else {})}
        for path, ref in _refs(rest):
            there, shape = at(current, path), shape_of(ref.name)
            # An own state_dict may keep the state of parameters by their names, too: what a fresh
            # optimizer has not made yet must lie as its parameter does, not whole on every rank.
            called = next((str(step) for step in path if step in self.parameters), None)
            if called is None:
                yield path, ref, _as_there(there, shape, _CPU)
            else:
                yield path, ref, self._like(called, path, shape, there, {})

    def _like(
        self,
        name: str,
        path: ValuePath,
        shape: tuple[int, ...],
        there: object,
        hyper: Mapping[str, Any],
    ) -> Like:
        """How a tensor of a parameter's state lies: as the one it replaces, or as the optimizer
        would have made it."""
        parameter = self.parameters.get(name)
        if parameter is None or (isinstance(there, torch.Tensor) and tuple(there.shape) == shape):
            return _as_there(there, shape, _CPU)
        is_step = path[-1] == "step"
        if tuple(parameter.shape) == shape and not is_step:
            return Like.of(parameter)
        if isinstance(parameter, DTensor) and shape:
            mesh = parameter.device_mesh
            return Like(
                device=local_of(parameter).device,
                mesh=mesh,
                placements=(Replicate(),) * mesh.ndim,
            )
        if is_step and not hyper.get("capturable") and not hyper.get("fused"):
            return Like(device=_CPU)
        return Like(device=local_of(parameter).device)

    def _device_of(self, group: Group) -> torch.device:
        parameters = (self.parameters[name] for name in group.names if name in self.parameters)
        first = next(parameters, None)
        return _CPU if first is None else local_of(first).device


def _refs(value: object) -> Iterator[tuple[ValuePath, LeafRef]]:
    for path, leaf in leaves(value):
        if isinstance(leaf, LeafRef):
            yield path, leaf


def _as_there(there: object, shape: tuple[int, ...], device: torch.device) -> Like:
    """As the tensor that is there, if it has that shape; else whole, on ``device``."""
    if isinstance(there, torch.Tensor) and tuple(there.shape) == shape:
        return Like.of(there)
    return Like(device=device)


def _sources(group_of: Mapping[str, int], group: Group) -> list[int]:
    """The saved groups that have parameters of this one."""
    return list(dict.fromkeys(group_of[name] for name in group.names if name in group_of))


def _member(group_of: Mapping[str, int], index: int, group: Group) -> str:
    return next(name for name in group.names if group_of.get(name) == index)


def _differing(tree: OptimizerTree, one: int, other: int) -> list[str]:
    """The hyper-parameters in which two saved groups differ."""
    first, second = (_encoded((tree.groups or ())[index].hyper) for index in (one, other))
    return sorted(key for key in first.keys() | second.keys() if first.get(key) != second.get(key))


def _encoded(hyper: Mapping[str, Any]) -> dict[str, object]:
    """Values that can be compared: NumPy's, for one, cannot as they are."""
    return {
        key: encode_value(value, leaf=lambda _, leaf: leaf if isinstance(leaf, LeafRef) else None)
        for key, value in hyper.items()
    }
