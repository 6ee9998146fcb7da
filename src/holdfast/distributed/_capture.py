"""What a state is made of: modules, optimizers and other statefuls in it become plain trees.

Knows torch's ``state_dict`` protocol and the places things stand at; knows no names of leaves and
no other rank. Tensors are not copied: those of the tree are the live ones. Everything else that
could still change is.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from holdfast.catalog._writing import storable_array
from holdfast.distributed._modules import module_state, parameter_names
from holdfast.distributed._optimizers import optimizer_state
from holdfast.distributed._tensors import home
from holdfast.errors import SaveError
from holdfast.format import PerRank
from holdfast.format._value_model import MAX_VALUE_DEPTH

OPTIMIZER_CLASS: Final = "optimizer_class"
"""Under which key the state of an optimizer says what made it."""

_PLAIN: Final = frozenset({str, int, float, bool, type(None)})

Place = tuple[Any, ...]
"""Where a value stands: the keys and indexes that lead to it."""


@dataclass(frozen=True, slots=True)
class RankOwn:
    """A value that belongs to this rank alone: see ``per_rank``."""

    value: Any


def per_rank(value: object) -> RankOwn:
    """Mark a value of a state as this rank's own: it is saved for every rank, and each rank gets
    its own back.

    Everything else is one value of the whole job. On another number of ranks such values are
    restored only as ``LoadOptions(remap=...)`` says.
    """
    return RankOwn(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A state as a plain tree, and what its places are.

    ``agreed`` are the places of modules and optimizers, whose values must be the same on all
    ranks; ``buffers`` those of modules' buffers; ``own`` those that are each rank's own, where
    the tree has a ``PerRank`` of one value. ``owned`` has where the memory is that optimizers
    change, ``frozen`` where that of modules' parameters is that nothing trains.
    """

    tree: object
    agreed: frozenset[Place]
    buffers: frozenset[Place]
    own: frozenset[Place]
    owned: frozenset[int]
    frozen: frozenset[int]


def capture(state: object) -> Captured:
    """``SaveError`` for what cannot be stored, as far as it can be told from here."""
    walk = _Walk(parameters=parameters_in(state))
    tree = walk.value(state, ())
    return Captured(
        tree=tree,
        agreed=frozenset(walk.agreed),
        buffers=frozenset(walk.buffers),
        own=frozenset(walk.own),
        owned=frozenset(walk.owned),
        frozen=frozenset(walk.frozen),
    )


def leaves_in(tree: object) -> list[Any]:
    """Every tensor and array of a captured tree, one that is there twice as often. Quick: training
    waits for it."""
    found = []
    todo = [tree]
    while todo:
        value = todo.pop()
        if isinstance(value, torch.Tensor | np.ndarray):
            found.append(value)
        elif type(value) in _PLAIN:
            continue
        elif isinstance(value, Mapping):
            todo += reversed([*value.values()])
        elif isinstance(value, list | tuple | deque):
            todo += reversed(value)
        elif isinstance(value, PerRank):
            todo += reversed(value.values)
    return found


@dataclass(frozen=True, slots=True)
class ParameterName:
    """What a parameter is called in its module, and where that module is."""

    module: Place
    name: str


def parameters_in(state: object) -> dict[int, ParameterName]:
    """The name of every parameter of every module in a state, by the parameter's id; that in the
    first module that has it."""
    found: dict[int, ParameterName] = {}
    for place, module in modules_in(state, ()):
        if any(isinstance(inner, FSDPModule) for inner in module.modules()):
            module.state_dict()  # has FSDP2 put the parameters that optimizers know in place
        for number, name in parameter_names(module).items():
            found.setdefault(number, ParameterName(place, name))
    return found


def names_for(
    optimizer: torch.optim.Optimizer, known: Mapping[int, ParameterName]
) -> dict[int, str]:
    """What an optimizer's parameters are called: as in their modules, and where two would have
    one name, after the places of these, too. Modules without a parameter of it do not matter."""
    numbers = [id(each) for group in optimizer.param_groups for each in group["params"]]
    own = {number: known[number] for number in numbers if number in known}
    bare = Counter(each.name for each in own.values())
    if all(count == 1 for count in bare.values()):
        return {number: each.name for number, each in own.items()}
    return {number: ".".join([*map(str, each.module), each.name]) for number, each in own.items()}


def is_stateful(value: object) -> bool:
    """Whether a value keeps torch's protocol of ``state_dict`` and ``load_state_dict``."""
    return (
        not isinstance(value, type)
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )


