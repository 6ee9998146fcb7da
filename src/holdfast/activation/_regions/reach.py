"""What a function reaches: the modules it calls, their parameters, buffers and modes. Knows
modules and what is in them; ``looking`` knows how they are found.
"""

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.nn import Module
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from holdfast.activation._regions.found import UNWATCHED, Buffer, Parameter, as_found, storage_of
from holdfast.activation._regions.looking import modules_in, seen


class _Attributes:
    """A module's tensors by name, where its own dict cannot be written to."""

    def __init__(self, module: Any, names: Any) -> None:
        self._module = module
        self.items = names.items

    def get(self, key: str, default: Any = None) -> Any:
        return getattr(self._module, key, default)

    def __setitem__(self, key: str, value: Any) -> None:
        setattr(self._module, key, value)


class Mode(NamedTuple):
    """What a module was in: training or not, with which children."""

    module: Any
    training: bool
    children: tuple[tuple[str, Any], ...]


_mode = functools.partial(tuple.__new__, Mode)  # half the time of Mode()


def _is_torchs(module: Any) -> bool:
    """Whether a module is of a class whose attributes hide nothing."""
    name: str = type(module).__module__
    return name.startswith("torch.nn.modules.")


def _children(module: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(module._modules.items())  # noqa: SLF001


def _put(module: Any, children: tuple[tuple[str, Any], ...]) -> None:
    module._modules.clear()  # noqa: SLF001
    module._modules.update(children)  # noqa: SLF001


class Reach:
    """What was found, in the order it was found."""

    __slots__ = ("attributes", "buffers", "label", "modes", "parameters", "renormed", "roots")

    def __init__(self) -> None:
        self.label: str | None = None  # what the caller calls the first root
        self.roots: list[Any] = []
        self.parameters: list[Parameter] = []
        self.attributes: list[Parameter] = []
        self.buffers: list[Buffer] = []
        self.modes: list[Mode] = []
        self.renormed: list[Any] = []

    def renew_own_doing(self) -> None:
        """Embeddings with ``max_norm`` scale rows of their weight in the forward. Doing that again
        changes nothing, so their version counter is not looked at."""
        for tensor in self.renormed:
            for index, item in enumerate(self.parameters):
                if item.tensor is tensor:
                    self.parameters[index] = item._replace(version=UNWATCHED)

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

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Within, each module trains or evaluates as it did when it was found, and has the
        children it had."""
        flipped = [each for each in self.modes if each.module.training != each.training]
        moved = [each for each in self.modes if _children(each.module) != each.children]
        now = [(each.module, _children(each.module)) for each in moved]
        try:
            for each in flipped:
                each.module.training = each.training
            for each in moved:
                _put(each.module, each.children)
            yield
        finally:
            for each in flipped:
                each.module.training = not each.training
            for module, children in now:
                _put(module, children)

    def name_of_module(self, module: Any) -> str:
        for root in self.roots:
            for name, found in root.named_modules():
                if found is module:
                    return f"{self._called(root)}.{name}" if name else self._called(root)
        return type(module).__name__


_EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)
_TELLING = frozenset({torch.Tensor, list, tuple})  # what attributes may hide tensors or modules


def is_lazy(tensor: Any) -> bool:
    return isinstance(tensor, UninitializedTensorMixin)


def reach(fn: Any, arguments: Iterable[Any], modules: Iterable[Any]) -> Reach:
    """What ``fn`` called with ``arguments`` reaches, ``modules`` included."""
    found = Reach()
    walked: set[int] = set()
    tensors: set[int] = set()
    for item in seen(fn, arguments, modules):
        if isinstance(item, Module):
            if id(item) not in walked:
                found.roots.append(item)
                _walk(item, found, walked, tensors)
        elif id(item) not in tensors:
            tensors.add(id(item))
            found.parameters.append(as_found(item))
    if found.attributes:
        # One that lies in the memory of a buffer is written to with it, and copied with it.
        written = {storage_of(each.tensor) for each in found.buffers if each.tensor is not None}
        for item in found.attributes:
            if item.storage and item.storage in written:
                found.buffers.append(Buffer(item.owner, item.key, item.tensor))
            else:
                found.parameters.append(item)
    return found


# What is walked is read from copies, made in one step: other threads may be at work in it.


def _walk(module: Any, found: Reach, walked: set[int], tensors: set[int]) -> None:
    walked.add(id(module))
    found.modes.append(_mode((module, module.training, _children(module))))
    if module._parameters:  # noqa: SLF001
        _watch(_writable(module._parameters, module), found, tensors)  # noqa: SLF001
        if isinstance(module, _EMBEDDINGS) and module.max_norm is not None:
            found.renormed.append(module.weight)
    children = found.modes[-1].children
    if not _is_torchs(module):
        attributes = module.__dict__
        if not _TELLING.isdisjoint(map(type, tuple(attributes.values()))):
            _watch_attributes(attributes, found, tensors)
            children = (*children, *modules_in(attributes))
    if module._buffers:  # noqa: SLF001
        owner = _writable(module._buffers, module)  # noqa: SLF001
        found.buffers.extend(
            Buffer(owner, key, tensor)
            for key, tensor in tuple(owner.items())
            if not is_lazy(tensor)
        )
    for _, child in children:
        if child is not None and id(child) not in walked:
            _walk(child, found, walked, tensors)


def _watch_attributes(attributes: dict[str, Any], found: Reach, tensors: set[int]) -> None:
    """Tensors that are no buffers, though they should be. Not those with a history: they would hold
    the graph."""
    for key, value in tuple(attributes.items()):
        if value.__class__ is torch.Tensor and value.grad_fn is None and id(value) not in tensors:
            tensors.add(id(value))
            found.attributes.append(as_found(value, attributes, key))


def _watch(owner: Any, found: Reach, tensors: set[int]) -> None:
    for key, tensor in tuple(owner.items()):
        if tensor is not None and id(tensor) not in tensors and not is_lazy(tensor):
            tensors.add(id(tensor))
            found.parameters.append(as_found(tensor, owner, key))


def _writable(owner: Any, module: Any) -> Any:
    # A scripted module's dicts are views of C++.
    return owner if owner.__class__ is dict else _Attributes(module, owner)
