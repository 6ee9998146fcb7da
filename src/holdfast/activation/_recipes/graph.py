"""The autograd graph of one call, read from its outputs. Knows nodes, their edges and what they
saved; nothing of how anything is made again.

Nodes are numbered as they are met, depth first, so two calls that do the same number theirs alike.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

LEAF = "torch::autograd::AccumulateGrad"
_VIEW, _RESHAPE = "ViewBackward0", "ReshapeAliasBackward0"
RAW = "_raw_saved_"  # before a saved tensor's name: torch's handle of it, which takes hooks
SAVED = "_saved_"  # the tensor itself, as the node's backward would get it


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor saved in the graph: by which node, and under which name."""

    node: int
    name: str


@dataclass(frozen=True, slots=True)
class Edge:
    """One output of a node: what an operation returned."""

    node: int
    output: int


@dataclass(slots=True)
class GraphNode:
    """One operation of the call. ``foreign``: it belongs to what the call was given."""

    node: Any
    kind: str
    reached_from: tuple[int, int] | None  # another node and the number of its edge; None for a root
    foreign: bool
    inputs: tuple[Edge | None, ...] = ()
    above: int = 0  # the nodes that come before this one in a forward, as bits


class CallGraph:
    """What hangs on ``roots``, the nodes of a call's outputs, up to those of its inputs."""

    def __init__(self, roots: Sequence[Any], inputs: Iterable[Any]) -> None:
        self.nodes: list[GraphNode] = []
        self._numbers: dict[Any, int] = {}
        foreign = set(inputs)
        self.roots = [self._enter(root, None, foreign) for root in roots]

    def saved(self, number: int) -> dict[str, Any]:
        """The tensors a node saved, by name. Not those of Python's own autograd functions, not what
        somebody's hooks have packed, and not what was changed in place since, which torch refuses
        to give out in backward too."""
        node = self.nodes[number].node
        found = {}
        for name in saved_names(node):
            handle = saved_handle(node, name)
            if isinstance(handle, tuple) or handle.data is None or handle.unpack_hook is not None:
                continue
            try:
                found[name] = saved_value(node, name)
            except RuntimeError:  # torch's word for a change in place
                continue
        return found

    def is_none(self, number: int, name: str) -> bool:
        """Whether a node saved nothing under a name that its kind has."""
        handle = getattr(self.nodes[number].node, RAW + name, None)
        return handle is not None and handle.data is None

    def producer(self, tensor: Any) -> Edge | None:
        """Which output of which node a tensor is, if that is in the graph."""
        number = self._numbers.get(tensor.grad_fn)
        return None if number is None else Edge(number, tensor.output_nr)

    def is_above(self, number: int, other: int) -> bool:
        """Whether ``number`` comes before ``other`` in a forward, so that ``other`` may own it."""
        return bool(self.nodes[other].above >> number & 1)

    def _enter(self, node: Any, reached_from: tuple[int, int] | None, foreign: set[Any]) -> int:
        """Number ``node`` and all above it; without recursion, for graphs are deep."""
        known = self._numbers.get(node)
        if known is not None:
            return known
        first = self._add(node, reached_from, foreign)
        stack = [(first, iter(self._next(first)))]
        edges: dict[int, list[Edge | None]] = {first: []}
        while stack:
            number, waiting = stack[-1]
            for place, (above, output) in waiting:
                if above is None:
                    edges[number].append(None)
                    continue
                seen = self._numbers.get(above)
                met = self._add(above, (number, place), foreign) if seen is None else seen
                edges[number].append(Edge(met, output))
                if seen is None:
                    edges[met] = []
                    stack.append((met, iter(self._next(met))))
                    break
            else:
                stack.pop()
                self._finish(number, edges.pop(number))
        return first

    def _next(self, number: int) -> list[tuple[int, Any]]:
        entry = self.nodes[number]
        return [] if entry.foreign else list(enumerate(entry.node.next_functions))

    def _add(self, node: Any, reached_from: tuple[int, int] | None, foreign: set[Any]) -> int:
        number = len(self.nodes)
        self._numbers[node] = number
        self.nodes.append(GraphNode(node, kind_of(node), reached_from, node in foreign))
        return number

    def _finish(self, number: int, inputs: list[Edge | None]) -> None:
        entry = self.nodes[number]
        entry.inputs = tuple(inputs)
        for edge in inputs:
            if edge is not None:
                entry.above |= 1 << edge.node | self.nodes[edge.node].above


def kind_of(node: Any) -> str:
    """Which operation a node is of. Torch runs a reshape as one operation or another, depending on
    whether somebody watches with a dispatch mode: a graph that was measured is the same without."""
    name: str = node.name()
    return _VIEW if name == _RESHAPE else name


def names_of(kind: str) -> tuple[str, ...]:
    """What torch calls nodes of a kind."""
    return (_VIEW, _RESHAPE) if kind == _VIEW else (kind,)


def saved_names(node: Any) -> tuple[str, ...]:
    """The names under which nodes of this kind save tensors, one each."""
    return _saved_names(node.__class__)


@functools.cache
def _saved_names(kind: Any) -> tuple[str, ...]:
    if issubclass(kind, torch.autograd.function.BackwardCFunction):
        return ()
    found = [each.removeprefix(RAW) for each in dir(kind) if each.startswith(RAW)]
    return tuple(name for name in found if name != "tensors")


def saved_value(node: Any, name: str) -> Any:
    """A tensor as the node's own backward would get it: a change in place since is refused."""
    return getattr(node, SAVED + name)


def saved_handle(node: Any, name: str) -> Any:
    """Torch's handle of a saved tensor, which takes hooks."""
    return getattr(node, RAW + name)
