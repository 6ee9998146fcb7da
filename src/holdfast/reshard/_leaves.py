"""Knows what a rank says of its tensors before a save, and which ranks say the same.

Ranks of one job mostly hold the same leaves in the same layouts. So a rank sends the digest of
its list to all, and only the first of those with the same digest sends the list: what travels is
tensors + ranks, not tensors x ranks. Knows no coordinator: these are the values and the bytes.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.reshard._box import positions
from holdfast.reshard._mesh import (
    MeshGrid,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    check_placements,
)
from holdfast.reshard._runs import IndexRuns


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Tensors laid over a mesh: ``ranks`` are those of its coordinates, in row-major order."""

    mesh_shape: tuple[int, ...]
    ranks: IndexRuns
    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        check_placements(self.mesh_shape, self.placements)
        ranks = self.ranks.array()
        size = 1
        for count in self.mesh_shape:
            size *= count
        if len(ranks) != size or len(set(ranks.tolist())) != size:
            raise ValueError(
                f"mesh_shape={self.mesh_shape} needs {size} different ranks, not {self.ranks}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One tensor of a rank, by its shape as a whole.

    ``layout`` is a number in its list's layouts. ``None`` is no layout: every rank that lists
    the leaf so holds all of it.
    """

    name: str
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    layout: int | None = None

    def __post_init__(self) -> None:
        positions(("shape", self.shape))
        if self.itemsize < 1:
            raise ValueError(f"itemsize must be at least 1, not {self.itemsize!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafList:
    """All that a rank holds. Equal lists encode to equal bytes."""

    leaves: tuple[Leaf, ...]
    layouts: tuple[Layout, ...] = ()

    def __post_init__(self) -> None:
        names = set()
        for leaf in self.leaves:
            if leaf.name in names:
                raise ValueError(f"two leaves are named {leaf.name!r}")
            names.add(leaf.name)
            if leaf.layout is None:
                continue
            if not 0 <= leaf.layout < len(self.layouts):
                raise ValueError(f"leaf {leaf.name!r} has layout {leaf.layout}, which is not there")
            layout = self.layouts[leaf.layout]
            MeshGrid(shape=leaf.shape, mesh_shape=layout.mesh_shape, placements=layout.placements)

    def encode(self) -> bytes:
        """The list as bytes, for other ranks of the same version of holdfast."""
        layouts = [
            [layout.mesh_shape, layout.ranks.runs, [_plain(p) for p in layout.placements]]
            for layout in self.layouts
        ]
        leaves = [
            [leaf.name, leaf.dtype, leaf.itemsize, leaf.shape, leaf.layout] for leaf in self.leaves
        ]
        return json.dumps([layouts, leaves], separators=(",", ":")).encode()

    def digest(self) -> bytes:
        """16 bytes; ranks with the same digest have the same list."""
        return hashlib.blake2b(self.encode(), digest_size=16).digest()

    @classmethod
    def decode(cls, data: bytes) -> "LeafList":
        """The inverse of ``encode``; ``ValueError`` for any other bytes."""
        try:
            layouts, leaves = json.loads(data)
            return cls(
                layouts=tuple(
                    Layout(
                        mesh_shape=tuple(mesh_shape),
                        ranks=IndexRuns(runs=tuple((a, b, c) for a, b, c in runs)),
                        placements=tuple(map(_placement, placements)),
                    )
                    for mesh_shape, runs, placements in layouts
                ),
                leaves=tuple(
                    Leaf(name=name, dtype=dtype, itemsize=size, shape=tuple(shape), layout=layout)
                    for name, dtype, size, shape, layout in leaves
                ),
            )
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"these bytes are not a list of leaves: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """Ranks, ascending, that hold the same leaves in the same layouts."""

    ranks: tuple[int, ...]
    leaves: LeafList


def group_ranks(digests: Sequence[bytes]) -> list[tuple[int, ...]]:
    """Ranks by digest, given in rank order; groups and ranks in them ascend.

    The first rank of each group is the one to send its list.
    """
    groups: dict[bytes, list[int]] = {}
    for rank, digest in enumerate(digests):
        groups.setdefault(digest, []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]


def _plain(placement: Placement) -> list[int]:
    match placement:
        case Replicate():
            return []
        case Shard(dim):
            return [dim]
        case StridedShard(dim, factor):
            return [dim, factor]


def _placement(plain: list[int]) -> Placement:
    match plain:
        case []:
            return Replicate()
        case [int(dim)]:
            return Shard(dim)
        case [int(dim), int(factor)]:
            return StridedShard(dim, factor)
    raise ValueError(f"{plain!r} is no placement")
