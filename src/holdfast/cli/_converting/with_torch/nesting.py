"""How deep, and how often, the things of a pickle are in each other, told from its opcodes before
anybody loads it.

What is a key of a dict is hashed, and what an unpickler refuses it prints, torch's included, with
all that is in it. The hash of a tuple in a tuple in a tuple is a call in a call in a call, in C,
without a limit: a file of a megabyte ends the process. And to hash or print sixty lists or tuples,
each of them twice in the next, takes for ever. No unpickler looks out for that.
"""

import io
import pickletools
from collections.abc import Iterable
from typing import Any, Final

from holdfast.cli._converting.contents import check_sharing
from holdfast.errors import CorruptedError

MOST_DEEP: Final = 10_000
"""Far below what a stack of the usual 8 MiB can take, far above what anybody saves."""

_MOST_PICKLES: Final = 5
"""In a file of before torch 1.6: what it is, of which version, of which machine, the state, and its
keys. Then come the bytes of tensors."""

_UNIT: Final = 16
"""How many bytes of a text count as one thing."""

_PARTS: Final = 3
"""How many times more there may be of things in a pickle than in what it comes to: a tensor is some
twenty, and seldom is every thing a tensor."""

_MOST: Final = 2**62
_MARK: Final = object()
_TAKE_ALL: Final = {pickletools.markobject, pickletools.stackslice}
_PUT: Final = {"PUT", "BINPUT", "LONG_BINPUT"}
_GET: Final = {"GET", "BINGET", "LONG_BINGET"}
_FILL: Final = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"}
_ALONE: Final = {
    opcode.name for opcode in pickletools.opcodes if not opcode.stack_before and opcode.stack_after
} - {"MARK", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET", *_GET}
"""What has nothing in it, and never will."""

_WITH_LENGTH: Final = {str, bytes, bytearray}
_MADE_OF: Final = {"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "FROZENSET", "REDUCE", "NEWOBJ"} | {
    "NEWOBJ_EX",
    "OBJ",
    "INST",
}

_Thing = Any
"""The weight of what has nothing in it, as a number, or a list: of how deep tuples are in each
other there, and of what is in it. No class of our own, since there may be millions."""


def check_nesting(data: bytes, *, path: str) -> None:
    """``CorruptedError`` for a pickle, or several in a row, whose tuples are too deep in each
    other, or that has things so often in each other that to look at all of them would not end.
    Whatever else is wrong with it is left to who loads it. Takes about as long as to load it."""
    file = io.BytesIO(data)
    for _ in range(_MOST_PICKLES):
        made = _Made(path)
        goes_on = made.run(file)
        made.check_sharing()
        if not goes_on:
            return


class _Made:
    """What one pickle makes, up to where an unpickler would give up."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._stack: list[_Thing] = []
        self._memo: dict[int, _Thing] = {}
        self._keys: list[list[_Thing]] = []
        self._dropped: list[list[_Thing]] = []
        self._is_shared = False

    def run(self, file: io.BytesIO) -> bool:
        """Whether it came to its end."""
        try:
            for opcode, argument, _ in pickletools.genops(file):
                self._step(opcode, argument)
        except (IndexError, KeyError, TypeError, ValueError):
            return False
        return True

    def check_sharing(self) -> None:
        """What is dropped or put in another's place counts as well: it may have been printed."""
        if not self._is_shared:
            return
        roots = [*self._stack, *self._memo.values(), *self._dropped]
        totals, distinct = _measured(each for each in roots if type(each) is list)
        # Keys are hashed one after the other, each as a whole.
        hashed = sum(totals[id(key)] for key in self._keys)
        most = max(hashed, *totals.values())
        check_sharing(most // _PARTS, distinct, self._path)

    def _step(self, opcode: Any, argument: Any) -> None:
        name, stack = opcode.name, self._stack
        if name in _ALONE:
            has_length = type(argument) in _WITH_LENGTH and name != "GLOBAL"
            stack.append(1 + len(argument) // _UNIT if has_length else 1)
        elif name == "MARK":
            stack.append(_MARK)
        elif name in _PUT:
            self._put(int(argument), self._top())
        elif name == "MEMOIZE":
            self._put(len(self._memo), self._top())
        elif name == "DUP" or name in _GET:
            again = self._top() if name == "DUP" else self._memo[int(argument)]
            self._is_shared = self._is_shared or type(again) is list
            stack.append(again)
        else:
            self._make(name, opcode)

    def _top(self) -> _Thing:
        """``IndexError`` where an unpickler has nothing since the last mark."""
        if self._stack[-1] is _MARK:
            raise IndexError
        return self._stack[-1]

    def _put(self, place: int, thing: _Thing) -> None:
        if place in self._memo:
            self._drop([self._memo[place]])
        self._memo[place] = thing

    def _make(self, name: str, opcode: Any) -> None:
        """Take from the stack what an opcode takes, and put there what it makes."""
        taken = self._taken(opcode)
        if name in _FILL:
            filled, *inside = taken
            self._note_keys(name, inside)
            if type(filled) is list:
                filled.extend(inside)
            else:
                self._drop(inside)
            self._stack.append(filled)
        elif opcode.stack_after:
            self._note_keys(name, taken)
            # What is filled stays what it was: a list or a dict is never hashed.
            depth = 1 + max(map(_depth, taken), default=0) if name in _MADE_OF else 0
            if depth > MOST_DEEP:
                raise CorruptedError(
                    f"this file is damaged or meant to do harm: tuples are more than {MOST_DEEP} "
                    "deep in each other",
                    path=self._path,
                )
            self._stack.append([depth, *taken])
        else:
            self._drop(taken)

    def _taken(self, opcode: Any) -> list[_Thing]:
        """What it takes, the first to have come first."""
        taken: list[_Thing] = []
        wanted = opcode.stack_before
        if _TAKE_ALL & {*wanted}:
            while (top := self._stack.pop()) is not _MARK:
                taken.append(top)
            wanted = wanted[: wanted.index(pickletools.markobject)]
        for _ in wanted:
            taken.append(self._top())
            self._stack.pop()
        taken.reverse()
        return taken

    def _note_keys(self, name: str, inside: list[_Thing]) -> None:
        keys: list[_Thing] = []
        if name in {"SETITEM", "SETITEMS", "DICT"}:
            keys = inside[::2]
        elif name in {"ADDITEMS", "FROZENSET"}:
            keys = inside
        keys = [key for key in keys if type(key) is list]
        self._keys += keys
        self._drop(keys)

    def _drop(self, things: Iterable[_Thing]) -> None:
        self._dropped += [each for each in things if type(each) is list]


def _depth(thing: _Thing) -> int:
    return thing[0] if type(thing) is list else 0


def _measured(roots: Iterable[list[_Thing]]) -> tuple[dict[int, int], int]:
    """How many things are in each that has any, as often as they are; and how many there are. What
    is in itself counts once."""
    totals: dict[int, int] = {}
    distinct = 0
    todo = [(root, False) for root in roots]
    while todo:
        thing, is_within_known = todo.pop()
        inside = thing[1:]
        if is_within_known:
            weights = (totals[id(each)] if type(each) is list else each for each in inside)
            totals[id(thing)] = min(1 + sum(weights), _MOST)
        elif id(thing) not in totals:
            totals[id(thing)] = 0
            distinct += 1 + sum(1 if type(each) is list else each for each in inside)
            todo.append((thing, True))
            todo += [(each, False) for each in inside if type(each) is list]
    return totals, distinct
