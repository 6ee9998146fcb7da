"""Whether the graph of a call is one that drops were made for, and what of it matters. Knows how
drops are found; runs nothing.

This is done after every forward of a stage, when neither code nor graph is in the processor's
caches: all that is known beforehand is worked out beforehand, and each thing is asked for once.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from holdfast.activation._recipes.drops import Drops
from holdfast.activation._recipes.expecting import Link, Saved, together
from holdfast.activation._recipes.graph import RAW, SAVED, Place, names_of

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_NOWHERE = (None, 0)


class Found(NamedTuple):
    """The nodes of a graph that matter, torch's handles of the saved tensors that can be taken from
    them, and the tensors in these."""

    nodes: list[Any]
    handles: list[Any]
    tensors: list[Any]


class Following:
    """Finds in any graph what some drops are about. Immutable.

    ``taken`` numbers the handles and tensors of what is found."""

    __slots__ = ("_links", "_read", "_roots", "_taken", "_ways", "taken")

    def __init__(self, drops: Drops) -> None:
        expected = together(drop.expects for drop in drops.drops)
        links = {(each.node, each.edge, each.above): each for each in expected.links}
        self._roots = [names_of(kind) for kind in drops.roots]
        self._ways: list[tuple[int, int, Any]] = []
        count = len(drops.roots)
        for way in drops.ways:
            edges = []
            for edge, kind in way.edges:
                # An edge leads to the node that is found by it: what is left to see is the output.
                link = links.pop((way.start, edge, count), None)
                edges.append((edge, names_of(kind), None if link is None else link.output))
                count += 1
            self._ways.append((way.start, max(edge for edge, _ in way.edges), tuple(edges)))
        self._links: list[Link] = list(links.values())
        taken = [each for each in expected.saved if each.version is not None]
        read = [each for each in expected.saved if each.version is None]
        self.taken = {Place(each.node, each.name): number for number, each in enumerate(taken)}
        self._taken = [_flat(RAW, each) for each in taken]
        self._read = [_flat(SAVED, each) for each in read]

    def find(self, roots: Sequence[Any]) -> Found | None:
        """What is to be found in the graph whose outputs have ``roots`` for nodes, or ``None`` if
        the drops would not be right in it."""
        nodes = self._walk(roots)
        if nodes is None:
            return None
        handles, tensors = [], []
        for number, name, made_by, output, version in self._taken:
            handle = getattr(nodes[number], name)
            tensor = handle.data
            if type(tensor) not in _PLAIN or handle.unpack_hook is not None:
                return None
            if tensor._version != version:  # noqa: SLF001 -- its public name
                return None
            if made_by is not None and (
                tensor.grad_fn is not nodes[made_by] or tensor.output_nr != output
            ):
                return None
            handles.append(handle)
            tensors.append(tensor)
        return Found(nodes, handles, tensors) if self._can_be_read(nodes) else None

    def _walk(self, roots: Sequence[Any]) -> list[Any] | None:
        if len(roots) != len(self._roots):
            return None
        for node, names in zip(roots, self._roots, strict=True):
            if node.name() not in names:
                return None
        nodes = list(roots)
        for start, last, edges in self._ways:
            following = nodes[start].next_functions
            if last >= len(following):
                return None
            for edge, names, wanted in edges:
                node, output = following[edge]
                if node is None or node.name() not in names:
                    return None
                if wanted is not None and wanted != output:
                    return None
                nodes.append(node)
        return nodes if all(_leads(link, nodes) for link in self._links) else None

    def _can_be_read(self, nodes: list[Any]) -> bool:
        for number, name, made_by, output, is_none in self._read:
            try:
                tensor = getattr(nodes[number], name)
            except RuntimeError:  # torch's word for a change in place: backward will refuse it too
                return False
            if (tensor is None) != is_none:
                return False
            if made_by is not None and (
                tensor.grad_fn is not nodes[made_by] or tensor.output_nr != output
            ):
                return False
        return True


def _flat(prefix: str, saved: Saved) -> tuple[int, str, int | None, int, Any]:
    last = saved.is_none if saved.version is None else saved.version
    return saved.node, prefix + saved.name, saved.made_by, saved.output, last


def _leads(link: Link, nodes: list[Any]) -> bool:
    edges = nodes[link.node].next_functions
    node, output = edges[link.edge] if link.edge < len(edges) else _NOWHERE
    if link.above is None:
        return node is None
    return node is nodes[link.above] and bool(output == link.output)
