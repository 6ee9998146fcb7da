"""What would go wrong with a pickle, told from its opcodes before anybody loads it: things that are
too deep, or too often, in each other, and calls that make much of little.

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

_UNIT: Final = 1024
"""How many letters of a text count as one thing more."""

_PARTS: Final = 3
"""How many times more there may be of things in a pickle than in what it comes to: a tensor is some
twenty, and seldom is every thing a tensor."""

_MOST: Final = 2**62
_MARK: Final = object()
_TAKE_ALL: Final = {pickletools.markobject, pickletools.stackslice}
_PUT: Final = {"PUT", "BINPUT", "LONG_BINPUT"}
_GET: Final = {"GET", "BINGET", "LONG_BINGET"}
_FILL: Final = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"}
_TUPLES: Final = {"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "FROZENSET"}
_CALLS: Final = {"REDUCE", "NEWOBJ", "NEWOBJ_EX", "OBJ"}
_NAMED: Final = {"GLOBAL", "STACK_GLOBAL", "INST"}
_ALONE: Final = {
    opcode.name for opcode in pickletools.opcodes if not opcode.stack_before and opcode.stack_after
} - {"MARK", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET", *_GET, *_NAMED}
"""What has nothing in it, and never will."""

_WITH_LENGTH: Final = {str, bytes, bytearray}

_Thing = Any
"""A number, the weight of what has nothing in it; a text, the name by which something was found; or
a list: of how deep tuples are in each other there, and of what is in it. No class of our own, since
there may be millions."""


def check_pickles(data: bytes, *, path: str, count: int = 1) -> None:
    """``CorruptedError`` for a pickle, or so many in a row, whose tuples are too deep in each
    other; that has things so often in each other that to look at all of them would not end; that
    makes much of little by a call; or that is cut short. Takes about as long as to load it."""
    file = io.BytesIO(data)
    for _ in range(count):
        made = _Made(path)
        try:
            made.run(file)
        except (IndexError, KeyError, TypeError, ValueError) as error:
            # An unpickler might go on where this does not.
            raise CorruptedError(
                f"this file is cut short or damaged: {error}", path=path
            ) from error
        made.check_sharing()


class _Made:
    """What one pickle makes, up to where an unpickler would give up."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._stack: list[_Thing] = []
        self._memo: dict[int, _Thing] = {}
        self._looked_at: list[list[_Thing]] = []
        self._dropped: list[list[_Thing]] = []
        self._is_shared = False

    def run(self, file: io.BytesIO) -> None:
        for opcode, argument, _ in pickletools.genops(file):
            self._step(opcode, argument)

    def check_sharing(self) -> None:
        """What is dropped or put in another's place counts as well: it may have been printed."""
        if not self._is_shared:
            return
        roots = [*self._stack, *self._memo.values(), *self._dropped]
        totals, distinct = _measured(each for each in roots if type(each) is list)
        # Keys are hashed, and what is given to calls is, one after the other, each as a whole.
        looked_at = sum(totals[id(each)] for each in self._looked_at)
        most = max(looked_at, *totals.values())
        check_sharing(most // _PARTS, distinct, self._path)

    def _step(self, opcode: Any, argument: Any) -> None:
        name, stack = opcode.name, self._stack
        if name in _ALONE:
            stack.append(1 + len(argument) // _UNIT if type(argument) in _WITH_LENGTH else 1)
        elif name == "GLOBAL":
            stack.append(argument)
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
        elif name == "POP" and stack[-1] is _MARK:
            stack.pop()
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
        if name == "STACK_GLOBAL":
            self._stack.append("")
        elif name in _FILL:
            filled, *inside = taken
            self._note(name, inside)
            if type(filled) is list:
                filled.extend(inside)
            else:
                self._drop(inside)
            self._stack.append(filled)
        elif opcode.stack_after:
            self._note(name, taken)
            if name in _CALLS:
                self._check_call(*taken)
            # What is filled stays what it was: a list or a dict is never hashed.
            is_deep = name in _TUPLES or name in _CALLS or name == "INST"
            depth = 1 + max(map(_depth, taken), default=0) if is_deep else 0
            if depth > MOST_DEEP:
                raise self._refusal(f"tuples are more than {MOST_DEEP} deep in each other")
            self._stack.append([depth, *taken])
        else:
            self._drop(taken)

    def _check_call(self, called: _Thing, arguments: _Thing = 1, *_: _Thing) -> None:
        """What is no name would be refused and printed, which may take for ever. A number of bytes
        is made of a number, and ``encode`` makes twice as much of what it is given."""
        given = arguments[1:] if type(arguments) is list else []
        if type(called) is not str:
            raise self._refusal("it calls what is no function")
        if called.endswith("bytearray") and len(given) == 1 and type(given[0]) is not list:
            raise self._refusal("it makes bytes of a number")
        if called.startswith("_codecs") and any(type(each) is list for each in given):
            raise self._refusal("it encodes what was encoded")

    def _refusal(self, why: str) -> CorruptedError:
        return CorruptedError(f"this file is damaged or meant to do harm: {why}", path=self._path)

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

    def _note(self, name: str, inside: list[_Thing]) -> None:
        """What will be looked at as a whole: keys, members of sets, and what is given to calls."""
        if name in {"SETITEM", "SETITEMS", "DICT"}:
            inside = inside[::2]
        elif name not in {"ADDITEMS", "FROZENSET", *_CALLS}:
            return
        found = [each for each in inside if type(each) is list]
        self._looked_at += found
        self._drop(found)

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
        if is_within_known:
            total = 1
            for each in thing[1:]:
                total += totals[id(each)] if type(each) is list else _weight(each)
            totals[id(thing)] = min(total, _MOST)
        elif id(thing) not in totals:
            totals[id(thing)] = 0
            todo.append((thing, True))
            distinct += 1
            for each in thing[1:]:
                distinct += _weight(each)
                if type(each) is list:
                    todo.append((each, False))
    return totals, distinct


def _weight(thing: _Thing) -> int:
    """That of itself, without what is in it."""
    return thing if type(thing) is int else 1
