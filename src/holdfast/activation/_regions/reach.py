"""What a function reaches: the modules it calls, their parameters, buffers and modes. Knows how
to look without calling it; does not know what the function does with them.

Seen: a module, a bound method, a partial, closure cells, globals the code names, defaults,
arguments, and what lies in lists, dicts and attributes of the objects among these. Not seen: what
the code imports or looks up while it runs, and what lies too deep. Whoever needs that names it.
"""

import argparse
import functools
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn import Module
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

_PLAIN = (int, float, str, bytes, bool, type(None), type, types.ModuleType)
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_MOST_LOOKED_AT = 1000  # objects; a lambda over a trainer must not walk all that the trainer knows
_MOST_IN_A_CONTAINER = 256  # a longer list is data


class Parameter(NamedTuple):
    """A tensor that must not change between the forward and its replay, as it was found."""

    tensor: Any
    owner: Any  # the module's dict it was found in, or None
    key: str
    version: int
    storage: int
    requires_grad: bool


class Buffer(NamedTuple):
    owner: Any  # the module's dict it was found in
    key: str
    tensor: Any


class _Attributes:
    """A module's tensors by name, where its own dict cannot be written to."""

    def __init__(self, module: Any, names: Any) -> None:
        self._module = module
        self.items = names.items

    def get(self, key: str, default: Any = None) -> Any:
        return getattr(self._module, key, default)

    def __setitem__(self, key: str, value: Any) -> None:
        setattr(self._module, key, value)


class Reach:
    """What was found, in the order it was found."""

    __slots__ = ("buffers", "label", "modes", "parameters", "renormed", "roots")

    def __init__(self) -> None:
        self.label: str | None = None  # what the caller calls the first root
        self.roots: list[Any] = []
        self.parameters: list[Parameter] = []
        self.buffers: list[Buffer] = []
        self.modes: list[tuple[Any, bool]] = []
        self.renormed: list[int] = []

    def renew_own_doing(self) -> None:
        """Embeddings with ``max_norm`` scale rows of their weight in the forward. Doing that again
        changes nothing, so their weight is watched from after the forward on."""
        for index in self.renormed:
            item = self.parameters[index]
            self.parameters[index] = as_found(item.tensor, item.owner, item.key)

    def name_of(self, tensor: Any) -> str | None:
        """What a person would call this tensor."""
        for root in self.roots:
            for name, found in (*root.named_parameters(), *root.named_buffers()):
                if found is tensor:
                    return f"{self._called(root)}.{name}"
        return None

    def _called(self, root: Any) -> str:
        named = self.label is not None and root is self.roots[0]
        return self.label if named and self.label else type(root).__name__

    def newcomers(self) -> list[Parameter]:
        """Parameters of modules that were put into the roots since."""
        walked = {id(module) for module, _ in self.modes}
        known = len(walked)
        now = Reach()
        for root in self.roots:
            _walk_on(root, now, walked)
        return now.parameters if len(walked) > known else []

    def name_of_module(self, module: Any) -> str:
        for root in self.roots:
            for name, found in root.named_modules():
                if found is module:
                    return f"{self._called(root)}.{name}" if name else self._called(root)
        return type(module).__name__


_EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


def is_lazy(tensor: Any) -> bool:
    return isinstance(tensor, UninitializedTensorMixin)


def storage_of(tensor: Any) -> int:
    """The identity of the memory behind a tensor: it survives a resize (FSDP frees and fills the
    memory of a parameter between forward and backward), but not ``.data = other``. 0 where
    there is none to compare: wrapper subclasses such as DTensor, sparse tensors, and empty
    placeholders."""
    if tensor.__class__ in _PLAIN_TENSORS and tensor.layout is torch.strided and tensor.numel():
        try:
            cdata: int = tensor.untyped_storage()._cdata  # noqa: SLF001
        except (NotImplementedError, RuntimeError):  # an impl without storage, such as vmap's
            return 0
        return cdata
    return 0


def version_of(tensor: Any) -> int:
    """The tensor's version counter; tensors of inference mode have none."""
    version: int = 0 if tensor.is_inference() else tensor._version  # noqa: SLF001
    return version


def as_found(tensor: Any, owner: Any = None, key: str = "") -> Parameter:
    requires_grad = tensor.requires_grad
    if (
        requires_grad
        and tensor.__class__ is torch.nn.Parameter
        and tensor.layout is torch.strided
        and tensor.numel()
    ):
        # What almost all are: in no inference mode, dense, with memory.
        storage = tensor.untyped_storage()._cdata  # noqa: SLF001
        return _parameter((tensor, owner, key, tensor._version, storage, True))  # noqa: SLF001
    return Parameter(tensor, owner, key, version_of(tensor), storage_of(tensor), requires_grad)


_parameter = functools.partial(tuple.__new__, Parameter)  # half the time of Parameter()


