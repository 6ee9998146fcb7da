"""Walks through a state and a stored tree side by side, and finds what fills what.

Knows every kind of thing a state is made of; what it finds goes into a ``Matching``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from holdfast.distributed._capture import OPTIMIZER_CLASS, RankOwn, is_stateful, names_for
from holdfast.distributed._filling import ArrayFill, SetItem, StatefulFill
from holdfast.distributed._matching import CPU, Matching
from holdfast.distributed._module_walk import has_own_loading, position_of
from holdfast.distributed._modules import ModuleFill, ModuleState, live_values, module_state
from holdfast.distributed._optimizers import OptimizerFill, OptimizerTarget, without_state
from holdfast.distributed._result import Difference
from holdfast.distributed._staging import Slot, Staging
from holdfast.distributed._stored import DICTS, LISTS, at_steps, has_ranks, join, refs_in, replaced
from holdfast.distributed._swapping import Action, replacing_all
from holdfast.distributed._tensors import Like, local_of
from holdfast.errors import LoadError
from holdfast.format import LeafRef, PerRank, numpy_dtype


def fit(found: Matching, target: Any, stored: object, *, open_at: frozenset[str]) -> list[Any]:
    """Match a state, a container, a stateful or a value, with the stored tree. At the places
    ``open_at`` parts that are stored and not asked for are left alone; not so tensors that stand
    in the state's own dict. Returns a list that holds the state, once it is filled."""
    holder = [target]
    _Fitting(found, open_at).value(holder, 0, stored, "")
    return holder


