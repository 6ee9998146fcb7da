"""A state as DCP flattens it, and as the record keeps it: a tree. Pure.

DCP's planner gives every value a key, ``model.layers.0.weight``, and, if it flattened the state,
the path that the key was made of. The record keeps the tree that these paths make, so that
``holdfast.load`` and a catalog see the state as it was before. Values that are dicts or lists
themselves are noted, so that the keys come back out of the tree.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A state as a tree. At the paths ``whole`` are values, be they dicts or lists."""

    root: Any
    whole: Sequence[Path]


def tree_of(values: Mapping[str, Any], paths: object) -> Tree | None:
    """The tree that the planner's paths make of its values, both by key. ``None`` if these are no
    such paths, or the keys could not be told from the tree."""
    if not _are_paths(paths) or paths.keys() != values.keys():
        return None
    root = _nested([(paths[key], value) for key, value in values.items()])
    whole = [paths[key] for key, value in values.items() if type(value) in (dict, list)]
    tree = Tree(root=root, whole=whole)
    return tree if {key: path for key, path, _ in leaves_of(tree)} == paths else None


def leaves_of(tree: Tree) -> Iterator[tuple[str, Path, Any]]:
    """Every value with its key and its path: undoes ``tree_of``."""
    for path, value in _leaves(tree.root, (), frozenset(tree.whole)):
        yield ".".join(map(str, path)), path, value


def _are_paths(data: Any) -> TypeGuard[dict[str, Path]]:
    return isinstance(data, dict) and all(
        type(path) is tuple and path and all(type(step) in (str, int) for step in path)
        for path in data.values()
    )


def _nested(found: Sequence[tuple[Path, Any]]) -> Any:
    """One level of a tree: what begins with the same step is one value, or one level more."""
    under: dict[str | int, list[tuple[Path, Any]]] = {}
    for path, value in found:
        under.setdefault(path[0], []).append((path[1:], value))
    level = {step: _value_or_level(each) for step, each in under.items()}
    return [*level.values()] if [*level] == [*range(len(level))] and level else level


def _value_or_level(found: Sequence[tuple[Path, Any]]) -> Any:
    for path, value in found:
        if not path:
            return value
    return _nested(found)


def _leaves(value: Any, path: Path, whole: frozenset[Path]) -> Iterator[tuple[Path, Any]]:
    if type(value) is dict and path not in whole:
        for step, each in value.items():
            yield from _leaves(each, (*path, step), whole)
    elif type(value) is list and path not in whole:
        for index, each in enumerate(value):
            yield from _leaves(each, (*path, index), whole)
    else:
        yield path, value
