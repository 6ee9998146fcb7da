"""How settings are read from an autograd node. Knows the nodes' conventions, no operation."""

from collections.abc import Callable
from typing import Any

from holdfast.activation._recipes.recipe import Arg, Recipe

Settings = Callable[[Any], tuple[Any, ...] | None]


def setting(node: Any, name: str) -> Any:
    """What the node noted under ``name``. It gives negative numbers as if they had no sign."""
    value = getattr(node, "_saved_" + name)
    kind = value.__class__
    if kind is tuple:
        return [_signed(each) for each in value]
    return _signed(value) if kind is int else value


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def named(*names: str) -> Settings:
    """The settings a node has under these names, in this order."""
    return lambda node: tuple([setting(node, name) for name in names])


def shape_of(node: Any) -> Any:
    """Of what the operation returned first."""
    return node._input_metadata[0].shape  # noqa: SLF001 -- torch has no other name for it


def dtype_of(node: Any) -> Any:
    return node._input_metadata[0].dtype  # noqa: SLF001 -- as above


def with_dtype(*names: str) -> Settings:
    """The named settings, and the dtype of what the operation returned."""
    return lambda node: (*(setting(node, name) for name in names), dtype_of(node))


def of_saved(run: Callable[..., Any], *names: str, saved: str = "self") -> Recipe:
    """An operation on one tensor, which its node saved."""
    return Recipe((Arg(saved, 0),), run, named(*names))


def of_edge(run: Callable[..., Any], *names: str) -> Recipe:
    """An operation on one tensor, which its node did not save: of its own it keeps the result, or
    nothing."""
    return Recipe((Arg(None, 0),), run, named(*names))
