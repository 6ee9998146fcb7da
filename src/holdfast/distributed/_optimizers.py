"""Optimizers as plain trees and back: state by parameter names, set in its own dtype.

Knows torch's optimizers; knows no checkpoint and no other rank.
"""

import copy
from collections.abc import Collection, Mapping
from typing import Any, final

import torch
from torch.optim import Optimizer

from holdfast.distributed._optimizer_target import OptimizerTarget
from holdfast.distributed._optimizer_tree import (
    GROUPS,
    PARAMS,
    STATE,
    ids_of,
    is_plain,
    leaves,
    parse_tree,
    read_optimizer,
)
from holdfast.distributed._swapping import Action, Fill, strided_as, undo_all
from holdfast.distributed._tensors import Like, local_of, wrap
from holdfast.errors import LoadError

__all__ = ["OptimizerFill", "OptimizerTarget", "optimizer_state", "without_state"]


def optimizer_state(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, object]:
    """The state of ``optimizer`` as ``{"state": {name: {...}}, "param_groups": [{"params": [names],
    ...}]}`` and, if there is state under keys that are no parameters, ``"other"``.

    ``names`` has the names of parameters by their ``id``; one that is not there is called as
    the optimizer calls it, or ``group<i>.<j>``. Tensors are the live ones. An optimizer that
    overrides ``state_dict`` or ``load_state_dict``, or has hooks for them, is asked by these, and
    what it adds is kept. Raises ``SaveError`` for two parameters with one name.
    """
    return read_optimizer(optimizer, names).plain()


def without_state(stored: Mapping[str, Any], names: Collection[str]) -> Mapping[str, Any]:
    """A saved state without that of some parameters."""
    if not names:
        return stored
    held = {name: value for name, value in stored[STATE].items() if name not in names}
    return {**stored, STATE: held}


@final
class OptimizerFill:
    """An ``Action`` that gives an optimizer a saved state.

    ``stored`` has tensors that lie as ``OptimizerTarget.likes`` says; they become the optimizer's.
    Afterwards each parameter has the state it was saved with, in that dtype, or none; one that is
    in no saved group keeps its own. Groups get what was saved and keep what was not; a tensor
    among the hyper-parameters is filled in place. ``undo`` puts the very same dicts back.

    An optimizer with a loading of its own gets the state by ``load_state_dict``. Its former state
    is copied first.
    """

    def __init__(self, target: OptimizerTarget, stored: object) -> None:
        self._optimizer = target.optimizer
        self._target = target
        self._tree = parse_tree(stored)
        if (self._tree.groups is None) != (target.current.groups is None):
            raise LoadError(
                "the saved optimizer's state is made in another way than "
                f"{type(target.optimizer).__name__}'s; nothing was changed"
            )
        saved = self._tree.group_of()
        self._state = {
            name: _laid_out(self._tree.state.get(name, {}), target.parameters.get(name))
            if name in saved
            else target.current.state.get(name, {})
            for group in target.groups
            for name in group.names
        }
        self._fills: list[Action] = []
        self._groups = self._new_groups()
        self._before: _Before | None = None

    def apply(self) -> None:
        own_loading = not is_plain(self._optimizer)
        self._before = _Before(self._optimizer, with_copy=own_loading)
        for fill in self._fills:
            fill.apply()
        if own_loading:
            self._load()
            return
        optimizer = self._optimizer
        optimizer.state.clear()
        for name, held in self._state.items():
            if held:
                optimizer.state[self._target.parameters[name]] = held
        optimizer.state.update(self._tree.other)
        for group, hyper in zip(optimizer.param_groups, self._groups, strict=True):
            group.update(hyper)
        # As torch's load_state_dict ends; optimizers complete there what older versions lacked.
        optimizer.__setstate__({STATE: optimizer.state, GROUPS: optimizer.param_groups})

    def undo(self) -> None:
        before, self._before = self._before, None
        if before is None:
            return
        try:
            before.put_back()
        finally:
            undo_all(self._fills)

    def _new_groups(self) -> list[dict[str, Any]]:
        """What each group is updated with. Tensors that are filled in place are not among it."""
        groups: list[dict[str, Any]] = []
        filled: dict[int, torch.Tensor] = {}
        matched = self._target.matches(self._tree)
        for index, (group, source) in enumerate(zip(self._target.groups, matched, strict=True)):
            saved = {} if source is None else (self._tree.groups or ())[source].hyper
            groups.append({})
            for key, value in saved.items():
                live = group.hyper.get(key)
                new = _filling(live, value)
                if not isinstance(live, torch.Tensor) or new is None:
                    is_taken = source in matched[:index]
                    groups[-1][key] = copy.deepcopy(value) if is_taken else value
                elif id(live) not in filled:
                    filled[id(live)] = new
                    self._fills.append(Fill(local_of(live), local_of(new)))
                elif not torch.equal(local_of(filled[id(live)]), local_of(new)):
                    # Groups that shared one tensor, a default, were saved with different values.
                    groups[-1][key] = copy.deepcopy(new)
        return groups

    def _load(self) -> None:
        """By the optimizer's own ``load_state_dict``."""
        tree, target = self._tree, self._target
        if tree.groups is None:
            self._optimizer.load_state_dict(dict(tree.rest))
            return
        ids = ids_of(self._optimizer, target.called)
        now = self._optimizer.state_dict()[GROUPS]
        self._optimizer.load_state_dict(
            {
                STATE: {ids[name]: dict(held) for name, held in self._state.items() if held}
                | dict(tree.other),
                GROUPS: [
                    {**group, **new, PARAMS: group[PARAMS]}
                    for group, new in zip(now, self._groups, strict=True)
                ],
                **tree.rest,
            }
        )
        for name, held in self._state.items():
            if name in target.parameters:
                _uncast(self._optimizer, target.parameters[name], held)


