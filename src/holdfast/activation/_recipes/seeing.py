"""A graph with the tensors it saved, and who made each. Knows recipes as far as memory goes: which
operations only look at it, and which may have written to it."""

from typing import Any

from holdfast.activation._recipes.graph import CallGraph, Edge, Place
from holdfast.activation._recipes.table import RECIPES


class Seen:
    """A graph, with all the tensors it saved."""

    def __init__(self, graph: CallGraph) -> None:
        self.graph = graph
        self.tensors: dict[Place, Any] = {}
        self.by_value: dict[Edge, list[Place]] = {}
        for number, entry in enumerate(graph.nodes):
            if entry.foreign:
                continue
            for name, tensor in graph.saved(number).items():
                place = Place(number, name)
                self.tensors[place] = tensor
                made = graph.producer(tensor)
                if made is not None:
                    self.by_value.setdefault(made, []).append(place)

    def producer(self, place: Place) -> Edge | None:
        """What made a saved tensor; also one without a gradient, if the node that saved it did."""
        tensor = self.tensors[place]
        if tensor.grad_fn is not None:
            return self.graph.producer(tensor)
        recipe = RECIPES.get(self.graph.nodes[place.node].kind)
        output = None if recipe is None else dict(recipe.saves).get(place.name)
        return None if output is None else Edge(place.node, output)

    def base(self, edge: Edge) -> Edge:
        """The operation that made the memory of a value, through the views of it."""
        while True:
            entry = self.graph.nodes[edge.node]
            recipe = RECIPES.get(entry.kind)
            if recipe is None or not recipe.is_view or not entry.inputs or entry.inputs[0] is None:
                return edge
            edge = entry.inputs[0]

    def writes(self, base: Edge) -> int:
        """How often, at most, operations of the graph wrote to the memory of ``base`` in place."""
        count = 0
        edge: Edge | None = base
        while edge is not None:
            entry = self.graph.nodes[edge.node]
            recipe = RECIPES.get(entry.kind)
            if recipe is None or not recipe.in_place:
                break
            count += 1
            edge = entry.inputs[0] if entry.inputs else None
        return count
