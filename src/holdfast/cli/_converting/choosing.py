"""Which part of a state is converted, and under which names. Pure; knows no format."""

import fnmatch
from collections.abc import Callable, Sequence
from typing import Any, Final

from holdfast.cli._converting.contents import (
    Tensor,
    is_container,
    leaves,
    members,
    name_of,
    rebuilt,
)
from holdfast.cli._exits import MisuseError
from holdfast.errors import TensorNotFoundError
from holdfast.format import ValuePath

_GONE: Final = object()
_SHOWN: Final = 10


def selected(tree: Any, patterns: Sequence[str]) -> Any:
    """What is called as one of the patterns says, values included. A list that loses some of its
    members becomes a dict by their numbers, so that what stays keeps its name."""
    names = [name_of(path) for path, _ in leaves(tree)]
    for pattern in patterns:
        if not any(_fits(name, pattern) for name in names):
            raise TensorNotFoundError(f"no tensor fits {pattern!r}")

    def fits(path: ValuePath, _: Any) -> bool:
        return any(_fits(name_of(path), each) for each in patterns)

    return _pruned(tree, fits, ())


def _fits(name: str, pattern: str) -> bool:
    return name == pattern or fnmatch.fnmatchcase(name, pattern)


def only_tensors(tree: Any) -> Any:
    """The same without plain values."""
    kept = _pruned(tree, lambda _, value: isinstance(value, Tensor), ())
    return {} if kept is _GONE else kept


def _pruned(value: Any, keep: Callable[[ValuePath, Any], bool], path: ValuePath) -> Any:
    if not is_container(value):
        return value if keep(path, value) else _GONE
    kept = [(step, _pruned(each, keep, (*path, step))) for step, each in members(value)]
    staying = [(step, each) for step, each in kept if each is not _GONE]
    if len(staying) == len(kept):
        again = iter(kept)
        return rebuilt(value, lambda _: next(again)[1])
    if not staying:
        return _GONE
    if isinstance(value, dict):
        made = rebuilt(value, lambda each: each)
        made.clear()
        made.update(dict(staying))
        return made
    return dict(staying)


def stripped(tree: Any, prefix: str) -> Any:
    """The same under names without ``prefix``, which all must begin with."""
    others = [name_of(path) for path, _ in leaves(tree) if not name_of(path).startswith(prefix)]
    if others:
        raise MisuseError(
            f"--strip-prefix {prefix}: {_listed(others)} do not begin so; --select chooses those "
            "that do"
        )
    return _stripped(tree, prefix, f"--strip-prefix {prefix}")


def _stripped(value: Any, prefix: str, option: str) -> Any:
    if not isinstance(value, dict):
        raise MisuseError(f"{option} would leave something without a name")
    made: dict[Any, Any] = {}
    for key, each in value.items():
        name = str(key)
        if prefix == f"{name}.":
            inner = each
        elif prefix.startswith(f"{name}."):
            inner = _stripped(each, prefix.removeprefix(f"{name}."), option)
        elif name.startswith(prefix) and name != prefix:
            inner = {name.removeprefix(prefix): each}
        else:
            raise MisuseError(f"{option} would leave {name!r} without a name")
        if len(value) == 1:
            return inner
        if not isinstance(inner, dict) or inner.keys() & made.keys():
            raise MisuseError(f"{option} would give two things one name")
        made |= inner
    return made


def prefixed(tree: Any, prefix: str) -> Any:
    """The same under names with ``prefix``, which may end with a dot or not."""
    return {prefix.removesuffix("."): tree}


def check_fits(
    tree: Any, problem_of: Callable[[ValuePath, Any], str | None], format_name: str
) -> None:
    """``MisuseError`` with a list if there is anything that a target cannot hold; ``problem_of``
    says what is wrong with a value or a tensor, or ``None``."""
    problems = [
        f"{name_of(path) or 'the state'} ({problem})"
        for path, value in leaves(tree)
        if (problem := problem_of(path, value)) is not None
    ]
    if problems:
        advice = "; --tensors-only leaves values out" if _has_values(tree) else ""
        raise MisuseError(
            f"{format_name} cannot hold {_listed(problems)}; nothing was written{advice}"
        )


def _has_values(tree: Any) -> bool:
    return any(not isinstance(value, Tensor) for _, value in leaves(tree))


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"