class _Fitting:
    def __init__(self, found: Matching, open_at: frozenset[str]) -> None:
        self._found = found
        self._open_at = open_at

    def value(self, container: Any, key: Any, stored: object, place: str) -> None:
        """Find what fills the value at ``container[key]``, or is put there."""
        target = container[key]
        while isinstance(target, RankOwn):
            target = target.value
        own = self._found.own(stored, place) if isinstance(stored, PerRank) else stored
        if isinstance(own, PerRank):
            return
        for is_kind, find in self._kinds:
            if is_kind(target):
                find(self, target, own, place, container, key)
                return

    def _dict(self, target: Any, stored: object, place: str, *_: object) -> None:
        found = self._found
        if not isinstance(stored, Mapping):
            found.unlike(place or "the state", stored, "a dict")
            return
        for key in target:
            at = join(place, key)
            if key in stored:
                self.value(target, key, stored[key], at)
            elif found.is_under(at):
                found.miss(at, target[key])
        for key, value in stored.items():
            if key in target or not found.is_under(at := join(place, key)):
                continue
            if place not in self._open_at or (not place and isinstance(value, LeafRef)):
                found.pass_over(at, value)

    def _list(self, target: Any, stored: Any, place: str, *_: object) -> None:
        if type(stored) not in LISTS:
            self._found.unlike(place or "the state", stored, "a list")
        elif len(stored) != len(target):
            self._found.other.append(
                f"{place or 'the state'} has {len(stored)} items in the checkpoint, and "
                f"{len(target)} are wanted"
            )
        else:
            for index, value in enumerate(stored):
                self.value(target, index, value, join(place, index))

    def _plain(self, target: Any, stored: Any, place: str, container: Any, key: Any) -> None:
        found = self._found
        if place in self._open_at and type(target) in DICTS and isinstance(stored, Mapping):
            self._dict(target, stored, place)
        elif not found.is_included(place) or has_ranks(own := found.own(stored, place)):
            return
        elif isinstance(container, tuple):
            if type(own) is not type(target) or own != target:
                found.other.append(f"{place} is in a tuple, so that it cannot be set")
        else:
            make = found.whole(own, place)
            given = isinstance(container[key], RankOwn)

            def build(staging: Staging) -> list[Action]:
                made = make(staging)
                return [SetItem(container, key, RankOwn(made) if given else made)]

            found.builds.append(build)

    def _module(self, target: nn.Module, stored: object, place: str, *_: object) -> None:
        found = self._found
        if not isinstance(stored, Mapping):
            found.unlike(place or "the state", stored, "a module's state")
            return
        state = module_state(target, loading=True, place=place)
        tied = _tied(state)
        filling = _ModuleFilling(state, found.device)
        for name, live in state.values.items():
            at = join(place, name)
            if not found.is_included(at):
                continue
            if name in stored:
                self._module_value(
                    filling, name, live, stored[name], tied=tied.get(name, ()), place=at
                )
            elif not any(other in stored for other in tied.get(name, ())):
                found.miss(at, live)
        for name in stored:
            if name not in state.values and found.is_included(at := join(place, name)):
                found.pass_over(at, stored[name])
        found.builds.append(filling.actions)

    def _module_value(
        self,
        filling: "_ModuleFilling",
        name: str,
        live: object,
        stored: object,
        *,
        tied: Sequence[str],
        place: str,
    ) -> None:
        found, value = self._found, self._found.own(stored, place)
        if not isinstance(live, torch.Tensor):
            if isinstance(value, LeafRef):
                found.unlike(place, value, "no tensor")
            elif not has_ranks(value):
                filling.makes[name] = found.whole(value, place)
            return
        if not isinstance(value, LeafRef):
            if not has_ranks(value):
                found.unlike(place, value, "a tensor")
            return
        before = next((filling.slots[each] for each in tied if each in filling.slots), None)
        if before is None:
            slot = found.slot(live, value, place, may_be_direct=name in filling.live)
            if slot is not None:
                filling.slots[name] = slot
            elif found.shape_of(value.name) != tuple(live.shape):
                found.misfits[name] = found.misfits[place] = found.shape_of(value.name)
        elif before.ref.name != value.name:
            found.other.append(
                f"{before.place} and {place} are one tensor here, and two in the checkpoint"
            )

    def _optimizer(
        self, target: torch.optim.Optimizer, stored: Any, place: str, *_: object
    ) -> None:
        found = self._found
        if not found.is_under(place):
            return
        if not isinstance(stored, Mapping):
            found.unlike(place or "the state", stored, "an optimizer's state")
            return
        stored = found.own(stored, place)
        if has_ranks(stored):
            return
        of = place or "the optimizer"
        saved_by = stored.get(OPTIMIZER_CLASS, type(target).__qualname__)
        if saved_by != type(target).__qualname__:
            found.other.append(
                f"{of} was saved by {saved_by}, and this is {type(target).__qualname__}"
            )
        if any(each.is_meta for group in target.param_groups for each in group["params"]):
            found.other.append(
                f"{of} has parameters on the meta device, which the load replaces: load the model, "
                "make the optimizer, then load both"
            )
            return
        stored = {key: value for key, value in stored.items() if key != OPTIMIZER_CLASS}
        fitted = OptimizerTarget(target, names_for(target, found.parameters))
        missing, unexpected, sentences = fitted.problems(stored)
        found.missing += [join(place, name) for name in missing]
        found.unexpected += [join(place, name) for name in unexpected]
        found.other += [f"{of}: {sentence}" for sentence in sentences]
        if missing and not found.parameters:
            found.other.append(
                f"{of}: parameters have their names from the model; load it in the same call"
            )
        if sentences:
            return
        slots: dict[int, Slot] = {}
        unfit: set[str] = set()
        for path, ref, like in fitted.likes(stored, found.shape_of):
            at = ".".join([*([place] if place else []), *map(str, path)])
            of_parameter = fitted.shape_like(path)
            shape = found.shape_of(ref.name)
            if of_parameter is not None and found.misfits.get(str(path[1])) == shape:
                found.is_shape(at, shape, of_parameter)
                unfit.add(str(path[1]))
            else:
                slots[id(ref)] = found.add(Slot(place=at, ref=ref, like=like))
        kept = without_state(stored, unfit)
        found.builds.append(lambda staging: [OptimizerFill(fitted, replaced(kept, slots, staging))])

    def _stateful(self, target: Any, stored: Any, place: str, *_: object) -> None:
        found = self._found
        if not found.is_under(place):
            return
        own = found.own(stored, place)
        if has_ranks(own):
            return
        current = target.state_dict()
        slots: dict[int, Slot] = {}
        for steps, ref in refs_in(own):
            live = at_steps(current, steps)
            like = Like(device=found.device or CPU)
            if isinstance(live, torch.Tensor) and tuple(live.shape) == found.shape_of(ref.name):
                like = Like.of(live)
            at = join(place, ".".join(map(str, steps)))
            slots[id(ref)] = found.add(Slot(place=at, ref=ref, like=like))
        found.builds.append(lambda staging: [StatefulFill(target, replaced(own, slots, staging))])

    def _tensor(
        self, target: torch.Tensor, stored: object, place: str, container: Any, key: Any
    ) -> None:
        found = self._found
        if not found.is_included(place):
            return
        if not isinstance(stored, LeafRef):
            found.unlike(place or "the state", stored, "a tensor")
            return
        if not self._is_first(target, stored, place):
            return
        slot = found.slot(target, stored, place or "the state")
        if slot is None or slot.direct is not None:
            return
        if target.is_meta:
            found.builds.append(lambda staging: [SetItem(container, key, staging.get(slot))])
        else:
            last = found.builds[-1] if found.builds else None
            if not isinstance(last, _TensorFilling):
                last = _TensorFilling()
                found.builds.append(last)
            last.slots.append((target, slot))

    def _is_first(self, target: torch.Tensor, stored: LeafRef, place: str) -> bool:
        """Whether a tensor was not met with before. One that was cannot have two values."""
        if target.is_meta:
            return True
        first, leaf = self._found.filled.setdefault(position_of(target), (place, stored.name))
        if first != place and leaf != stored.name:
            self._found.other.append(
                f"{first} and {place} are one tensor here, and two in the checkpoint"
            )
        return first == place

    def _array(self, target: Any, stored: Any, place: str, *_: object) -> None:
        found = self._found
        if not found.is_included(place):
            return
        if not target.flags.writeable:
            found.other.append(f"{place or 'the state'} is an array that cannot be written to")
        elif isinstance(stored, np.ndarray):  # so small, or of such a type, that it is in the tree
            if found.is_shape(place, stored.shape, target.shape):
                found.builds.append(lambda _: [ArrayFill(target, stored)])
        elif not isinstance(stored, LeafRef):
            found.unlike(place or "the state", stored, "an array")
        elif found.is_shape(place, found.shape_of(stored.name), target.shape):
            dtype = numpy_dtype(found.tensors[stored.name].dtype)
            if dtype != target.dtype:
                found.dtypes.append(
                    Difference(place=place, stored=str(dtype), wanted=str(target.dtype))
                )
            ref = LeafRef(kind="array", name=stored.name)
            slot = found.add(Slot(place=place, ref=ref, like=Like(device=CPU)))
            found.builds.append(lambda staging: [ArrayFill(target, staging.get(slot))])

    # Of the class and not of each one, which would keep itself alive, and with it all that it has
    # found: a loader's workers, say.
    _kinds: ClassVar[Sequence[tuple[Callable[[Any], bool], Callable[..., None]]]] = (
        (lambda target: isinstance(target, torch.Tensor), _tensor),
        (lambda target: isinstance(target, nn.Module), _module),
        (lambda target: isinstance(target, torch.optim.Optimizer), _optimizer),
        (lambda target: isinstance(target, np.ndarray), _array),
        (is_stateful, _stateful),
        (lambda target: type(target) in DICTS and _is_filled(target), _dict),
        (lambda target: type(target) in LISTS and _is_filled(target), _list),
        (lambda _: True, _plain),
    )


