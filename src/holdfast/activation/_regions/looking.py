"""What a function can see: modules and tensors, by looking at it without calling it. Knows cells,
globals, partials, methods and attributes; not what is done with what it finds.

Not seen: what the code imports or looks up while it runs, and what lies too deep. Whoever needs
that names it.
"""

import argparse
import dis
import functools
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn import Module

_PLAIN = (int, float, str, bytes, bool, type(None), type, types.ModuleType)
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_MOST_LOOKED_AT = 1000  # objects; a lambda over a trainer must not walk all that the trainer knows
_MOST_IN_A_CONTAINER = 256  # a longer list is data


def seen(fn: Any, arguments: Iterable[Any], modules: Iterable[Any]) -> Iterator[Any]:
    """The modules, and the tensors outside modules, that ``fn`` can see; nearest first. Of tensors
    only leaves: one with a history would keep alive the graph it is in."""
    waiting: deque[Any] = deque((*modules, fn))
    # Of arguments only weights, which live anyway: what was made is not to be held.
    waiting.extend(
        item
        for item in arguments
        if not isinstance(item, torch.Tensor) or (item.is_leaf and item.requires_grad)
    )
    looked_at: set[int] = set()
    while waiting and len(looked_at) < _MOST_LOOKED_AT:
        item = waiting.popleft()
        if isinstance(item, _PLAIN) or id(item) in looked_at:
            continue
        looked_at.add(id(item))
        if isinstance(item, Module):
            yield item
        elif isinstance(item, torch.Tensor):
            if item.is_leaf:
                yield item
        else:
            waiting.extend(_seen_by(item))


def modules_in(attributes: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Modules in plain lists among a module's attributes, which torch does not know, with the
    name of the list."""
    for key, value in tuple(attributes.items()):
        if isinstance(value, list | tuple) and len(value) <= _MOST_IN_A_CONTAINER:
            yield from ((key, item) for item in tuple(value) if isinstance(item, Module))


def _seen_by(item: Any) -> Iterable[Any]:
    if isinstance(item, types.MethodType):
        return (item.__self__, *_seen_by(item.__func__))
    if isinstance(item, types.FunctionType):
        return () if _is_library(item.__module__) else (*_closed_over(item), *_globals(item))
    if isinstance(item, functools.partial):
        return (item.func, *item.args, *item.keywords.values())
    if isinstance(item, list | tuple | set | frozenset | deque | dict):
        inside = tuple(item.values() if isinstance(item, dict) else item)
        many = len(inside) > _MOST_IN_A_CONTAINER and not isinstance(inside[0], Module)
        return () if many else inside
    if isinstance(item, _NAMESPACES) or not _is_library(type(item).__module__):
        call = type(item).__dict__.get("__call__")
        return _attributes(item) if call is None else (*_attributes(item), call)
    return ()


def _closed_over(function: Any) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is not None:
        yield wrapped


def _globals(function: types.FunctionType) -> Iterator[Any]:
    """The globals the code names, without functions of other modules."""
    around = function.__globals__
    for name in global_names(function.__code__):
        value = around.get(name)
        if not isinstance(value, types.FunctionType) or value.__globals__ is around:
            yield value


@functools.lru_cache(maxsize=4096)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """The globals that this code, and code written inside it, may load."""
    names = {
        str(each.argval)
        for each in dis.get_instructions(code)
        if each.opname in {"LOAD_GLOBAL", "LOAD_NAME"}
    }
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            names.update(global_names(inner))
    return tuple(sorted(names))


def _attributes(item: Any) -> Iterator[Any]:
    yield from tuple(getattr(item, "__dict__", {}).values())
    for kind in type(item).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            value = getattr(item, name, None)
            if value is not None:
                yield value


@functools.lru_cache(maxsize=1024)
def _is_library(module: str | None) -> bool:
    root = (module or "builtins").partition(".")[0]
    return root in {"torch", "numpy"} or (root in sys.stdlib_module_names and root != "__main__")
