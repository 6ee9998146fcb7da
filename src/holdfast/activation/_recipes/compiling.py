"""Which saved tensors of a call can be dropped, and how each is made again. Pure, given the graph:
reads it, changes nothing.

One item is one storage: all that the graph saved of it is dropped together or not at all. Its
program runs the operation that made the storage, and the views of it that were saved, from tensors
that other nodes saved, through operations whose results nobody saved. Those nodes come before every
holder of the item in the forward. So a holder may own them: nothing is kept alive in a circle, and
in backward they are still there.

A tensor that was written to in place is dropped only if its operations can account for every write:
one that autograd was not told of would not be made again.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.activation._recipes.bits import two_values
from holdfast.activation._recipes.graph import LEAF, CallGraph, Edge, Place
from holdfast.activation._recipes.recipe import Arg, Recipe
from holdfast.activation._recipes.seeing import Seen
from holdfast.activation._recipes.table import RECIPES

LEAST_BYTES = 4096  # a tensor smaller than this costs more to drop than to keep
_DEEPEST = 64


@dataclass(frozen=True, slots=True)
class Variable:
    """A leaf of the graph, by its node: a parameter."""

    node: int


@dataclass(frozen=True, slots=True)
class Own:
    """What the node that made the item's memory saved itself. The tensor is held, not the node:
    that may hold the item, and would hold itself."""

    place: Place


@dataclass(frozen=True, slots=True)
class Result:
    """What an earlier step of the program returned."""

    step: int
    output: int | None  # which of several


Source = Place | Variable | Own | Result | None


@dataclass(frozen=True, slots=True)
class Step:
    """One operation to run: by its node's kind, with settings from that node. ``found`` is the one
    the node lacks, if its recipe has such."""

    kind: str
    node: int
    sources: tuple[Source, ...]
    found: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One storage that autograd holds, and how it is made again: ``results`` are what the steps
    make for each of its holders. There are none for a mask, which is not made again but packed: it
    has two values, 0 and another.

    ``watched`` are the parameters whose memory the steps read, ``version`` how often the storage
    was written to in place."""

    holders: tuple[Place, ...]
    results: tuple[Result, ...]
    steps: tuple[Step, ...]
    watched: tuple[Variable, ...]
    version: int
    size_bytes: int
    freed_bytes: int
    label: str


@dataclass(slots=True)
class _Storage:
    size_bytes: int
    holders: dict[Place, Any] = field(default_factory=dict)


def items_of(
    graph: CallGraph, alive: Iterable[Any], *, least_bytes: int = LEAST_BYTES
) -> list[Item]:
    """What can be dropped of the graph's saved tensors, if it is not too small. ``alive``: tensors
    whose memory stays anyway, as parameters, inputs and outputs of the call."""
    living = {_key(each) for each in alive}
    storages: dict[int, _Storage] = {}
    seen = Seen(graph)
    for place, tensor in seen.tensors.items():
        key = _key(tensor)
        if key and key not in living:
            nbytes = tensor.untyped_storage().nbytes()
            storages.setdefault(key, _Storage(nbytes)).holders[place] = tensor
    items = (
        _item(seen, storage) for storage in storages.values() if storage.size_bytes >= least_bytes
    )
    return [item for item in items if item is not None]


def _key(tensor: Any) -> int:
    """The identity of a tensor's memory; 0 if it is not a plain tensor."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return 0
    cdata: int = tensor.untyped_storage()._cdata  # noqa: SLF001 -- the identity of a storage
    return cdata


def _item(seen: Seen, storage: _Storage) -> Item | None:
    made = [seen.producer(place) for place in storage.holders]
    if all(edge is None for edge in made):
        return _mask(storage)
    edges = [edge for edge in made if edge is not None]
    bases = {seen.base(edge) for edge in edges}
    versions = {tensor._version for tensor in storage.holders.values()}  # noqa: SLF001 -- its public name
    if len(edges) != len(made) or len(bases) != 1 or len(versions) != 1:
        return None
    base, version = bases.pop(), versions.pop()
    if version > seen.writes(base):
        return None
    program = _Program(seen, frozenset(storage.holders), base)
    results = [program.make(edge, depth=0, is_base=True) for edge in edges]
    if None in results:
        return None
    return Item(
        holders=tuple(storage.holders),
        results=tuple(each for each in results if each is not None),
        steps=tuple(program.steps),
        watched=tuple(map(Variable, sorted(program.leaves))),
        version=version,
        size_bytes=storage.size_bytes,
        freed_bytes=storage.size_bytes,
        label=_label(seen.graph.nodes[base.node].kind),
    )


def _mask(storage: _Storage) -> Item | None:
    """Noise such as dropout's: no gradient, and two values."""
    first, *others = storage.holders.values()
    if not first.dtype.is_floating_point or first.numel() * first.itemsize != storage.size_bytes:
        return None
    if any(each.size() != first.size() or each.stride() != first.stride() for each in others):
        return None
    if first.grad_fn is not None or first.requires_grad or two_values(first) is None:
        return None
    return Item(
        holders=tuple(storage.holders),
        results=(),
        steps=(),
        watched=(),
        version=first._version,  # noqa: SLF001 -- its public name
        size_bytes=storage.size_bytes,
        freed_bytes=storage.size_bytes - first.numel(),
        label="mask",
    )


