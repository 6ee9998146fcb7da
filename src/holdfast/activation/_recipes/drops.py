"""A choice of saved tensors to drop from the graph of a stage, whichever call built it. Pure
values, which go through JSON: a plan may be applied in another process.

The nodes that matter are found by the way that leads to them from the outputs, and their kinds
compared on the way.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from holdfast.activation._recipes.compiling import Item, Own, Result, Variable
from holdfast.activation._recipes.compiling import Source as Found
from holdfast.activation._recipes.expecting import Expected, expected
from holdfast.activation._recipes.graph import CallGraph, Place

_OF_NODES = {"saved", "held", "leaf"}  # the sources whose number is a node's


@dataclass(frozen=True, slots=True)
class Way:
    """From one node known already to others: edge by edge, with the kinds to be found there. They
    are numbered on from the last node known."""

    start: int
    edges: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class Source:
    """Where an operation's tensor comes from: what node ``number`` saved under ``name``, the same
    but held without its node, the leaf of node ``number``, what step ``number`` returned (and which
    of it), or nowhere: it had none."""

    kind: Literal["saved", "held", "leaf", "result", "nothing"]
    number: int = 0
    name: str = ""
    output: int | None = None


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation to run again: its node's kind, its node, its tensors, and the setting that was
    found because the node lacks it."""

    kind: str
    node: int
    sources: tuple[Source, ...]
    found: float | None = None


@dataclass(frozen=True, slots=True)
class Drop:
    """One storage: who holds it, how it is made again and which of the results each holder gets,
    the leaves that must not change meanwhile, what must be so in a graph for that, and how often
    backward asks for it."""

    label: str
    size_bytes: int
    holders: tuple[Place, ...]
    operations: tuple[Operation, ...]
    results: tuple[Source, ...]
    watched: tuple[int, ...]
    expects: Expected
    reads: int


@dataclass(frozen=True, slots=True)
class Drops:
    """What is dropped of one stage, and how it is found: from the nodes of its outputs, whose
    kinds are ``roots``."""

    roots: tuple[str, ...]
    ways: tuple[Way, ...]
    drops: tuple[Drop, ...]


def drops_of(graph: CallGraph, items: Sequence[Item]) -> Drops:
    """``items`` of a graph, as they are found in any graph that is built alike."""
    expecting = [expected(graph, item) for item in items]
    numbers, ways = _ways(graph, _needed(items, expecting))
    drops = tuple(
        Drop(
            label=item.label,
            size_bytes=item.size_bytes,
            holders=tuple(Place(numbers[place.node], place.name) for place in item.holders),
            operations=tuple(
                Operation(
                    step.kind,
                    numbers[step.node],
                    tuple(_source(each, numbers) for each in step.sources),
                    step.found,
                )
                for step in item.steps
            ),
            results=tuple(_source(each, numbers) for each in item.results),
            watched=tuple(numbers[each.node] for each in item.watched),
            expects=expects.numbered(numbers.__getitem__),
            reads=0,
        )
        for item, expects in zip(items, expecting, strict=True)
    )
    roots = tuple(graph.nodes[root].kind for root in graph.roots)
    return _counted(Drops(roots=roots, ways=tuple(ways), drops=drops))


def chosen(drops: Drops, numbers: Iterable[int]) -> Drops:
    """Only those of ``drops`` that ``numbers`` name, and only the ways that lead to them."""
    kept = tuple(drops.drops[number] for number in sorted(numbers))
    needed = set().union(*map(_nodes_of, kept))
    came_from: dict[int, tuple[int, int, str]] = {}
    count = len(drops.roots)
    for way in drops.ways:
        for edge, kind in way.edges:
            came_from[count] = (way.start, edge, kind)
            count += 1
    for number in tuple(needed):
        while number in came_from and came_from[number][0] not in needed:
            number = came_from[number][0]  # noqa: PLW2901 -- up the way
            needed.add(number)
    renumbered = {root: root for root in range(len(drops.roots))}
    ways: list[Way] = []
    for way in drops.ways:
        following = []
        for number, (start, edge, kind) in came_from.items():
            if start == way.start and number in needed:
                following.append((number, edge, kind))
        if following:
            ways.append(
                Way(
                    renumbered[way.start],
                    tuple((edge, kind) for _, edge, kind in following),
                )
            )
            for number, _, _ in following:
                renumbered[number] = len(renumbered)
    return _counted(
        Drops(
            roots=drops.roots,
            ways=tuple(ways),
            drops=tuple(_renumbered(drop, renumbered) for drop in kept),
        )
    )