@final
class _Before:
    """The state an optimizer had: its own dicts and what was in them, and with ``with_copy`` also
    a copy of every value, for loading that may write into them."""

    def __init__(self, optimizer: Optimizer, *, with_copy: bool) -> None:
        self._optimizer = optimizer
        self._state = optimizer.state
        self._groups = optimizer.param_groups
        self._held = dict(optimizer.state)
        self._inner = [(held, dict(held)) for held in self._held.values() if isinstance(held, dict)]
        self._hypers = [(group, dict(group)) for group in optimizer.param_groups]
        self._packed: dict[str, Any] | None = None
        self._copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        if with_copy:
            # Of one whose state follows the model's weights, as it was: these are loaded already.
            packed = getattr(optimizer, "live_state_dict", optimizer.state_dict)()
            memo: dict[int, Any] = {}
            self._packed = copy.deepcopy(packed, memo)
            self._copied = [
                (value, memo[id(value)])
                for _, value in leaves(packed)
                if isinstance(value, torch.Tensor) and id(value) in memo
            ]

    def put_back(self) -> None:
        try:
            if self._packed is not None:
                self._optimizer.load_state_dict(copy.deepcopy(self._packed))
        finally:
            if self._optimizer.state is not self._state:
                self._optimizer.state = self._state
            if self._optimizer.param_groups is not self._groups:
                self._optimizer.param_groups = self._groups
            _refill(self._state, self._held)
            for inner, before in self._inner:
                _refill(inner, before)
            for group, before in self._hypers:
                _refill(group, before)
            self._groups[:] = [group for group, _ in self._hypers]
            with torch.no_grad():
                for live, old in self._copied:
                    local_of(live).copy_(local_of(old))


def _filling(live: object, value: object) -> torch.Tensor | None:
    """What to fill a tensor of a group with; ``None`` if it is to be replaced."""
    if not isinstance(live, torch.Tensor):
        return None
    if isinstance(value, torch.Tensor):
        return value if value.shape == live.shape else None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return torch.full_like(live, value)
    return None


def _laid_out(held: Mapping[Any, Any], parameter: torch.Tensor | None) -> dict[Any, Any]:
    """The state of a parameter, whose tensors of its shape lie in memory as it does."""
    return {
        key: _strided(value, parameter)
        if parameter is not None and isinstance(value, torch.Tensor)
        else value
        for key, value in held.items()
    }


def _strided(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    local, pattern = local_of(value), local_of(parameter)
    if local.shape != pattern.shape:
        return value
    laid = strided_as(local, pattern)
    return value if laid is local else wrap(laid, Like.of(value), tuple(value.shape))


def _uncast(optimizer: Optimizer, parameter: torch.Tensor, held: Mapping[Any, Any]) -> None:
    """Give a parameter the state it was saved with where torch's ``load_state_dict`` cast it to
    the parameter's dtype, as FP32 moments of a BF16 parameter."""
    loaded = optimizer.state.get(parameter, {})
    for key, value in held.items():
        found = loaded.get(key)
        if (
            isinstance(value, torch.Tensor)
            and isinstance(found, torch.Tensor)
            and found.shape == value.shape
            and found.dtype == parameter.dtype != value.dtype
        ):
            loaded[key] = value


def _refill(held: Any, before: Mapping[Any, Any]) -> None:
    held.clear()
    held.update(before)
