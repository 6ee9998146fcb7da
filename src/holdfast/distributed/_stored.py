"""A stored tree: walking through it, and putting tensors in the place of references. Knows no
state that it goes into."""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from holdfast.distributed._staging import Slot, Staging
from holdfast.format import LeafRef, PerRank

DICTS: Final = frozenset({dict, OrderedDict, defaultdict})
LISTS: Final = frozenset({list, tuple, deque})


def join(place: str, key: object) -> str:
    """The place of something inside another."""
    return f"{place}.{key}" if place else str(key)


def refs_in(value: Any, steps: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], LeafRef]]:
    """Every reference to a leaf, with the steps that lead to it."""
    if isinstance(value, LeafRef):
        yield steps, value
    elif isinstance(value, PerRank):
        for rank, each in enumerate(value.values):
            yield from refs_in(each, (*steps, f"@{rank}"))
    elif type(value) in DICTS:
        for key, each in value.items():
            yield from refs_in(each, (*steps, key))
    elif type(value) in LISTS:
        for index, each in enumerate(value):
            yield from refs_in(each, (*steps, index))


def has_ranks(value: Any) -> bool:
    """Whether there is anything in a value that each rank has its own of."""
    if isinstance(value, PerRank):
        return True
    if type(value) in DICTS:
        return any(map(has_ranks, value.values()))
    return type(value) in LISTS and any(map(has_ranks, value))


def has_leaves(value: Any) -> bool:
    """Whether there is anything in a value that is stored outside of the tree, or by rank."""
    if isinstance(value, PerRank | LeafRef):
        return True
    if type(value) in DICTS:
        return any(map(has_leaves, value.values()))
    return type(value) in LISTS and any(map(has_leaves, value))


def replaced(value: Any, slots: Mapping[int, Slot], staging: Staging) -> Any:
    """A stored value with what was staged in the place of references, which ``slots`` has by the
    id of each. One that it has not stays."""
    if isinstance(value, LeafRef):
        return staging.get(slots[id(value)]) if id(value) in slots else value
    if isinstance(value, PerRank):
        return PerRank(values=tuple(replaced(each, slots, staging) for each in value.values))
    if type(value) in DICTS or type(value) in LISTS:
        return mapped(value, lambda _, each: replaced(each, slots, staging))
    return value


def mapped(value: Any, change: Callable[[Any, Any], Any]) -> Any:
    """A container of the same kind, of changed values."""
    if isinstance(value, defaultdict):
        made: Any = defaultdict(value.default_factory)
        made.update({key: change(key, each) for key, each in value.items()})
        return made
    if isinstance(value, dict):
        return type(value)((key, change(key, each)) for key, each in value.items())
    if isinstance(value, deque):
        return deque((change(index, each) for index, each in enumerate(value)), value.maxlen)
    return type(value)(change(index, each) for index, each in enumerate(value))


def at_steps(tree: Any, steps: Sequence[Any]) -> Any:
    """What a state has where something is stored, if it is of the same form; else ``None``."""
    for step in steps:
        if isinstance(tree, Mapping):
            tree = tree.get(step)
        elif isinstance(tree, list | tuple | deque) and isinstance(step, int) and step < len(tree):
            tree = tree[step]
        else:
            return None
    return tree
