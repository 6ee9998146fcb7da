"""The arguments of a region, kept until its replay. Knows containers and where tensors lie in
them; does not know what the region does.

Lists, tuples and dicts are rebuilt: a list the caller appends to meanwhile is, for the replay,
as it was. Every tensor in them is saved as autograd saves its own: an enclosing region's hooks
see it, and a change in place is noticed.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import _make_saved_tensor

from holdfast.activation._regions.digests import digest
from holdfast.errors import RecomputationError


class Input:
    """One tensor among the arguments."""

    __slots__ = ("_digest", "_path", "_region", "_saved")

    def __init__(self, tensor: Any, path: str, region: str, *, digested: bool) -> None:
        self._path = path
        self._region = region
        self._digest = digest(tensor) if digested else None
        self._saved = _make_saved_tensor(tensor, is_output=False)

    def get(self) -> Any:
        try:
            tensor = self._saved.unpack()
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise self._changed("changed in place") from error
        if self._digest is not None and digest(tensor) != self._digest:
            raise self._changed("given other values")
        return tensor

    def _changed(self, how: str) -> RecomputationError:
        return RecomputationError(
            f"{self._path} of region {self._region!r} was {how} after the region was called with "
            "it, so the region cannot be replayed and its gradients would be wrong. Give the "
            "region a clone, or change the tensor after backward().",
            layer_id=self._region,
        )


class HeldInput:
    """One tensor among the arguments that a manager keeps elsewhere."""

    __slots__ = ("_held", "_requires_grad")

    def __init__(self, held: Any, requires_grad: bool) -> None:
        self._held = held
        self._requires_grad = requires_grad

    def get(self) -> Any:
        return self._held.get().detach().requires_grad_(self._requires_grad)


Keeper = Callable[[Any, str], Input | HeldInput]


def kept(tree: Any, keep: Keeper, path: str) -> Any:
    """``tree`` with each tensor replaced by what ``keep(tensor, path)`` gives."""
    if isinstance(tree, torch.Tensor):
        return keep(tree, path)
    kind = tree.__class__
    if kind is tuple or kind is list:
        return kind([kept(item, keep, f"{path}[{i}]") for i, item in enumerate(tree)])
    if kind is dict:
        return {key: kept(item, keep, f"{path}[{key!r}]") for key, item in tree.items()}
    if isinstance(tree, tuple) and hasattr(kind, "_fields"):
        return kind._make(
            kept(item, keep, f"{path}.{name}")
            for name, item in zip(kind._fields, tree, strict=True)
        )
    return tree


def given(tree: Any) -> Any:
    """What ``kept`` was given."""
    kind = tree.__class__
    if kind is Input or kind is HeldInput:
        return tree.get()
    if kind is tuple or kind is list:
        return kind([given(item) for item in tree])
    if kind is dict:
        return {key: given(item) for key, item in tree.items()}
    if isinstance(tree, tuple) and hasattr(kind, "_fields"):
        return kind._make(given(item) for item in tree)
    return tree


def leaves(tree: Any) -> Iterator[Any]:
    """Everything in the containers of ``tree`` that is no container."""
    if isinstance(tree, tuple | list):
        for item in tree:
            yield from leaves(item)
    elif tree.__class__ is dict:
        for item in tree.values():
            yield from leaves(item)
    else:
        yield tree
