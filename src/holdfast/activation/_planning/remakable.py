"""What can be dropped of each stage and made again. Reads the stages' graphs in one forward, and
tries: one of all stages that are alike, and then whether what was found fits the others. Nobody
runs that forward's backward, so dropping from it changes nothing."""

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.activation._layers.layer_forward import Arguments, Forward
from holdfast.activation._planning.sampling import Sample
from holdfast.activation._planning.seen import Made, Recipes, StageProfile
from holdfast.activation._planning.sizes import numel_of
from holdfast.activation._planning.stages import keeping, roots_of, standing_in, tensors_of
from holdfast.activation._recipes.compiling import Item, items_of
from holdfast.activation._recipes.dropping import Dropping
from holdfast.activation._recipes.drops import Drops, chosen, drops_of
from holdfast.activation._recipes.graph import LEAF, CallGraph
from holdfast.activation._storages import memory_bytes, storages

_REPEATS = 3


def look_for_recipes(
    model: Any, sample: Sample, stages: Mapping[str, Any], seen: Mapping[str, StageProfile]
) -> None:
    """Read the graph of every stage in one forward, and try what could be made again."""
    known: dict[Any, list[StageProfile]] = {}
    last: list[Any] = []

    def call(name: str, module: Any, forward: Forward, given: Arguments) -> Any:
        output = keeping(name, module, forward, given)
        stage = seen[name]
        stage.input_numel = numel_of(given)
        stage.output_bytes = memory_bytes(output)
        roots = roots_of(output, given)
        if roots:
            inputs = tensors_of(given)
            graph = CallGraph(roots, [each.grad_fn for each in inputs if each.grad_fn is not None])
            around = [*inputs, *tensors_of(output)]
            alike = known.setdefault(_likeness(stage, graph, around), [])
            if not any(_take_over(stage, other, roots) for other in alike):
                # Asked for here: during the forward FSDP's modules have other parameters, whole
                # ones.
                _look(stage, graph, roots, [*model.parameters(), *model.buffers(), *around])
                alike.append(stage)
        inputs = [each for each in tensors_of(given) if each.requires_grad]
        stage.linked = len(inputs) == 1 and any(inputs[0] is each for each in last)
        last[:] = [each for each in tensors_of(output) if each.requires_grad]
        return output

    with standing_in(stages, call):
        sample.forward(model)


def _likeness(stage: StageProfile, graph: CallGraph, around: Sequence[Any]) -> Any:
    """Equal for stages of one class that did the same operations on tensors of the same form."""
    leaves = [entry.node.variable for entry in graph.nodes if entry.kind == LEAF]
    return (
        stage.kind,
        tuple((entry.kind, entry.foreign, entry.inputs) for entry in graph.nodes),
        tuple((each.shape, each.dtype) for each in (*around, *leaves)),
    )


def _take_over(stage: StageProfile, other: StageProfile, roots: Sequence[Any]) -> bool:
    """Whether what was found of a stage that is alike fits this one; then it has the same."""
    recipes = other.recipes
    if recipes is not None and not Dropping(stage.name, recipes.drops).is_exact(roots):
        return False
    stage.recipes, stage.saved_bytes = recipes, other.saved_bytes
    return True


def _look(
    stage: StageProfile, graph: CallGraph, roots: Sequence[Any], living: Sequence[Any]
) -> None:
    stage.saved_bytes = _saved_bytes(graph, living)
    items = items_of(graph, living)
    if not items:
        return
    drops = drops_of(graph, items)
    made = _try(stage.name, drops, items, roots)
    exact = [number for number, each in enumerate(made) if each is not None]
    stage.recipes = Recipes(
        drops=chosen(drops, exact), made=tuple(each for each in made if each is not None)
    )


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
