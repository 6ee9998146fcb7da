"""Tensors as a tree of their dotted names, folded to what a person reads. Pure."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast.catalog import TensorInfo
from holdfast.cli._text import clean, counted, shape, size

MOST_LINES: Final = 60
"""About how long a tree gets before its groups are folded."""

MOST_LEVELS: Final = 64
"""Dots beyond these are part of the last name: a name may be of nothing but dots."""


@dataclass(slots=True, kw_only=True)
class _Group:
    """What stands under one part of a name. ``count``, ``nbytes`` and ``dtypes`` are of all below,
    and ``kind`` is the same for groups that differ in nothing but their name."""

    groups: dict[str, "_Group"] = field(default_factory=dict)
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    count: int = 0
    nbytes: int = 0
    dtypes: set[str] = field(default_factory=set)
    kind: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Neighbours that are numbered and alike, such as layers, or a single group."""

    names: tuple[str, ...]
    group: _Group

    @property
    def title(self) -> str:
        if len(self.names) == 1:
            return f"{self.names[0]}."
        return f"{self.names[0]} ... {self.names[-1]}."

    @property
    def facts(self) -> str:
        group, times = self.group, len(self.names)
        tensors = counted(group.count, "tensor")
        each = f"{times} x {tensors}" if times > 1 else tensors
        return f"{each}, {', '.join(sorted(group.dtypes))}, {size(group.nbytes * times)}"


def tensor_lines(tensors: Sequence[TensorInfo], *, full: bool) -> Iterator[str]:
    """The tree as lines. Unless ``full``, neighbours that are alike are one line and what is in
    the first, and groups are unfolded level by level only while there is room."""
    root = _Group()
    for tensor in tensors:
        _add(root, tensor)
    _name_kinds(root, {})
    unfolded = _unfolded(root, full=full)
    yield from _lines(root, "  ", unfolded, full=full)
    if len(unfolded) < _size(root, full=full):
        yield "  (groups are folded; --full shows all, --tensors PATTERN lists some)"


def _add(root: _Group, tensor: TensorInfo) -> None:
    *path, last = tensor.name.split(".", MOST_LEVELS)
    group, nbytes = root, tensor.nbytes
    for part in (None, *path):
        group = group if part is None else group.groups.setdefault(part, _Group())
        group.count += 1
        group.nbytes += nbytes
        group.dtypes.add(tensor.dtype)
    group.tensors[last] = tensor


def _name_kinds(group: _Group, known: dict[Any, int]) -> None:
    """Give every group below a number that those which are alike share."""
    for inner in group.groups.values():
        _name_kinds(inner, known)
    what = (
        tuple((name, t.dtype, t.shape) for name, t in group.tensors.items()),
        tuple((name, inner.kind) for name, inner in group.groups.items()),
    )
    group.kind = known.setdefault(what, len(known))


def _runs(group: _Group, *, full: bool) -> list[_Run]:
    def alike(item: tuple[str, _Group]) -> object:
        return item[1].kind if item[0].isdigit() and not full else item[0]

    grouped = (tuple(items) for _, items in itertools.groupby(group.groups.items(), alike))
    return [_Run(names=tuple(n for n, _ in items), group=items[0][1]) for items in grouped]


def _size(group: _Group, *, full: bool) -> int:
    """How many groups are shown if none is folded."""
    return 1 + sum(_size(run.group, full=full) for run in _runs(group, full=full))


def _unfolded(root: _Group, *, full: bool) -> set[int]:
    """The groups whose members are shown, by identity. The root always is."""
    level, shown, room = [root], set[int](), MOST_LINES
    while level:
        shown.update(id(group) for group in level)
        runs = [run for group in level for run in _runs(group, full=full)]
        room -= len(runs) + sum(len(group.tensors) for group in level)
        inner = [run.group for run in runs]
        needed = sum(len(g.tensors) + len(_runs(g, full=full)) for g in inner)
        level = inner if full or needed <= room else []
    return shown


def _lines(group: _Group, indent: str, unfolded: set[int], *, full: bool) -> Iterator[str]:
    for name, tensor in group.tensors.items():
        facts = f"{tensor.dtype} {shape(tensor.shape)}  {size(tensor.nbytes)}"
        yield f"{indent}{clean(name)}  {facts}"
    for run in _runs(group, full=full):
        yield f"{indent}{clean(run.title)}  {run.facts}"
        if id(run.group) in unfolded:
            yield from _lines(run.group, f"{indent}  ", unfolded, full=full)
