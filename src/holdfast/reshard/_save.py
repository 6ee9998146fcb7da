"""Decides which rank writes which box. Knows the leaves of all ranks, and writes nothing.

Every box is written once in the whole job. What one rank holds alone, it writes. What several
hold, one of them writes: leaves are dealt out, those with the largest pieces first, each to the
replica that has the least to write. Greedy dealing in falling order leaves no rank with more
than the mean and one piece, among ranks that hold the same (Graham 1969). A leaf larger than
a replica's share of all bytes is cut into pieces first, by rows where it has enough of them.

The same groups give the same plan on every rank. A plan is as large as the leaves, not leaves
x ranks: a leaf's cells are a grid, and their writers runs of ranks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.reshard._box import Box
from holdfast.reshard._grid import Grid
from holdfast.reshard._leaves import Layout, Leaf, RankGroup
from holdfast.reshard._mesh import MeshGrid, Part, Replicate, row_major
from holdfast.reshard._runs import IndexRuns, Ints

PIECE_BYTES = 8 * 1024 * 1024
"""No piece of a replicated leaf is cut to less than about this, so that files keep few entries."""

_CACHED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """One leaf: its cells, and the rank that writes each, in the order of the cells.

    ``replicas`` are the writing replicas of the layout, one for each piece of what a coordinate
    holds.
    """

    leaf: Leaf
    grid: Grid
    writers: IndexRuns
    layout: Layout
    laid: MeshGrid
    replicas: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """A box that a rank writes, and where it is in the rank's own tensor."""

    leaf: Leaf
    part: Part


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """Who writes what. ``bytes_of`` is by rank."""

    tensors: tuple[TensorPlan, ...]
    bytes_of: tuple[int, ...]

    def writes_of(self, rank: int) -> list[Write]:
        """What one rank writes, leaf by leaf, each in row-major order; costs about that much."""
        writes: list[Write] = []
        places: dict[int, tuple[tuple[int, ...], int] | None] = {}
        known: dict[tuple[int, int, int], list[Part]] = {}  # leaves of one shape are many
        for tensor in self.tensors:
            key = id(tensor.layout)
            if key not in places:
                places[key] = _place(tensor.layout, rank)
            place = places[key]
            if place is None:
                continue
            if 0 in tensor.leaf.shape:
                if tensor.writers[0] == rank:
                    whole = Part.alone(Box.whole(tensor.leaf.shape))
                    writes.append(Write(leaf=tensor.leaf, part=whole))
                continue
            coordinate, replica = place
            for piece, writer in enumerate(tensor.replicas):
                if writer == replica:
                    at = (key, id(tensor.laid), piece)
                    if at not in known:
                        known[at] = tensor.laid.parts(coordinate, piece)
                    writes += [Write(leaf=tensor.leaf, part=part) for part in known[at]]
        return writes


def plan_save(groups: Sequence[RankGroup], *, piece_bytes: int = PIECE_BYTES) -> SavePlan:
    """Decide who writes what, for ranks 0 to the highest in ``groups``.

    A leaf that several groups list, in layouts of their own, counts as replicated over them.
    ``ValueError`` if groups differ about the dtype or shape of a leaf, or a layout names a rank
    that does not list the leaf.
    """
    world = 1 + max((rank for group in groups for rank in group.ranks), default=-1)
    held = _held(groups)
    total = sum(leaf.itemsize * math.prod(leaf.shape) for leaf, _ in held.values())
    dealer = _Dealer(world, total, piece_bytes)
    return SavePlan(tensors=dealer.deal(list(held.values())), bytes_of=dealer.bytes_of())


def _held(groups: Sequence[RankGroup]) -> dict[str, tuple[Leaf, list[Layout]]]:
    """Each leaf by name, with every layout in which some ranks hold it."""
    leaves: dict[str, Leaf] = {}
    listed: dict[str, dict[Layout | None, list[int]]] = {}
    for index, group in enumerate(groups):
        for leaf in group.leaves.leaves:
            known = leaves.setdefault(leaf.name, leaf)
            if (known.dtype, known.itemsize, known.shape) != (
                leaf.dtype,
                leaf.itemsize,
                leaf.shape,
            ):
                raise ValueError(
                    f"leaf {leaf.name!r} is {known.dtype} {known.shape} on some ranks and "
                    f"{leaf.dtype} {leaf.shape} on rank {group.ranks[0]}"
                )
            layout = None if leaf.layout is None else group.leaves.layouts[leaf.layout]
            listed.setdefault(leaf.name, {}).setdefault(layout, []).append(index)
    resolved: dict[tuple[Layout | None, tuple[int, ...]], Layout] = {}
    held = {}
    for name, layouts in listed.items():
        found = []
        for layout, indices in layouts.items():
            key = (layout, tuple(indices))
            if key not in resolved:
                resolved[key] = _resolve(name, layout, [groups[index] for index in indices])
            found.append(resolved[key])
        held[name] = (leaves[name], found)
    return held


def _resolve(name: str, layout: Layout | None, groups: list[RankGroup]) -> Layout:
    ranks = sorted(rank for group in groups for rank in group.ranks)
    if layout is None:
        return Layout(
            mesh_shape=(len(ranks),), ranks=IndexRuns.of(ranks), placements=(Replicate(),)
        )
    missing = set(layout.ranks) - set(ranks)
    if missing:
        raise ValueError(
            f"leaf {name!r} is laid over rank {min(missing)}, which does not list it so"
        )
    return layout


