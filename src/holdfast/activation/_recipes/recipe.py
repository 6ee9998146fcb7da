"""What it takes to run an operation again, as values. Knows no graph."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def _nothing(node: Any) -> tuple[Any, ...]:
    del node
    return ()


@dataclass(frozen=True, slots=True)
class Arg:
    """One tensor an operation was given: under which name its node saved it (if it ever does),
    and by which edge it came (if it may have had a gradient). An ``optional`` one may have been
    left out in the call: then it is neither saved nor has it an edge."""

    saved: str | None = None
    edge: int | None = None
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Recipe:
    """How an operation is run again: ``run(*tensors, *settings)``. It returns ``None`` where it
    can tell that the result is not what it was.

    ``settings(node)`` are the operation's other arguments, read from its node after the forward;
    ``None`` if this node does not tell enough.
    """

    args: tuple[Arg, ...]
    run: Callable[..., Any]
    settings: Callable[[Any], tuple[Any, ...] | None] = _nothing
    is_view: bool = False  # the result shares the memory of the first tensor
    in_place: bool = False  # there is a form of it that overwrites the first tensor
    copies: bool = False  # moves bits and does no arithmetic: exact in whatever memory format
    base_only: bool = False  # only where it made the very memory that is restored: see copies
    variadic: bool = False  # as many tensors as the node has edges, all by edges: cat
    outputs: bool = False  # ``run`` returns several, numbered as the node's
    saves: tuple[tuple[str, int], ...] = ()  # outputs without a gradient that the node itself saved
    # One more setting, which the node does not tell: looked for once, when the graph is compiled,
    # and checked by ``run`` every time. Returns None if there is none that fits.
    found: Callable[[Any], float | None] | None = None
