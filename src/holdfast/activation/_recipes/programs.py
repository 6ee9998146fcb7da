"""How dropped storages are made again, as far as that is the same in every call. Knows drops and
recipes, no graph."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from holdfast.activation._recipes.drops import Drop, Drops, Source
from holdfast.activation._recipes.following import Following
from holdfast.activation._recipes.graph import SAVED, Place
from holdfast.activation._recipes.reading import Settings
from holdfast.activation._recipes.recipe import Recipe
from holdfast.activation._recipes.table import RECIPES
from holdfast.activation._recipes.views import its_shape

# A copy's memory format is not in its node. First the recipe's own.
_FORMS = (
    None,
    torch.contiguous_format,
    torch.preserve_format,
    torch.channels_last,
    torch.channels_last_3d,
)


class Programs:
    """How all that is dropped of a stage is found and made. Immutable.

    What is found in a call is read in one go, for all programs together: the ``holders`` that are
    dropped, by their numbers among what ``following`` finds, the ``settings`` of the operations,
    and the leaves that are ``watched``, both from nodes."""

    __slots__ = ("each", "following", "holders", "settings", "watched")

    def __init__(self, drops: Drops) -> None:
        self.following = Following(drops)
        places = [place for drop in drops.drops for place in drop.holders]
        others = {place: number for number, place in enumerate(places)}
        self.holders = [self.following.taken[place] for place in places]
        self.settings = [each for drop in drops.drops for each in _settings(drop, others)]
        self.watched = list(dict.fromkeys(leaf for drop in drops.drops for leaf in drop.watched))
        self.each: list[Program] = []
        holders = settings = 0
        for drop in drops.drops:
            self.each.append(Program(drop, self, others, holders, settings))
            holders += len(drop.holders)
            settings += len(drop.operations)


@functools.lru_cache(maxsize=256)
def programs_of(drops: Drops) -> Programs:
    """One for all stages that are alike: what they share stays in the processor's caches."""
    return Programs(drops)


class Program:
    """How the results of one drop are made, whichever call they are of. Immutable.

    ``operations`` are run in turn, each with tensors from its sources, with settings (by their
    number), and with the results that are not needed after it. Sources are ("result", number, which
    of several), ("saved", number among ``nodes``, attribute), ("tensor", number among ``tensors``,
    None), ("leaf", number among all that are watched, None) or ("nothing", 0, None). ``tensors``
    are other dropped ones (``True`` and their numbers among all holders) or found ones (``False``
    and their numbers among what was found).
    """

    __slots__ = (
        "copied",
        "count",
        "forms",
        "holders",
        "is_mask",
        "nodes",
        "operations",
        "reads",
        "results",
        "tensors",
        "watched",
    )

    def __init__(
        self, drop: Drop, all_: "Programs", others: dict[Place, int], holders: int, settings: int
    ) -> None:
        self.is_mask = not drop.operations
        self.reads = drop.reads
        self.holders = slice(holders, holders + len(drop.holders))
        self.count = len(drop.holders)
        self.watched = [all_.watched.index(each) for each in drop.watched]
        self.results = [(each.number, each.output) for each in drop.results]
        recipes = [RECIPES[each.kind] for each in drop.operations]
        made = [number for number, each in enumerate(recipes) if not each.is_view]
        copies = bool(made) and recipes[made[-1]].copies
        self.copied = made[-1] if copies else -1
        self.forms: tuple[Any, ...] = _FORMS if copies else _FORMS[:1]
        self.nodes: list[int] = []
        self.tensors: list[tuple[bool, int]] = []
        self.operations: list[tuple[Callable[..., Any], list[Any], int, list[int]]] = []
        for recipe, operation, frees in zip(recipes, drop.operations, _frees(drop), strict=True):
            sources = [self._source(each, all_, others) for each in operation.sources]
            self.operations.append((recipe.run, sources, settings, frees))
            settings += 1

    def _source(
        self, source: Source, all_: Programs, others: dict[Place, int]
    ) -> tuple[str, int, Any]:
        match source.kind:
            case "result":
                return "result", source.number, source.output
            case "leaf":
                return "leaf", all_.watched.index(source.number), None
            case "nothing":
                return "nothing", 0, None
        place = Place(source.number, source.name)
        if place in others:
            self.tensors.append((True, others[place]))
        elif source.kind == "held":
            self.tensors.append((False, all_.following.taken[place]))
        else:
            self.nodes.append(source.number)
            return "saved", len(self.nodes) - 1, SAVED + source.name
        return "tensor", len(self.tensors) - 1, None


def _settings(drop: Drop, others: dict[Place, int]) -> Iterator[tuple[Settings | None, int]]:
    """How the settings of each operation are read, and from which node. What makes the tensor of a
    holder and is told its shape alone has it from there (``None``, and the holder's number): a node
    takes ten times as long to tell."""
    held = dict(zip(drop.results, drop.holders, strict=False))
    for number, operation in enumerate(drop.operations):
        recipe = RECIPES[operation.kind]
        holder = held.get(Source("result", number))
        if (
            recipe.settings is its_shape
            and holder is not None
            and _is_made(drop, holder, operation.node)
        ):
            yield None, others[holder]
        elif recipe.found is None:
            yield recipe.settings, operation.node
        else:
            yield functools.partial(_with_found, recipe, operation.found), operation.node


def _with_found(recipe: Recipe, found: Any, node: Any) -> tuple[Any, ...] | None:
    told = recipe.settings(node)
    return None if told is None else (*told, found)


def _is_made(drop: Drop, holder: Place, node: int) -> bool:
    """Whether it is compared that a node made what a holder holds."""
    return any(
        (each.node, each.name, each.made_by) == (holder.node, holder.name, node)
        for each in drop.expects.saved
    )


def _frees(drop: Drop) -> list[list[int]]:
    """After which operation which results are not needed any more."""
    last: dict[int, int] = {}
    for number, operation in enumerate(drop.operations):
        last[number] = number
        last.update({e.number: number for e in operation.sources if e.kind == "result"})
    for each in drop.results:
        last.pop(each.number, None)
    frees: list[list[int]] = [[] for _ in drop.operations]
    for result, number in last.items():
        frees[number].append(result)
    return frees