def modules_in(state: object, place: Place) -> Iterator[tuple[Place, nn.Module]]:
    if isinstance(state, nn.Module):
        yield place, state
    elif isinstance(state, RankOwn):
        yield from modules_in(state.value, place)
    elif len(place) <= MAX_VALUE_DEPTH:
        for key, value in _members(state):
            yield from modules_in(value, (*place, key))


def _members(value: object) -> Iterator[tuple[Any, object]]:
    if type(value) in {dict, OrderedDict, defaultdict}:
        yield from value.items()  # type: ignore[attr-defined]
    elif type(value) in {list, tuple, deque}:
        yield from enumerate(value)  # type: ignore[arg-type]


def _tensors_in(tree: object) -> Iterator[torch.Tensor]:
    return (each for each in leaves_in(tree) if isinstance(each, torch.Tensor))


@dataclass(slots=True, kw_only=True)
class _Walk:
    parameters: Mapping[int, ParameterName]
    agreed: set[Place] = field(default_factory=set)
    buffers: set[Place] = field(default_factory=set)
    own: set[Place] = field(default_factory=set)
    owned: set[int] = field(default_factory=set)
    frozen: set[int] = field(default_factory=set)
    _rebuild: Mapping[type, Callable[[Any, Place], object]] = field(init=False)

    def __post_init__(self) -> None:
        self._rebuild = {
            dict: self._dict,
            OrderedDict: lambda value, place: OrderedDict(self._dict(value, place)),
            defaultdict: lambda value, place: defaultdict(
                value.default_factory, self._dict(value, place)
            ),
            list: self._items,
            tuple: lambda value, place: tuple(self._items(value, place)),
            deque: lambda value, place: deque(self._items(value, place), value.maxlen),
            set: lambda value, _: set(value),
            Counter: lambda value, _: Counter(value),
        }

    def value(self, value: object, place: Place) -> object:
        if value is None or isinstance(value, torch.Tensor | str | int | float):
            return value
        if isinstance(value, np.ndarray):
            # One that is no leaf, of texts or dates, is encoded later, and may change until then.
            return value if storable_array(value) is not None else value.copy()
        rebuild = self._rebuild.get(type(value))
        if rebuild is not None:
            # What is deeper is not stored: whoever encodes it says so, though it has no end.
            return rebuild(value, place) if len(place) <= MAX_VALUE_DEPTH else value
        if isinstance(value, PerRank):
            raise SaveError(
                f"{_shown(place)} holds the values of the {len(value.values)} ranks that it was "
                "loaded from; choose this rank's, as per_rank(value.values[0]). Nothing was saved"
            )
        if isinstance(value, RankOwn):
            if any(place[:length] in self.own for length in range(len(place))):
                return self.value(value.value, place)  # it is in one that is this rank's own
            self.own.add(place)
            return PerRank(values=(self.value(value.value, (*place, "@0")),))
        return self._stateful(value, place) if is_stateful(value) else value

    def _stateful(self, value: Any, place: Place) -> object:
        if isinstance(value, nn.Module):
            return self._module(value, place)
        if isinstance(value, torch.optim.Optimizer):
            self.agreed.add(place)
            kind = {OPTIMIZER_CLASS: type(value).__qualname__}
            state = optimizer_state(value, names_for(value, self.parameters)) | kind
            parameters = (each for group in value.param_groups for each in group["params"])
            # Who steps FP32 masters writes the model's own weights, too.
            weights = _tensors_in(getattr(value, "training_weights", None))
            self.owned.update(map(home, chain(parameters, weights, _tensors_in(state))))
            self.owned.discard(0)
            return self._dict(state, place)
        try:
            inner = value.state_dict()
        except Exception as error:
            raise SaveError(
                f"the state_dict() of {_shown(place)}, a {type(value).__qualname__}, failed: "
                f"{type(error).__name__}: {error}; nothing was saved"
            ) from error
        return self.value(_plain(inner), place)

    def _module(self, module: nn.Module, place: Place) -> object:
        state = module_state(module, place=".".join(map(str, place)))
        self.agreed.add(place)
        self.buffers.update((*place, name) for name in state.buffers)
        self.frozen.update(home(each) for each in module.parameters() if not each.requires_grad)
        return self._dict(state.values, place)

    def _dict(self, value: Mapping[Any, object], place: Place) -> dict[Any, object]:
        return {key: self.value(item, (*place, key)) for key, item in value.items()}

    def _items(self, value: list[object], place: Place) -> list[object]:
        return [self.value(item, (*place, index)) for index, item in enumerate(value)]


def _plain(state: object) -> object:
    """A ``state_dict()`` that gives itself back would be asked for ever."""
    return dict(state) if is_stateful(state) and isinstance(state, Mapping) else state


def _shown(place: Place) -> str:
    return ".".join(map(str, place)) or "the state"
