"""What a conversion carries: a tree of values, in it tensors that are not read yet. Knows no format
and no file."""

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast.catalog._writing import Facts
from holdfast.errors import CorruptedError
from holdfast.format import CHUNK_BYTES, PerRank, ValuePath, dtype_of
from holdfast.format._value_model import MAX_VALUE_DEPTH

PIECE_BYTES: Final = 16 * 1024 * 1024
"""About how much of a tensor is in memory at once."""

MOST_DEEP: Final = MAX_VALUE_DEPTH
"""Containers in each other, as many as a checkpoint of holdfast's can hold."""

_SHARED_MEMBERS: Final = 100_000
_SHARED_TIMES: Final = 10

_DICTS: Final = frozenset({dict, OrderedDict, defaultdict, Counter})
_LISTS: Final = frozenset({list, tuple, deque})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tensor:
    """A tensor of a source. ``pieces`` reads its bytes in row-major order, some at a time, anew
    each time it is called. The same object in two places of a tree is one tensor with two names.
    ``kind`` is the record's word for what it was: ``tensor`` or ``array``."""

    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[memoryview]] = field(repr=False)
    kind: str = "tensor"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """A source. ``facts`` are what only a checkpoint of holdfast's has: step, metrics, custom."""

    tree: Any
    facts: Facts = field(default_factory=Facts)


def leaves(value: Any, path: ValuePath = ()) -> Iterator[tuple[ValuePath, Any]]:
    """Every tensor and every value that is no container, with the steps to it."""
    if type(value) in _DICTS or type(value) in _LISTS or type(value) is PerRank:
        for step, each in members(value):
            yield from leaves(each, (*path, step))
    else:
        yield path, value


def members(value: Any) -> Iterator[tuple[Any, Any]]:
    """What is in a container, with the step to it."""
    if type(value) in _DICTS:
        yield from value.items()
    elif type(value) is PerRank:
        yield from ((f"@{rank}", each) for rank, each in enumerate(value.values))
    else:
        yield from enumerate(value)


def is_container(value: Any) -> bool:
    return type(value) in _DICTS or type(value) in _LISTS or type(value) is PerRank


def check_tree(tree: Any, path: str) -> None:
    """``CorruptedError`` for containers that are too deep in each other, or in themselves, and for
    such as are in it so often that to write all of it would never end: sixty lists, each twice in
    the next, are few bytes in a pickle."""
    known: dict[int, tuple[int, int]] = {}
    distinct = 0

    def measured(value: Any, depth: int) -> tuple[int, int]:
        """How many things are in it, as often as they are, and how deep."""
        nonlocal distinct
        if not is_container(value):
            return 1, 0
        if depth + known.get(id(value), (0, 1))[1] > MOST_DEEP:
            raise CorruptedError(
                f"lists or dicts are more than {MOST_DEEP} deep in each other, or one contains "
                "itself",
                path=path,
            )
        if id(value) not in known:
            inner = [measured(each, depth + 1) for _, each in members(value)]
            distinct += 1 + len(inner)
            height = 1 + max((each[1] for each in inner), default=0)
            known[id(value)] = 1 + sum(each[0] for each in inner), height
        return known[id(value)]

    total, _ = measured(tree, 0)
    check_sharing(total, distinct, path)


def check_sharing(total: int, distinct: int, path: str) -> None:
    """``CorruptedError`` if so many things that differ come to a ``total`` beyond all measure, as
    often as they are in each other."""
    if total > _SHARED_TIMES * distinct + _SHARED_MEMBERS:
        raise CorruptedError(
            f"the same lists or dicts are in each other so often that {total:.3g} things are in "
            "it; this file is damaged or meant to do harm",
            path=path,
        )


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """A container of the same kind with other members."""
    if type(value) is PerRank:
        return PerRank(values=tuple(change(each) for each in value.values))
    if type(value) is deque:
        return deque((change(each) for each in value), value.maxlen)
    if type(value) in _LISTS:
        return type(value)(change(each) for each in value)
    made: Any = defaultdict(value.default_factory) if type(value) is defaultdict else type(value)()
    made.update({key: change(each) for key, each in value.items()})
    return made


def name_of(path: ValuePath) -> str:
    """What a place is called: ``model.0.weight`` for ``state["model"]["0.weight"]``."""
    return ".".join(map(str, path))


def tensors_in(tree: Any) -> list[tuple[str, Tensor]]:
    """Every tensor by the name of its place. One that has two places is there twice."""
    return [(name_of(path), each) for path, each in leaves(tree) if isinstance(each, Tensor)]


def chunks_of(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor ``CHUNK_BYTES`` at a time, as shards want them."""
    rest = bytearray()
    for piece in tensor.pieces():
        data = piece
        if rest:
            missing = CHUNK_BYTES - len(rest)
            rest += data[:missing]
            data = data[missing:]
            if len(rest) < CHUNK_BYTES:
                continue
            yield memoryview(rest)
            rest = bytearray()
        whole = len(data) - len(data) % CHUNK_BYTES
        for start in range(0, whole, CHUNK_BYTES):
            yield data[start : start + CHUNK_BYTES]
        rest += data[whole:]
    if rest:
        yield memoryview(rest)
