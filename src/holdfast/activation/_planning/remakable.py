"""What can be dropped of each stage and made again. Reads the stages' graphs in one forward, and
tries; drops nothing."""

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.activation._layers.layer_forward import Arguments, Forward
from holdfast.activation._planning.sampling import Sample
from holdfast.activation._planning.seen import Made, Recipes, StageProfile
from holdfast.activation._planning.stages import (
    keeping,
    numel_of,
    roots_of,
    standing_in,
    tensors_of,
)
from holdfast.activation._recipes.compiling import Item, items_of
from holdfast.activation._recipes.dropping import Dropping
from holdfast.activation._recipes.drops import Drops, chosen, drops_of
from holdfast.activation._recipes.graph import CallGraph
from holdfast.activation._storages import memory_bytes, storages

_REPEATS = 3


def look_for_recipes(
    model: Any, sample: Sample, stages: Mapping[str, Any], seen: Mapping[str, StageProfile]
) -> None:
    """Read the graph of every stage in one forward, and try what could be made again: once for all
    stages that are alike."""
    tried: dict[Any, tuple[Made | None, ...]] = {}
    last: list[Any] = []

    def call(name: str, module: Any, forward: Forward, given: Arguments) -> Any:
        output = keeping(name, module, forward, given)
        # Asked for here: during the forward FSDP's modules have other parameters, whole ones.
        alive = [*model.parameters(), *model.buffers()]
        _look(seen[name], output, given, alive, tried)
        inputs = [each for each in tensors_of(given) if each.requires_grad]
        seen[name].linked = len(inputs) == 1 and any(inputs[0] is each for each in last)
        last[:] = [each for each in tensors_of(output) if each.requires_grad]
        return output

    with standing_in(stages, call):
        sample.forward(model)


def _look(
    seen: StageProfile,
    output: Any,
    given: Arguments,
    alive: Sequence[Any],
    tried: dict[Any, tuple[Made | None, ...]],
) -> None:
    inputs, outputs = tensors_of(given), tensors_of(output)
    seen.input_numel = numel_of(given)
    seen.output_bytes = memory_bytes(output)
    roots = roots_of(output, given)
    if not roots:
        return
    graph = CallGraph(roots, [each.grad_fn for each in inputs if each.grad_fn is not None])
    living = [*alive, *inputs, *outputs]
    seen.saved_bytes = _saved_bytes(graph, living)
    items = items_of(graph, living)
    if not items:
        return
    drops = drops_of(graph, items)
    made = tried.get(key := _alike(drops, items))
    if made is None:
        made = tried[key] = _try(seen.name, drops, items, roots)
    exact = [number for number, each in enumerate(made) if each is not None]
    seen.recipes = Recipes(
        drops=chosen(drops, exact), made=tuple(each for each in made if each is not None)
    )


def _alike(drops: Drops, items: Sequence[Item]) -> Any:
    return drops, tuple(item.freed_bytes for item in items)


def _try(
    name: str, drops: Drops, items: Sequence[Item], roots: Sequence[Any]
) -> tuple[Made | None, ...]:
    tried = Dropping(name, drops).tried(roots, _REPEATS)
    return tuple(
        Made(freed_bytes=item.freed_bytes, seconds=each.seconds) if each.is_exact else None
        for item, each in zip(items, tried, strict=True)
    )


def _saved_bytes(graph: CallGraph, living: Sequence[Any]) -> int:
    """The storages that a graph holds and nobody else does."""
    others = {storage._cdata for each in living for storage in storages(each)}  # noqa: SLF001 -- the identity of a storage
    found = {}
    for number, entry in enumerate(graph.nodes):
        if entry.foreign:
            continue
        saved = list(graph.saved(number).values())
        saved += [each for each in getattr(entry.node, "saved_tensors", ()) if each is not None]
        for tensor in saved:
            for storage in storages(tensor):
                found[storage._cdata] = storage.nbytes()  # noqa: SLF001 -- as above
    return sum(size for key, size in found.items() if key not in others)