def _nodes_of(drop: Drop) -> set[int]:
    """The nodes that a drop is about."""
    found = drop.expects.nodes() | {place.node for place in drop.holders} | set(drop.watched)
    for operation in drop.operations:
        found.add(operation.node)
        found.update(each.number for each in operation.sources if each.kind in _OF_NODES)
    return found


def _renumbered(drop: Drop, numbers: dict[int, int]) -> Drop:
    def source(each: Source) -> Source:
        if each.kind in _OF_NODES:
            return replace(each, number=numbers[each.number])
        return each

    return replace(
        drop,
        holders=tuple(Place(numbers[place.node], place.name) for place in drop.holders),
        operations=tuple(
            replace(each, node=numbers[each.node], sources=tuple(map(source, each.sources)))
            for each in drop.operations
        ),
        watched=tuple(numbers[each] for each in drop.watched),
        expects=drop.expects.numbered(numbers.__getitem__),
    )


def _counted(drops: Drops) -> Drops:
    """With how often backward asks for each: its holders once, and whatever is made from them."""
    reads = Counter(
        Place(source.number, source.name)
        for drop in drops.drops
        for operation in drop.operations
        for source in operation.sources
        if source.kind in {"saved", "held"}
    )
    return replace(
        drops,
        drops=tuple(
            replace(drop, reads=len(drop.holders) + sum(reads[place] for place in drop.holders))
            for drop in drops.drops
        ),
    )


def _source(found: Found, numbers: dict[int, int]) -> Source:
    match found:
        case Place(node, name):
            return Source("saved", numbers[node], name)
        case Own(Place(node, name)):
            return Source("held", numbers[node], name)
        case Variable(node):
            return Source("leaf", numbers[node])
        case Result(step, output):
            return Source("result", step, "", output)
        case None:
            return Source("nothing")


def _needed(items: Iterable[Item], expecting: Iterable[Expected]) -> set[int]:
    found: set[int] = set()
    for item in items:
        found.update(place.node for place in item.holders)
        found.update(leaf.node for leaf in item.watched)
        for step in item.steps:
            found.add(step.node)
            found.update(
                source.node for source in step.sources if isinstance(source, Place | Variable)
            )
    return found.union(*(each.nodes() for each in expecting))


def _ways(graph: CallGraph, needed: set[int]) -> tuple[dict[int, int], list[Way]]:
    """Ways to all ``needed`` nodes and to those that lie on them, and how they number the nodes."""
    wanted = set(needed)
    for number in needed:
        reached = graph.nodes[number].reached_from
        while reached is not None and reached[0] not in wanted:
            wanted.add(reached[0])
            reached = graph.nodes[reached[0]].reached_from
    numbers = {root: place for place, root in reversed(list(enumerate(graph.roots)))}
    edges: dict[int, list[tuple[int, int]]] = {}
    for number in sorted(wanted):
        reached = graph.nodes[number].reached_from
        if reached is not None and number not in numbers:
            edges.setdefault(reached[0], []).append((reached[1], number))
    count = len(graph.roots)
    ways = []
    waiting = list(dict.fromkeys(graph.roots))
    while waiting:
        start = waiting.pop()
        following = edges.get(start, ())
        for _, number in following:
            numbers[number] = count
            count += 1
        if following:
            kinds = tuple((edge, graph.nodes[number].kind) for edge, number in following)
            ways.append(Way(numbers[start], kinds))
        waiting.extend(number for _, number in following)
    return numbers, ways
