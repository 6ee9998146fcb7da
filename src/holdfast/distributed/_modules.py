"""Modules as plain trees and back: clean names, live tensors, and filling them in place.

Knows torch's modules and the wrappers around them; knows no checkpoint and no other rank.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from holdfast.distributed._module_walk import (
    Position,
    clean_name,
    has_own_loading,
    is_fsdp1,
    persistent_buffers,
    position_of,
    storage_of,
    tensors_of,
    walk,
)
from holdfast.distributed._swapping import Action, Keep, replacing, strided_as, undo_all
from holdfast.distributed._tensors import local_of
from holdfast.errors import CheckpointError, LoadError, SaveError

_EXTRA_STATE: Final = "_extra_state"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleState:
    """What a module's ``state_dict()`` holds, under names that no wrapper changes.

    ``values`` are the live tensors, without their history and not copied (a DTensor stays one), and
    what ``get_extra_state()`` gave. ``keys`` has the module's own key of each name. ``parameters``
    and ``buffers`` name those of the values that are such; a parameter with two names has both.
    """

    module: nn.Module
    values: Mapping[str, object]
    keys: Mapping[str, str]
    parameters: frozenset[str]
    buffers: frozenset[str]


def module_state(module: nn.Module, *, loading: bool = False, place: str = "") -> ModuleState:
    """The state of ``module``. Nothing is copied; wrappers such as DistributedDataParallel and
    torch.compile's leave no trace in the names, at any depth.

    Raises ``SaveError`` (``LoadError`` if ``loading``) for parameters that are not initialised yet
    and for two keys with one name; these say that the module is at ``place`` of the state. Tensors
    on the meta device are refused unless ``loading``.
    """
    failed: type[CheckpointError] = LoadError if loading else SaveError
    after = "Nothing was changed" if loading else "Nothing was saved"
    at = f"{place}." if place else ""
    if is_fsdp1(module):
        raise failed(
            f"the module {place} uses FullyShardedDataParallel, whose parameters are pieces that "
            "only it can put together; use FSDP2 instead (torch.distributed.fsdp.fully_shard). "
            f"{after}"
        )
    values: dict[str, object] = {}
    keys: dict[str, str] = {}
    for key, value in module.state_dict().items():
        name = clean_name(module, key)
        if name in keys:
            raise failed(
                f"the module {place} has two values called {name!r} once wrappers' prefixes are "
                f"dropped: {keys[name]!r} and {key!r}; rename one of them. {after}"
            )
        if is_lazy(value):
            raise failed(f"{at}{name} is not initialised yet: run a forward pass first. {after}")
        if not loading and isinstance(value, torch.Tensor) and value.is_meta:
            raise failed(
                f"{at}{name} is on the meta device and has no values to save: load or initialise "
                f"the module first. {after}"
            )
        values[name] = value
        keys[name] = key
    walked = list(walk(module))
    parameters = {f"{place}{name}" for place, owner in walked for name in owner._parameters}  # noqa: SLF001
    buffers = {f"{place}{name}" for place, owner in walked for name in persistent_buffers(owner)}
    return ModuleState(
        module=module,
        values=values,
        keys=keys,
        parameters=frozenset(parameters & values.keys()),
        buffers=frozenset(buffers & values.keys()),
    )


def parameter_names(module: nn.Module) -> dict[int, str]:
    """The clean name of each parameter by its ``id``; the first, of one that has several.

    FSDP2 puts other objects in the place of parameters while they are gathered; it is made to put
    the optimizer's own back.
    """
    names: dict[int, str] = {}
    for _, owner in walk(module):
        if isinstance(owner, FSDPModule):
            owner.reshard()
    for place, owner in walk(module):
        for name, parameter in owner._parameters.items():  # noqa: SLF001
            if parameter is not None:
                names.setdefault(id(parameter), f"{place}{name}")
    return names


@final
class ModuleFill:
    """An ``Action`` that gives a module new values for some or all of its names.

    ``new`` maps clean names to staged tensors, laid out as the live ones or just this rank's part
    of those, and to extra states.
    Values go into the live tensors, cast to their dtype: parameters stay the same objects, tied
    ones tied. What was there moves into the staged tensors, so these must not be used afterwards.
    Parameters and buffers on the meta device become real ones on ``device`` (``None``: where the
    staged tensor is), with the dtype and ``requires_grad`` they had.

    The module's ``load_state_dict`` is called only if something of it may matter: extra states,
    hooks, overridden methods, or values that are no parameter's or buffer's memory. Code that is
    not torch's may change anything, so what is not replaced is then copied first, for ``undo``.

    ``LoadError`` at once, with nothing changed, if ``new`` does not fit the module.
    """

    def __init__(
        self,
        state: ModuleState,
        new: Mapping[str, object],
        *,
        device: torch.device | str | None = None,
    ) -> None:
        self._module = state.module
        self._device = device
        self._live = {position_of(tensor): tensor for tensor in tensors_of(state.module)}
        self._filled: set[Position] = set()
        self._fills: list[Action] = []
        self._assigned: dict[str, torch.Tensor] = {}
        self._given: dict[str, object] = {}
        self._bound: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._old: dict[str, object] = {}
        live = live_values(state)
        self._computed = {key: name for name, key in state.keys.items() if name not in live}
        made: dict[Position, torch.Tensor] = {}
        for name, value in new.items():
            if name not in state.values:
                raise LoadError(f"the module has no parameter, buffer or extra state called {name}")
            if name not in live:
                self._given[state.keys[name]] = value
                continue
            position = position_of(live[name])
            if live[name].is_meta:
                if position not in made:
                    made[position] = self._made(name, live[name], value)
            elif position not in self._filled:
                self._fills.append(_filling(name, live[name], value))
                self._filled.add(position)
        for name, tensor in live.items():
            if position_of(tensor) in made:
                self._assigned[state.keys[name]] = made[position_of(tensor)]

    def apply(self) -> None:
        """Raises whatever the module's own code raises, and ``LoadError`` if it has no place for a
        value."""
        calls = bool(self._given) or has_own_loading(self._module)
        if calls:
            now = self._module.state_dict()
            self._old = {key: _copied(now[key]) for key in self._computed if key in now}
            if has_own_loading(self._module, not_torchs=True):
                self._keep_the_rest()
        self._bound = [
            (held, dict(held))
            for _, owner in walk(self._module)
            for held in (owner._parameters, owner._buffers)  # noqa: SLF001
        ]
        for fill in self._fills:
            fill.apply()
        if calls:
            _checked(self._load({**self._given, **self._assigned}))
        elif self._assigned:
            _checked(self._module.load_state_dict(self._assigned, strict=False, assign=True))

    def undo(self) -> None:
        old, self._old = self._old, {}
        bound, self._bound = self._bound, []
        try:
            self._restore(old)
        finally:
            for held, before in bound:
                held.clear()
                held.update(before)
            undo_all(self._fills)

    def _made(self, name: str, meta: torch.Tensor, value: object) -> torch.Tensor:
        """The parameter or buffer that takes the place of one on the meta device."""
        if not isinstance(value, torch.Tensor) or value.shape != meta.shape:
            raise _misfit(name, meta, value)
        if isinstance(value, DTensor):
            made: torch.Tensor = value.detach().to(dtype=meta.dtype)
        else:
            made = value.detach().to(device=self._device, dtype=meta.dtype)
            made = strided_as(made, meta)
        bound = self._live.get(position_of(meta))
        if isinstance(bound, nn.Parameter):
            return nn.Parameter(made, requires_grad=bound.requires_grad)
        return made

    def _restore(self, old: dict[str, object]) -> None:
        """Give values that are no live memory back. Extra states go straight to their modules,
        since a hook that failed would fail again."""
        extras = {
            name: old.pop(key)
            for key, name in self._computed.items()
            if key in old and _is_extra_state(name)
        }
        for place, owner in walk(self._module):
            name = f"{place}{_EXTRA_STATE}"
            if name in extras and type(owner).set_extra_state is not nn.Module.set_extra_state:
                owner.set_extra_state(extras[name])
        if old:
            self._load(old)

    def _keep_the_rest(self) -> None:
        """Have ``undo`` restore what code we do not know might change besides what it is given."""
        rest = [
            Keep(local_of(live))
            for position, live in self._live.items()
            if position not in self._filled and not live.is_meta and live.layout is torch.strided
        ]
        self._fills = [*rest, *self._fills]

    def _load(self, given: Mapping[str, object]) -> object:
        """``load_state_dict`` with the module's own state and, in their places, ``given``.

        Live tensors are passed as themselves: torch then neither copies nor replaces them. Anything
        else is passed as a copy: loading may clear the very object that it is then to read.
        """
        now = self._module.state_dict()
        live = {position_of(tensor): tensor for tensor in tensors_of(self._module)}
        for key, value in now.items():
            if key in given:
                now[key] = given[key]
            elif key in self._computed:
                now[key] = _copied(value)
            elif isinstance(value, torch.Tensor):
                now[key] = live.get(position_of(value), value)
        if self._assigned:
            return self._module.load_state_dict(now, strict=False, assign=True)
        return self._module.load_state_dict(now, strict=False)


def live_values(state: ModuleState) -> dict[str, torch.Tensor]:
    """Those values that are memory of a parameter or buffer, and so can be filled."""
    storages = {storage_of(tensor) for tensor in tensors_of(state.module)} - {None}
    return {
        name: value
        for name, value in state.values.items()
        if isinstance(value, torch.Tensor)
        and not _is_extra_state(name)
        and storage_of(value) in storages
    }


def _is_extra_state(name: str) -> bool:
    return name.rpartition(".")[2] == _EXTRA_STATE


def _filling(name: str, live: torch.Tensor, value: object) -> Action:
    if not isinstance(value, torch.Tensor) or local_of(value).shape != local_of(live).shape:
        raise _misfit(name, live, value)
    try:
        return replacing(local_of(live), local_of(value))
    except ValueError as error:
        raise LoadError(f"{name} cannot be filled: {error}") from error


def _misfit(name: str, live: torch.Tensor, value: object) -> LoadError:
    what = (
        f"a tensor of shape {tuple(value.shape)}"
        if isinstance(value, torch.Tensor)
        else f"of type {type(value).__name__}"
    )
    return LoadError(
        f"{name} is a tensor of shape {tuple(live.shape)} in the module, and what is to be loaded "
        f"is {what}"
    )


def _copied(value: object) -> object:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _checked(found: Any) -> None:
    """``found`` is what ``load_state_dict`` returned; some that override it return nothing."""
    unexpected = getattr(found, "unexpected_keys", None)
    if unexpected:
        raise LoadError(
            "the module's load_state_dict does not know values that its own state_dict has: "
            f"{', '.join(map(repr, unexpected))}"
        )