def reach(fn: Any, arguments: Iterable[Any], modules: Iterable[Any]) -> Reach:
    """What ``fn`` called with ``arguments`` reaches, ``modules`` included."""
    found = Reach()
    walked: set[int] = set()
    tensors: set[int] = set()
    for item in _reachable(fn, arguments, modules):
        if isinstance(item, Module):
            if id(item) not in walked:
                found.roots.append(item)
                _walk(item, found, walked, tensors)
        elif id(item) not in tensors:
            tensors.add(id(item))
            found.parameters.append(as_found(item))
    return found


def _walk(module: Any, found: Reach, walked: set[int], tensors: set[int]) -> None:
    walked.add(id(module))
    found.modes.append((module, module.training))
    if module._parameters:  # noqa: SLF001
        _watch(_writable(module._parameters, module), found, tensors)  # noqa: SLF001
        if isinstance(module, _EMBEDDINGS) and module.max_norm is not None:
            found.renormed.append(len(found.parameters) - 1)
    owner = module.__dict__
    for key, value in owner.items():
        # A tensor that is no buffer, though it should be one. Not one with a history: that would
        # hold the graph.
        if value.__class__ is torch.Tensor and value.grad_fn is None and id(value) not in tensors:
            tensors.add(id(value))
            found.parameters.append(as_found(value, owner, key))
    if module._buffers:  # noqa: SLF001
        owner = _writable(module._buffers, module)  # noqa: SLF001
        found.buffers.extend(
            Buffer(owner, key, tensor) for key, tensor in owner.items() if not is_lazy(tensor)
        )
    for child in module._modules.values():  # noqa: SLF001
        if child is not None and id(child) not in walked:
            _walk(child, found, walked, tensors)


def _watch(owner: Any, found: Reach, tensors: set[int]) -> None:
    for key, tensor in owner.items():
        if tensor is not None and id(tensor) not in tensors and not is_lazy(tensor):
            tensors.add(id(tensor))
            found.parameters.append(as_found(tensor, owner, key))


def _writable(owner: Any, module: Any) -> Any:
    # A scripted module's dicts are views of C++.
    return owner if owner.__class__ is dict else _Attributes(module, owner)


def _walk_on(module: Any, found: Reach, walked: set[int]) -> None:
    """Walks only what was not walked before, wherever in the tree it is."""
    if id(module) not in walked:
        _walk(module, found, walked, set())
        return
    for child in module._modules.values():  # noqa: SLF001
        if child is not None:
            _walk_on(child, found, walked)


def _reachable(fn: Any, arguments: Iterable[Any], modules: Iterable[Any]) -> Iterator[Any]:
    """The modules, and the tensors outside modules, that ``fn`` can see; nearest first."""
    waiting: deque[Any] = deque((*modules, fn))
    # Of tensors only weights, which live anyway: an argument that was made is not to be held.
    waiting.extend(
        item
        for item in arguments
        if not isinstance(item, torch.Tensor) or (item.is_leaf and item.requires_grad)
    )
    seen: set[int] = set()
    while waiting and len(seen) < _MOST_LOOKED_AT:
        item = waiting.popleft()
        if isinstance(item, _PLAIN) or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Module | torch.Tensor):
            yield item
        else:
            waiting.extend(_seen_by(item))


def _seen_by(item: Any) -> Iterable[Any]:
    if isinstance(item, types.MethodType):
        return (item.__self__, *_closed_over(item.__func__))
    if isinstance(item, types.FunctionType):
        return () if _is_library(item.__module__) else (*_closed_over(item), *_globals(item))
    if isinstance(item, functools.partial):
        return (item.func, *item.args, *item.keywords.values())
    if isinstance(item, list | tuple | set | frozenset | deque | dict):
        inside = item.values() if isinstance(item, dict) else item
        return inside if len(inside) <= _MOST_IN_A_CONTAINER else ()
    if isinstance(item, _NAMESPACES) or not _is_library(type(item).__module__):
        return _attributes(item)
    return ()


def _closed_over(function: Any) -> Iterator[Any]:
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue
    yield from getattr(function, "__defaults__", None) or ()
    yield from (getattr(function, "__kwdefaults__", None) or {}).values()
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is not None:
        yield wrapped


def _globals(function: types.FunctionType) -> Iterator[Any]:
    """The globals the code names, without functions of other modules."""
    around = function.__globals__
    for name in function.__code__.co_names:
        value = around.get(name)
        if not isinstance(value, types.FunctionType) or value.__globals__ is around:
            yield value


def _attributes(item: Any) -> Iterator[Any]:
    yield from getattr(item, "__dict__", {}).values()
    for kind in type(item).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            value = getattr(item, name, None)
            if value is not None:
                yield value


@functools.lru_cache(maxsize=1024)
def _is_library(module: str | None) -> bool:
    root = (module or "builtins").partition(".")[0]
    return (root in sys.stdlib_module_names and root != "__main__") or root in {"torch", "numpy"}
