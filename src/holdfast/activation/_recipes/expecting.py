"""What must be so in a graph for a drop to be right in it. Pure values, read from the graph of one
call.

Kinds alone do not tell: a call that took the other of two tensors of the same kind builds a graph
of the same kinds. So every edge that a program follows is compared, and every tensor that it takes
for the value of an edge, or that it makes, must still be that value.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from holdfast.activation._recipes.compiling import Item, Own
from holdfast.activation._recipes.graph import CallGraph, Edge, Place
from holdfast.activation._recipes.table import RECIPES


@dataclass(frozen=True, slots=True)
class Link:
    """Edge ``edge`` of a node leads to an output of node ``above``, or nowhere."""

    node: int
    edge: int
    above: int | None
    output: int


@dataclass(frozen=True, slots=True)
class Saved:
    """What a node saved under a name: an output of node ``made_by``, if that is to be compared; or
    nothing. It is taken from the node at a ``version``; without one it is only read there."""

    node: int
    name: str
    made_by: int | None = None
    output: int = 0
    version: int | None = None
    is_none: bool = False


@dataclass(frozen=True, slots=True)
class Expected:
    links: tuple[Link, ...] = ()
    saved: tuple[Saved, ...] = ()

    def nodes(self) -> set[int]:
        found = {each.node for each in self.links} | {each.node for each in self.saved}
        found |= {each.above for each in self.links if each.above is not None}
        return found | {each.made_by for each in self.saved if each.made_by is not None}

    def numbered(self, number: Callable[[int], int]) -> "Expected":
        """The same of nodes with other numbers."""

        def maybe(node: int | None) -> int | None:
            return None if node is None else number(node)

        return Expected(
            tuple(Link(number(e.node), e.edge, maybe(e.above), e.output) for e in self.links),
            tuple(
                Saved(number(e.node), e.name, maybe(e.made_by), e.output, e.version, e.is_none)
                for e in self.saved
            ),
        )


def together(several: Iterable[Expected]) -> Expected:
    """All of it, each once."""
    several = list(several)
    saved = dict.fromkeys(saved for each in several for saved in each.saved)
    compared = [each for each in saved if each.made_by is not None]
    said = {(each.node, each.name, each.version) for each in compared}
    said |= {(each.node, each.name, None) for each in compared}
    return Expected(
        tuple(dict.fromkeys(link for each in several for link in each.links)),
        tuple(
            each
            for each in saved
            if each.made_by is not None or (each.node, each.name, each.version) not in said
        ),
    )


def expected(graph: CallGraph, item: Item) -> Expected:
    """What dropping an item of a graph relies on."""
    links: list[Link] = []
    saved: list[Saved] = [
        _saved(graph, place, compared=True, version=item.version) for place in item.holders
    ]
    for step in item.steps:
        inputs = graph.nodes[step.node].inputs
        recipe = RECIPES[step.kind]
        for number, source in enumerate(step.sources):
            arg = None if recipe.variadic else recipe.args[number]
            edge = number if arg is None else arg.edge
            if isinstance(source, Own):
                tensor = graph.saved(source.place.node)[source.place.name]
                saved.append(_saved(graph, source.place, version=tensor._version))  # noqa: SLF001 -- its public name
                continue
            if isinstance(source, Place):
                is_own = source.node == step.node
                saved.append(_saved(graph, source, compared=not is_own))
                if is_own:
                    continue
            if edge is not None:
                links.append(_link(step.node, edge, inputs))
            if source is None and arg is not None and arg.saved is not None:
                saved.append(Saved(step.node, arg.saved, is_none=True))
    return Expected(tuple(links), tuple(saved))


def _link(node: int, edge: int, inputs: Sequence[Edge | None]) -> Link:
    leads_to = inputs[edge] if edge < len(inputs) else None
    if leads_to is None:
        return Link(node, edge, None, 0)
    return Link(node, edge, leads_to.node, leads_to.output)


def _saved(
    graph: CallGraph, place: Place, *, compared: bool = False, version: int | None = None
) -> Saved:
    made = graph.producer(graph.saved(place.node)[place.name]) if compared else None
    if made is None or made.node == place.node:  # its own result, which it saved without its node
        return Saved(place.node, place.name, version=version)
    return Saved(place.node, place.name, made.node, made.output, version)
