"""The arguments of a region, kept until its replay. Knows containers and where tensors lie in
them; does not know what the region does.

Lists, tuples, dicts and their like are rebuilt: a list that grows meanwhile is, for the replay,
as it was. Every tensor in them is saved as autograd saves its own: an enclosing region's hooks
see it, and a change in place is noticed.
"""

import copy
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import _make_saved_tensor

from holdfast.activation._regions.digests import digest
from holdfast.errors import RecomputationError


class Input:
    """One tensor among the arguments."""

    __slots__ = ("_digest", "_path", "_region", "_saved")

    def __init__(self, tensor: Any, path: "Path", region: str, known: int | None) -> None:
        self._path = path
        self._region = region
        self._digest = known
        self._saved = _make_saved_tensor(tensor, is_output=False)

    def get(self) -> Any:
        try:
            tensor = self._saved.unpack()
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise _changed(self._path, self._region, "changed in place") from error
        if self._digest is not None and digest(tensor) != self._digest:
            raise _changed(self._path, self._region, "given other values")
        return tensor

    def give_up(self, made_again: Callable[[], Any]) -> None:
        """Let go of the tensor, which ``made_again`` makes when it is needed."""
        self._saved.register_hooks(lambda _: None, lambda _: made_again())


class HeldInput:
    """One tensor among the arguments that a manager keeps elsewhere."""

    __slots__ = ("_digest", "_held", "_path", "_region", "_requires_grad")

    def __init__(
        self, held: Any, tensor: Any, path: "Path", region: str, known: int | None
    ) -> None:
        self._held = held
        self._requires_grad = tensor.requires_grad
        self._path = path
        self._region = region
        self._digest = known

    def get(self) -> Any:
        tensor = self._held.get()
        if self._digest is not None and digest(tensor) != self._digest:
            raise _changed(self._path, self._region, "given other values")
        return tensor.detach().requires_grad_(self._requires_grad)


def _changed(path: "Path", region: str, how: str) -> RecomputationError:
    first, *keys = path
    where = f"{first}{''.join(f'[{key!r}]' for key in keys)}"
    return RecomputationError(
        f"{where} of region {region!r} was {how} after the region was called with it, so the "
        "region cannot be replayed and its gradients would be wrong. Give the region a clone, or "
        "change the tensor after backward().",
        layer_id=region,
    )


Path = tuple[object, ...]  # args or kwargs, and the keys from there on
Keeper = Callable[[Any, Path], Input | HeldInput]


def kept(tree: Any, keep: Keeper, path: Path, memo: dict[int, Any]) -> Any:
    """``tree`` with each tensor replaced by what ``keep(tensor, path)`` gives. What stands in it
    twice stands in the result twice; ``memo`` has what was met before, by its identity."""
    if id(tree) in memo:
        return memo[id(tree)]
    if isinstance(tree, torch.Tensor):
        memo[id(tree)] = found = keep(tree, path)
        return found
    if not isinstance(tree, _CONTAINERS):
        return tree
    return _rebuilt(tree, lambda item, key: kept(item, keep, (*path, key), memo), memo)


def given(tree: Any, memo: dict[int, Any]) -> Any:
    """What ``kept`` was given, in containers of its own; ``memo`` has what the inputs in it stand
    for, by their identity."""
    if id(tree) in memo:
        return memo[id(tree)]
    if not isinstance(tree, _CONTAINERS):
        return tree
    return _rebuilt(tree, lambda item, _: given(item, memo), memo)


_CONTAINERS = (tuple, list, dict, deque)


def _rebuilt(tree: Any, of: Callable[[Any, object], Any], memo: dict[int, Any]) -> Any:
    """A container like ``tree``, of its own class, with ``of(item, key)`` for each item."""
    if isinstance(tree, tuple):
        items = [of(item, index) for index, item in enumerate(tree)]
        return tuple(items) if tree.__class__ is tuple else _tuple_like(tree, items)
    # Remembered before it is filled: it may hold itself.
    memo[id(tree)] = result = copy.copy(tree)
    for key, item in tree.items() if isinstance(tree, dict) else enumerate(tree):
        result[key] = of(item, key)
    return result


def _tuple_like(tree: Any, items: list[Any]) -> Any:
    kind = tree.__class__
    # The constructor of a named tuple may be another.
    return kind._make(items) if hasattr(kind, "_make") else kind(items)


def leaves(tree: Any) -> list[Any]:
    """Everything in the containers of ``tree`` that is no container, each once."""
    found: dict[int, Any] = {}
    met: set[int] = set()
    waiting = [tree]
    while waiting:
        item = waiting.pop()
        if not isinstance(item, list | tuple | dict | deque):
            found[id(item)] = item
        elif id(item) not in met:
            met.add(id(item))
            waiting.extend(item.values() if isinstance(item, dict) else item)
    return list(found.values())
