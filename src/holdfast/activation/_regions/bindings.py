"""What names meant to a function when it was called. Knows cells and globals, and how to give them
their old meaning for a while.

A lambda in a loop sees the loop's variable, which is another when backward comes:

    for layer in layers:
        h = checkpoint(lambda x: layer(x) * 2, h)
"""

import functools
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from holdfast.activation._regions.looking import global_names

_ABSENT = object()


class Binding(NamedTuple):
    """A cell, or a name among globals, and what it held."""

    place: Any
    name: str
    value: Any


def bindings(fn: Any) -> list[Binding]:
    """Of the function itself, not of those it calls. Tensors with a history are taken from cells,
    which belong to the function, but not from globals, which belong to everybody."""
    found: list[Binding] = []
    while isinstance(fn, functools.partial | types.MethodType):
        fn = fn.func if isinstance(fn, functools.partial) else fn.__func__
    while isinstance(fn, types.FunctionType):
        for cell in fn.__closure__ or ():
            value = _content(cell)
            if value is not _ABSENT:
                found.append(Binding(cell, "", value))
        around = fn.__globals__
        for name in global_names(fn.__code__):
            value = around.get(name, _ABSENT)
            if value is not _ABSENT and not _has_history(value):
                found.append(Binding(around, name, value))
        fn = getattr(fn, "__wrapped__", None)
    return found


@contextmanager
def bound(then: Sequence[Binding]) -> Iterator[None]:
    """Within, every name means what it meant then."""
    rebound = [each for each in then if _now(each) is not each.value]
    before = [(each, _now(each)) for each in rebound]
    try:
        for each in rebound:
            _bind(each, each.value)
        yield
    finally:
        for each, value in before:
            _bind(each, value)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return _ABSENT


def _now(binding: Binding) -> Any:
    if isinstance(binding.place, dict):
        return binding.place.get(binding.name, _ABSENT)
    return _content(binding.place)


def _bind(binding: Binding, value: Any) -> None:
    place = binding.place
    if not isinstance(place, dict):
        if value is _ABSENT:
            del place.cell_contents
        else:
            place.cell_contents = value
    elif value is _ABSENT:
        place.pop(binding.name, None)
    else:
        place[binding.name] = value


def _has_history(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is not None
