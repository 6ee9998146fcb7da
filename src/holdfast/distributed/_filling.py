"""Changes of a state beside its modules and optimizers, each of which can be taken back."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any, final

import numpy as np
import torch

from holdfast.distributed._stored import DICTS
from holdfast.errors import LoadError

_ABSENT = object()


@final
class SetItem:
    """Puts a value into a dict or a list."""

    def __init__(self, container: Any, key: Any, value: object) -> None:
        self._container = container
        self._key = key
        self._value = value
        self._old: object = _ABSENT

    def apply(self) -> None:
        self._old = self._container[self._key]
        self._container[self._key] = self._value

    def undo(self) -> None:
        if self._old is not _ABSENT:
            self._container[self._key] = self._old
        self._old = _ABSENT


@final
class ArrayFill:
    """Copies an array into one of the same shape."""

    def __init__(self, live: Any, staged: Any) -> None:
        if not live.flags.writeable:
            raise LoadError("an array that is to be filled cannot be written to")
        self._live = live
        self._staged = staged
        self._old: Any = None

    def apply(self) -> None:
        self._old = self._live.copy()
        np.copyto(self._live, self._staged, casting="unsafe")

    def undo(self) -> None:
        if self._old is not None:
            np.copyto(self._live, self._old)
        self._old = None


@final
class StatefulFill:
    """Calls ``load_state_dict`` of an object, and again with its former state to undo it."""

    def __init__(self, target: Any, state: object) -> None:
        self._target = target
        self._state = state
        self._old: object = _ABSENT

    def apply(self) -> None:
        self._old = copy.deepcopy(self._target.state_dict())
        self._target.load_state_dict(self._state)

    def undo(self) -> None:
        if self._old is not _ABSENT:
            self._target.load_state_dict(self._old)
        self._old = _ABSENT


@final
class DtypesAsSaved:
    """Gives the model of an optimizer that keeps FP32 masters the dtypes it was saved with, 16-bit
    or, after a fallback, FP32. To be applied before the model is matched: to load FP32 values into
    16-bit ones would round away what buffers have."""

    def __init__(self, optimizer: Any, *, fallback: bool) -> None:
        self._optimizer = optimizer
        self._fallback = fallback
        self._is_applied = False

    @classmethod
    def found_in(cls, target: object, stored: object) -> "Iterator[DtypesAsSaved]":
        """For each optimizer of a state whose stored counterpart has other dtypes."""
        if isinstance(target, torch.optim.Optimizer):
            saved = stored.get("has_fallback") if isinstance(stored, Mapping) else None
            can = callable(getattr(target, "set_fallback", None))
            if can and isinstance(saved, bool) and saved != target.has_fallback:
                yield cls(target, fallback=saved)
        elif type(target) in DICTS and isinstance(stored, Mapping):
            for key in target.keys() & stored.keys():  # type: ignore[attr-defined]
                yield from cls.found_in(target[key], stored[key])  # type: ignore[index]

    def apply(self) -> None:
        self._is_applied = True
        self._optimizer.set_fallback(fallback=self._fallback)

    def undo(self) -> None:
        if self._is_applied and self._optimizer.has_fallback == self._fallback:
            self._optimizer.set_fallback(fallback=not self._fallback)
        self._is_applied = False