class _Dealer:
    """Deals leaves to replicas. Holds what each rank has to write so far."""

    def __init__(self, world: int, total: int, piece_bytes: int) -> None:
        self._load = np.zeros(world, dtype=np.int64)
        self._total = total
        self._piece_bytes = piece_bytes
        self._teams: dict[int, Ints] = {}
        self._laid: dict[int, tuple[Grid, Ints, Ints, Ints]] = {}
        self._cuts: dict[tuple[int, tuple[int, ...], int], tuple[MeshGrid, int]] = {}
        self._writers: dict[tuple[int, int, tuple[int, ...]], IndexRuns] = {}

    def bytes_of(self) -> tuple[int, ...]:
        return tuple(self._load.tolist())

    def deal(self, held: list[tuple[Leaf, list[Layout]]]) -> tuple[TensorPlan, ...]:
        choices = []
        largest = []
        for leaf, found in held:
            cut = [self._cut_once(leaf, layout) for layout in found]
            choices.append([(layout, laid) for layout, (laid, _) in zip(found, cut, strict=True)])
            largest.append(max(nbytes for _, nbytes in cut))
        free = [len(found) > 1 or len(self._team(found[0][0])) > 1 for found in choices]
        order = sorted(range(len(held)), key=lambda index: (free[index], -largest[index], index))
        plans: dict[int, TensorPlan] = {}
        for index in order:
            plans[index] = self._assign(held[index][0], choices[index])
        return tuple(plans[index] for index in range(len(held)))

    def _cut_once(self, leaf: Leaf, layout: Layout) -> tuple[MeshGrid, int]:
        """How a leaf is cut, and the bytes of its largest piece: once for all leaves alike."""
        key = (id(layout), leaf.shape, leaf.itemsize)
        if key not in self._cuts:
            laid = self._cut(leaf, layout)
            self._cuts[key] = laid, leaf.itemsize * math.prod(laid.largest_piece())
        return self._cuts[key]

    def _cut(self, leaf: Leaf, layout: Layout) -> MeshGrid:
        laid = MeshGrid(
            shape=leaf.shape, mesh_shape=layout.mesh_shape, placements=layout.placements
        )
        extents = laid.largest_piece()
        nbytes = leaf.itemsize * math.prod(extents)
        if nbytes * len(self._load) <= self._total or not extents:
            return laid
        pieces = min(len(self._team(layout)), -(-nbytes // self._piece_bytes))
        roomy = [dim for dim, extent in enumerate(extents) if extent >= pieces]
        dim = roomy[0] if roomy else extents.index(max(extents))
        return MeshGrid(
            shape=leaf.shape,
            mesh_shape=layout.mesh_shape,
            placements=layout.placements,
            pieces=min(pieces, extents[dim]),
            pieces_dim=dim,
        )

    def _assign(self, leaf: Leaf, choices: list[tuple[Layout, MeshGrid]]) -> TensorPlan:
        layout, laid = choices[0]
        if len(choices) > 1:
            layout, laid = min(
                choices, key=lambda choice: int(self._load[self._team(choice[0])].max(axis=1).min())
            )
        team = self._team(layout)
        grid, coordinates, pieces, elements = self._geometry(laid)
        if 0 in leaf.shape:
            replicas = [int(self._load[team[:, 0]].argmin())]
            writers = IndexRuns.of([int(team[replicas[0], 0])])
        else:
            replicas = []
            for piece in range(laid.pieces):
                replica = int(self._load[team].max(axis=1).argmin()) if len(team) > 1 else 0
                self._load[team[replica]] += elements[:, piece] * leaf.itemsize
                replicas.append(replica)
            key = (id(layout), id(laid), tuple(replicas))
            if key not in self._writers:
                offsets = _replica_offsets(layout)[replicas]
                runs = IndexRuns.of(layout.ranks.array()[coordinates + offsets[pieces]])
                self._writers[key] = runs
            writers = self._writers[key]
        return TensorPlan(
            leaf=leaf,
            grid=grid,
            writers=writers,
            layout=layout,
            laid=laid,
            replicas=tuple(replicas),
        )

    def _team(self, layout: Layout) -> Ints:
        """Ranks as an array of replicas by holders."""
        key = id(layout)
        if key not in self._teams:
            holders = _offsets(layout, replicas=False)
            at = _replica_offsets(layout)[:, None] + holders[None, :]
            self._teams[key] = layout.ranks.array()[at]
        return self._teams[key]

    def _geometry(self, laid: MeshGrid) -> tuple[Grid, Ints, Ints, Ints]:
        key = id(laid)  # one for all leaves alike, and kept
        if key not in self._laid:
            if len(self._laid) >= _CACHED:
                self._laid.pop(next(iter(self._laid)))
            self._laid[key] = (laid.grid(), *laid.owners(), laid.elements())
        return self._laid[key]


def _replica_offsets(layout: Layout) -> Ints:
    return _offsets(layout, replicas=True)


def _offsets(layout: Layout, *, replicas: bool) -> Ints:
    """Numbers in the mesh of the coordinates along those mesh dimensions that do, or do not,
    replicate; row-major, the others 0."""
    offsets = np.zeros(1, dtype=np.int64)
    for count, stride, placement in zip(
        layout.mesh_shape, row_major(layout.mesh_shape), layout.placements, strict=True
    ):
        if isinstance(placement, Replicate) == replicas:
            offsets = np.add.outer(offsets, np.arange(count) * stride).ravel()
    return offsets


def _place(layout: Layout, rank: int) -> tuple[tuple[int, ...], int] | None:
    """The rank's coordinate in the mesh, and which replica it is part of."""
    found = np.flatnonzero(layout.ranks.array() == rank)
    if not len(found):
        return None
    coordinate = tuple(int(at) for at in np.unravel_index(int(found[0]), layout.mesh_shape))
    replica = 0
    for at, count, placement in zip(coordinate, layout.mesh_shape, layout.placements, strict=True):
        if isinstance(placement, Replicate):
            replica = replica * count + at
    return coordinate, replica
