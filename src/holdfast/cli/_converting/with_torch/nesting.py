"""How deep the tuples of a pickle are in each other, told from its opcodes before anybody loads it.

What is a key of a dict is hashed, and the hash of a tuple in a tuple in a tuple is a call in a call
in a call, in C, without a limit: a file of a megabyte ends the process. No unpickler looks out for
that, torch's included.
"""

import io
import pickletools
from collections.abc import Iterator
from typing import Any, Final

from holdfast.errors import CorruptedError

MOST_DEEP: Final = 10_000
"""Far below what a stack of the usual 8 MiB can take, far above what anybody saves."""

_MOST_PICKLES: Final = 5
"""In a file of before torch 1.6: what it is, of which version, of which machine, the state, and its
keys. Then come the bytes of tensors."""

_TUPLES: Final = (b"t", b"\x85", b"\x86", b"\x87")
_MARK: Final = object()
_TAKE_ALL: Final = {pickletools.markobject, pickletools.stackslice}
_PUT: Final = {"PUT", "BINPUT", "LONG_BINPUT"}
_GET: Final = {"GET", "BINGET", "LONG_BINGET"}
_MADE_OF: Final = {"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "FROZENSET", "REDUCE", "NEWOBJ"} | {
    "NEWOBJ_EX",
    "OBJ",
    "INST",
}


def check_nesting(data: bytes, *, path: str) -> None:
    """``CorruptedError`` for a pickle, or several in a row, whose tuples are too deep in
    each other. Whatever else is wrong with it is left to who loads it.

    Most pickles are too small for that, which is seen at once; others take about as long as they
    take to be loaded.
    """
    if sum(map(data.count, _TUPLES)) <= MOST_DEEP:
        return
    if any(depth > MOST_DEEP for depth in _depths(data)):
        raise CorruptedError(
            f"this file is damaged or meant to do harm: tuples are more than {MOST_DEEP} deep in "
            "each other",
            path=path,
        )


def _depths(data: bytes) -> Iterator[int]:
    """That of everything that is made, one after the other, until an unpickler would give up."""
    file = io.BytesIO(data)
    try:
        for _ in range(_MOST_PICKLES):
            stack: list[Any] = []
            memo: dict[int, int] = {}
            for opcode, argument, _ in pickletools.genops(file):
                yield _step(opcode, argument, stack, memo)
    except (IndexError, KeyError, TypeError, ValueError):
        return


def _step(opcode: Any, argument: Any, stack: list[Any], memo: dict[int, int]) -> int:
    name = opcode.name
    if name == "MARK":
        stack.append(_MARK)
    elif name == "DUP":
        stack.append(stack[-1])
    elif name in _PUT:
        memo[int(argument)] = stack[-1]
    elif name == "MEMOIZE":
        memo[len(memo)] = stack[-1]
    elif name in _GET:
        stack.append(memo[int(argument)])
    else:
        return _made(opcode, stack)
    return 0


def _made(opcode: Any, stack: list[Any]) -> int:
    """Take from the stack what an opcode takes, and put there what it makes."""
    taken: list[int] = []
    wanted = opcode.stack_before
    if _TAKE_ALL & {*wanted}:
        while (top := stack.pop()) is not _MARK:
            taken.append(top)
        wanted = wanted[: wanted.index(pickletools.markobject)]
    taken += [stack.pop() for _ in wanted]
    # What is filled stays what it was: a list or a dict is never hashed.
    depth = 1 + max(taken, default=0) if opcode.name in _MADE_OF else 0
    stack.extend(depth for _ in opcode.stack_after)
    return depth
