"""The limits of a tree of values, how it refers to what is stored outside of it, and what stands
in it for values that differ from rank to rank.

Knows no tag and no bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from holdfast.format._entry_names import check_name

MAX_VALUE_DEPTH: Final = 64
"""Containers in each other, in a tree of values."""

MAX_VALUE_JSON_DEPTH: Final = 5 * MAX_VALUE_DEPTH + 4
"""Objects and lists in each other, in the JSON of such a tree: a defaultdict takes five for each
level, and the value at the bottom up to four."""

FACTORIES: Final[Mapping[str, type]] = {
    kind.__name__: kind for kind in (bool, dict, float, int, list, set, str, tuple)
}
"""What a defaultdict may make its values with, besides nothing."""


class LeafRef(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Stands in the tree for a tensor or an array that is stored in shards under ``name``. There
    are very many."""

    kind: Literal["tensor", "array"]
    name: str

    def __post_init__(self) -> None:
        if self.kind not in {"tensor", "array"}:
            raise ValueError(f"kind must be 'tensor' or 'array', not {self.kind!r}")
        check_name(self.name)


@dataclass(frozen=True, slots=True)
class PerRank:
    """A value that each rank of the job that saved has for itself: ``values[rank]``.

    It may stand wherever a container may, but not in keys and members of sets.
    """

    values: tuple[object, ...]

    def __repr__(self) -> str:
        return f"PerRank(the values of {len(self.values)} ranks)"

    def __post_init__(self) -> None:
        if type(self.values) is not tuple or not self.values:
            raise ValueError(
                f"values must be a tuple with a value for every rank, not {self.values!r}"
            )


def rank_step(rank: int) -> str:
    """The step in a path from a ``PerRank`` to the value of one rank."""
    return f"@{rank}"