class _TensorFilling:
    """What was found for tensors that are in the state as such, and there may be very many."""

    def __init__(self) -> None:
        self.slots: list[tuple[torch.Tensor, Slot]] = []

    def __call__(self, staging: Staging) -> list[Action]:
        place = ""

        def pairs() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            nonlocal place
            for target, slot in self.slots:
                place = slot.place
                yield local_of(target), staging.take(slot)

        try:
            return [*replacing_all(pairs())]
        except ValueError as error:
            raise LoadError(f"{place} cannot be filled: {error}") from error


class _ModuleFilling:
    """What was found for one module, by its names."""

    def __init__(self, state: ModuleState, device: torch.device | None) -> None:
        self._state = state
        self._device = device
        self.live = frozenset[str]() if has_own_loading(state.module) else live_values(state).keys()
        self.slots: dict[str, Slot] = {}
        self.makes: dict[str, Callable[[Staging], Any]] = {}

    def actions(self, staging: Staging) -> list[Action]:
        new: dict[str, Any] = {
            name: staging.get(slot) if self._is_meta(name) else staging.take(slot)
            for name, slot in self.slots.items()
            if slot.direct is None
        }
        new |= {name: make(staging) for name, make in self.makes.items()}
        return [ModuleFill(self._state, new, device=self._device)] if new else []

    def _is_meta(self, name: str) -> bool:
        live = self._state.values[name]
        return isinstance(live, torch.Tensor) and live.is_meta


def _tied(state: ModuleState) -> dict[str, list[str]]:
    """For each name of a tensor that has several, the others."""
    same: dict[Any, list[str]] = {}
    for name, value in state.values.items():
        if isinstance(value, torch.Tensor):
            same.setdefault(position_of(value), []).append(name)
    return {
        name: [other for other in names if other != name]
        for names in same.values()
        if len(names) > 1
        for name in names
    }


def _is_filled(value: Any) -> bool:
    """Whether there is anything in a container that is to be filled rather than replaced."""
    if isinstance(value, torch.Tensor | np.ndarray | nn.Module | RankOwn) or is_stateful(value):
        return True
    if type(value) in DICTS:
        return any(map(_is_filled, value.values()))
    return type(value) in LISTS and any(map(_is_filled, value))
