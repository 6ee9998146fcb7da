"""How a dropped storage is made again, as far as that is the same in every call. Knows drops and
recipes, no graph."""

from typing import Any

import torch

from holdfast.activation._recipes.drops import Drop, Operation
from holdfast.activation._recipes.recipe import Recipe
from holdfast.activation._recipes.table import RECIPES

# A copy's memory format is not in its node. First the recipe's own.
_FORMS = (
    None,
    torch.contiguous_format,
    torch.preserve_format,
    torch.channels_last,
    torch.channels_last_3d,
)


class Program:
    """How the results of one drop are made, whichever call they are of. Immutable."""

    __slots__ = ("drop", "forms", "frees", "is_mask", "operations", "results")

    def __init__(self, drop: Drop) -> None:
        self.drop = drop
        self.is_mask = not drop.operations
        self.operations = [_prepared(each) for each in drop.operations]
        self.results = [(each.number, each.output) for each in drop.results]
        recipes = [recipe for recipe, *_ in self.operations]
        made = [number for number, each in enumerate(recipes) if not each.is_view]
        copies = bool(made) and recipes[made[-1]].copies
        self.forms = (made[-1], _FORMS) if copies else (-1, (None,))
        last: dict[int, int] = {}
        for number, operation in enumerate(drop.operations):
            last[number] = number
            last.update({e.number: number for e in operation.sources if e.kind == "result"})
        for each in drop.results:
            last.pop(each.number, None)
        self.frees: list[list[int]] = [[] for _ in drop.operations]
        for result, number in last.items():
            self.frees[number].append(result)


def _prepared(operation: Operation) -> tuple[Recipe, int, Any, list[Any], list[Any]]:
    """All of an operation that is the same in every call: its recipe, its node, what was found, its
    tensors as far as other operations make them, and where the others belong among them."""
    recipe = RECIPES[operation.kind]
    found = () if recipe.found is None else (operation.found,)
    given = [(e.number, e.output) if e.kind == "result" else None for e in operation.sources]
    rest = [
        (number, source)
        for number, source in enumerate(operation.sources)
        if source.kind not in {"result", "nothing"}
    ]
    return recipe, operation.node, found, given, rest