def _settings(recipe: Recipe, node: Any) -> tuple[bool, float | None]:
    """Whether a node tells enough to run its operation again, and what was found besides."""
    try:
        if recipe.settings(node) is None:
            return False, None
        found = None if recipe.found is None else recipe.found(node)
    except AttributeError:  # another torch, whose node names it otherwise
        return False, None
    return recipe.found is None or found is not None, found


def _label(kind: str) -> str:
    return kind.partition("Backward")[0]


class _Program:
    """The steps that make what ``holders`` hold of the memory of ``base``, from what lies above all
    of them."""

    def __init__(self, seen: Seen, holders: frozenset[Place], base: Edge) -> None:
        self.steps: list[Step] = []
        self.leaves: set[int] = set()
        self._seen = seen
        self._graph = seen.graph
        self._holders = holders
        self._base = base
        self._made: dict[int, int] = {}

    def make(self, edge: Edge, depth: int, *, is_base: bool = False) -> Result | None:
        """Add the steps that make ``edge``; ``None`` if that cannot be done. ``is_base``: it has
        the memory that is to be restored."""
        entry = self._graph.nodes[edge.node]
        recipe = RECIPES.get(entry.kind)
        if recipe is None or entry.foreign or depth > _DEEPEST:
            return None
        if (recipe.base_only and not is_base) or (edge.output and not recipe.outputs):
            return None
        step = self._made.get(edge.node)
        if step is None:
            is_told, found = _settings(recipe, entry.node)
            if not is_told:
                return None
            # Only reshape makes an unsafe view, of a copy that is contiguous, as the recipe's is.
            is_base = recipe.is_view and (is_base or entry.kind == "UnsafeViewBackward0")
            sources = self._sources(edge.node, recipe, depth, is_base=is_base)
            if sources is None:
                return None
            step = self._made[edge.node] = len(self.steps)
            self.steps.append(Step(entry.kind, edge.node, sources, found))
        return Result(step, edge.output if recipe.outputs else None)

    def _sources(
        self, number: int, recipe: Recipe, depth: int, *, is_base: bool
    ) -> tuple[Source, ...] | None:
        entry = self._graph.nodes[number]
        args = recipe.args
        if recipe.variadic:
            args = tuple(Arg(None, place) for place in range(len(entry.inputs)))
        found: list[Source] = []
        for arg in args:
            edge = None
            if arg.edge is not None and arg.edge < len(entry.inputs):
                edge = entry.inputs[arg.edge]
            source = self._source(number, arg, edge, depth, is_base=is_base)
            if source is None and not (arg.optional and self._was_absent(number, arg, edge)):
                return None
            found.append(source)
            if isinstance(source, Place | Own) and edge is not None:
                self._watch(edge)
        return tuple(found)

    def _source(
        self, number: int, arg: Arg, edge: Edge | None, depth: int, *, is_base: bool
    ) -> Source:
        place = None if arg.saved is None else Place(number, arg.saved)
        if place is not None and place in self._seen.tensors:
            if self._may_read(place):
                return place
            if number == self._base.node and place not in self._holders:
                return Own(place)
        return None if edge is None else self._value(edge, depth, is_base=is_base)

    def _was_absent(self, number: int, arg: Arg, edge: Edge | None) -> bool:
        return edge is None and (arg.saved is None or self._graph.is_none(number, arg.saved))

    def _value(self, edge: Edge, depth: int, *, is_base: bool) -> Source:
        if self._graph.nodes[edge.node].kind == LEAF:
            self.leaves.add(edge.node)
            return Variable(edge.node)
        for place in self._seen.by_value.get(edge, ()):
            if self._may_read(place):
                return place
        return self.make(edge, depth + 1, is_base=is_base)

    def _watch(self, edge: Edge) -> None:
        base = self._seen.base(edge)
        if self._graph.nodes[base.node].kind == LEAF:
            self.leaves.add(base.node)

    def _may_read(self, place: Place) -> bool:
        return place not in self._holders and all(
            self._graph.is_above(place.node, holder.node) for holder in self._holders
        )
