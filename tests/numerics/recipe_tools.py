"""What the tests of recipes share: calls whose saved tensors are dropped, tensors bit by bit."""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.activation._recipes.compiling import Item, items_of
from holdfast.activation._recipes.dropping import Dropping
from holdfast.activation._recipes.drops import Drops, drops_of
from holdfast.activation._recipes.graph import CallGraph, saved_handle, saved_names, saved_value

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@contextlib.contextmanager
def without_onednn():
    """Its bfloat16 kernels want AMX, which may be told of and then not be allowed."""
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(True)


def same(one, other):
    """Whether two tensors, or two of None, have the same bits, sizes and dtype."""
    if one is None or other is None:
        return one is other
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    one, other = one.detach(), other.detach()
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    if one.is_floating_point():
        integers = _INTEGERS[one.itemsize]
        one, other = one.view(integers), other.view(integers)
    return torch.equal(one, other)


def all_same(some, others):
    return len(some) == len(others) and all(map(same, some, others))


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    if isinstance(value, list | tuple | type({}.values())):
        return [tensor for each in value for tensor in tensors_in(each)]
    return []


def roots_of(output):
    roots = (each.grad_fn for each in tensors_in(output) if each.grad_fn is not None)
    return list(dict.fromkeys(roots))


def graph_of(output, inputs=()):
    above = [each.grad_fn for each in tensors_in(inputs) if each.grad_fn is not None]
    return CallGraph(roots_of(output), above)


@dataclass(frozen=True)
class Compiled:
    graph: CallGraph
    items: list[Item]
    drops: Drops

    def dropping(self, stage="stage"):
        return Dropping(stage, self.drops)


def compiled(output, inputs=(), alive=(), *, least_bytes=1):
    """All that can be dropped of the call that returned ``output``."""
    graph = graph_of(output, inputs)
    living = [*tensors_in(alive), *tensors_in(inputs), *tensors_in(output)]
    items = items_of(graph, living, least_bytes=least_bytes)
    return Compiled(graph, items, drops_of(graph, items))


def saved_in(graph: CallGraph) -> dict[tuple[int, str], Any]:
    """Every tensor that the nodes of a call saved, as their backward would get it."""
    found = {}
    for number, entry in enumerate(graph.nodes):
        for name in () if entry.foreign else saved_names(entry.node):
            handle = saved_handle(entry.node, name)
            if not isinstance(handle, tuple) and handle.data is not None:
                found[number, name] = saved_value(entry.node, name)
    return found


def loss_of(output):
    """Depends on every element in its own way, so that no gradient is the same as another."""
    total = 0.0
    for each in tensors_in(output):
        if each.grad_fn is None:
            continue
        parts = torch.view_as_real(each) if each.is_complex() else each
        weights = torch.linspace(0.5, 1.5, parts.numel(), dtype=parts.dtype).view(parts.shape)
        total = total + (parts * weights).sum()
    return total


def gradients(loss, leaves, **keywords):
    return torch.autograd.grad(loss, leaves, allow_unused=True, **keywords)
