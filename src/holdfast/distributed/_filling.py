"""Changes of a state beside its modules and optimizers, each of which can be taken back."""

import copy
from typing import Any, final

import numpy as np

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
