"""Says where in a tree of values one is, as a person would write it in Python.

Knows the steps from the root; knows nothing of what the values are or how they are stored.
"""

import enum
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

ValuePath = tuple[object, ...]
"""The steps from the root of a tree to one value: keys of dicts, positions in sequences."""

_FIRST_STEPS = 4

_short = reprlib.Repr()
_short.maxstring = 60
_short.maxother = 60
_short.maxlevel = 3


class Place:
    """Where a walk through a tree is. Not thread-safe; one walk has one.

    ``steps`` is moved by the walk itself. Keys and members of sets have no place of their own:
    while ``aside`` is entered, the place is that of the dict or set they are in. After an error
    it stays where the error was.
    """

    __slots__ = ("_aside", "_aside_at", "_root", "steps")

    def __init__(self, root: str) -> None:
        self._root = root
        self._aside: str | None = None
        self._aside_at = 0
        self.steps: list[object] = []

    @contextmanager
    def aside(self, what: Literal["key", "member"]) -> Iterator[None]:
        before = self._aside
        if before is None:
            self._aside = what
            self._aside_at = len(self.steps)
        yield
        self._aside = before

    @property
    def is_aside(self) -> bool:
        """Whether the walk is inside a key or a member of a set."""
        return self._aside is not None

    def path(self) -> ValuePath:
        return tuple(self.steps)

    def __str__(self) -> str:
        """``state['optimizer']['x']``."""
        return self._told(len(self.steps))

    def start(self) -> str:
        """The first few steps, for a place that is very deep."""
        return self._told(_FIRST_STEPS)

    def _told(self, count: int) -> str:
        if self._aside is not None:
            count = min(count, self._aside_at)
        place = self._root + "".join(f"[{_step(step)}]" for step in self.steps[:count])
        return place if self._aside is None else f"a {self._aside} of {place}"


def shown(value: object) -> str:
    """``repr`` cut short. An int that has too many digits to be written is named by its type."""
    try:
        return _short.repr(value)
    except ValueError:
        return f"<{type(value).__name__}>"


def _step(step: object) -> str:
    return str(step) if isinstance(step, enum.Enum) else shown(step)
