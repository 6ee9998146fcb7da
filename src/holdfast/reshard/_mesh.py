"""Knows which boxes of a tensor each coordinate of a mesh holds. Knows no ranks and no torch.

The placements mean what DTensor's of the same names mean, ``StridedShard`` what its
``_StridedShard`` does: mesh dimensions cut from left to right. Dimensions of a tensor are cut
independently, so a coordinate holds a product of intervals (see ``_axis``), in most layouts one
box. ``Partial`` has no counterpart here: no rank holds the value of such a tensor.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.reshard._axis import Intervals, Split, cut_axis
from holdfast.reshard._box import Box, positions
from holdfast.reshard._grid import Grid
from holdfast.reshard._runs import Ints


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every coordinate of this mesh dimension holds the same."""


@dataclass(frozen=True, slots=True)
class Shard:
    """This mesh dimension cuts the tensor's dimension ``dim`` into chunks."""

    dim: int


@dataclass(frozen=True, slots=True)
class StridedShard:
    """As ``Shard``, in each of ``split_factor`` chunks: what FSDP2 makes of a TP tensor."""

    dim: int
    split_factor: int


Placement = Replicate | Shard | StridedShard


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A box of a tensor, and the same elements as ``local`` box of an array that holds them."""

    box: Box
    local: Box
    array_shape: tuple[int, ...]

    @classmethod
    def alone(cls, box: Box) -> "Part":
        """The box as an array of its own."""
        return cls(box=box, local=Box.whole(box.shape), array_shape=box.shape)

    def within(self, box: Box) -> "Part":
        """Of this part, only a box that it contains."""
        if box is self.box:
            return self
        shift = [there - here for there, here in zip(self.local.start, self.box.start, strict=True)]
        local = Box(
            tuple(at + by for at, by in zip(box.start, shift, strict=True)),
            tuple(at + by for at, by in zip(box.stop, shift, strict=True)),
        )
        return Part(box=box, local=local, array_shape=self.array_shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshGrid:
    """A tensor of ``shape`` laid over a mesh.

    ``pieces`` more than 1 cuts what each coordinate holds once more, along ``pieces_dim``; who
    holds what stays the same.
    """

    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    pieces: int = 1
    pieces_dim: int = 0

    def __post_init__(self) -> None:
        positions(("shape", self.shape))
        check_placements(self.mesh_shape, self.placements)
        for placement in self.placements:
            if not isinstance(placement, Replicate) and placement.dim >= len(self.shape):
                raise ValueError(f"{placement} cuts a dimension that shape={self.shape} lacks")
        if self.pieces < 1 or (self.pieces > 1 and not 0 <= self.pieces_dim < len(self.shape)):
            raise ValueError(
                f"shape={self.shape} cannot be cut in pieces={self.pieces} "
                f"along pieces_dim={self.pieces_dim}"
            )

    def grid(self) -> Grid:
        """The cells: what one coordinate holds is one of them, several, or nothing."""
        if 0 in self.shape:
            return Grid.whole(self.shape)
        axes = [np.sort(self._axis(dim).starts)[1:] for dim in range(len(self.shape))]
        return Grid.of_cuts(self.shape, axes)

    def owners(self) -> tuple[Ints, Ints]:
        """For each cell of the grid in order: its coordinate, and its piece of what that holds.

        A coordinate is a row-major number in the mesh; of its replicas it is the first.
        """
        coordinates = np.zeros(1, dtype=np.int64)
        pieces = np.zeros(1, dtype=np.int64)
        if 0 in self.shape:
            return coordinates, pieces
        strides = row_major(self.mesh_shape)
        for dim in range(len(self.shape)):
            axis = self._axis(dim)
            owners = axis.owners[np.argsort(axis.starts)]
            owners, piece = np.divmod(owners, self._pieces_along(dim))
            along = np.zeros(len(owners), dtype=np.int64)
            for mesh_dim in reversed(self._mesh_dims(dim)):
                owners, digit = np.divmod(owners, self.mesh_shape[mesh_dim])
                along += digit * strides[mesh_dim]
            coordinates = np.add.outer(coordinates, along).ravel()
            pieces = np.add.outer(pieces, piece).ravel()
        return coordinates, pieces

    def elements(self) -> Ints:
        """How many elements each holder has of each piece, as an array of holders by pieces."""
        kinds = [isinstance(placement, Replicate) for placement in self.placements]
        sizes = [1 if same else n for n, same in zip(self.mesh_shape, kinds, strict=True)]
        held = np.ones((*sizes, self.pieces), dtype=np.int64)
        for dim in range(len(self.shape)):
            mesh_dims = self._mesh_dims(dim)
            counts = [self.mesh_shape[mesh_dim] for mesh_dim in mesh_dims]
            pieces = self._pieces_along(dim)
            totals = self._axis(dim).totals(math.prod(counts) * pieces)
            view = [1] * len(self.mesh_shape)
            for mesh_dim, count in zip(mesh_dims, counts, strict=True):
                view[mesh_dim] = count
            held = held * totals.reshape(*view, pieces)
        return held.reshape(-1, self.pieces)

    def local_shape(self, coordinate: Sequence[int]) -> tuple[int, ...]:
        """The shape of the array in which that coordinate holds its elements."""
        return tuple(int(self._at(dim, coordinate).lengths.sum()) for dim in range(len(self.shape)))

    def largest_piece(self) -> tuple[int, ...]:
        """The shape of the first piece of the first coordinate: as chunks are cut, none is larger
        along any dimension."""
        held = self.local_shape((0,) * len(self.mesh_shape))
        return tuple(-(-size // self._pieces_along(dim)) for dim, size in enumerate(held))

    def parts(self, coordinate: Sequence[int], piece: int = 0) -> list[Part]:
        """What the coordinate holds of that piece, in row-major order; costs only that much."""
        axes = []
        extents = []
        for dim in range(len(self.shape)):
            held = cut = self._at(dim, coordinate)
            if self._pieces_along(dim) > 1:
                cut = self._at(dim, coordinate, piece)
            extents.append(int(held.lengths.sum()))
            axes.append(_placed(cut, held))
        shape = tuple(extents)
        return [
            Part(
                box=Box(tuple(a for a, _, _ in spans), tuple(a + n for a, _, n in spans)),
                local=Box(tuple(b for _, b, _ in spans), tuple(b + n for _, b, n in spans)),
                array_shape=shape,
            )
            for spans in itertools.product(*axes)
        ]

    def _at(self, dim: int, coordinate: Sequence[int], *piece: int) -> Intervals:
        """What the coordinate holds along a dimension, or only that piece of it."""
        at = [coordinate[mesh_dim] for mesh_dim in self._mesh_dims(dim)]
        cuts = [Split(count=self.pieces) for _ in piece]
        return cut_axis(self.shape[dim], [*self._splits(dim), *cuts], [*at, *piece])

    def _mesh_dims(self, dim: int) -> list[int]:
        return [
            mesh_dim
            for mesh_dim, placement in enumerate(self.placements)
            if not isinstance(placement, Replicate) and placement.dim == dim
        ]

    def _splits(self, dim: int) -> list[Split]:
        return [
            Split(count=count, factor=getattr(placement, "split_factor", 1))
            for count, placement in zip(self.mesh_shape, self.placements, strict=True)
            if not isinstance(placement, Replicate) and placement.dim == dim
        ]

    def _pieces_along(self, dim: int) -> int:
        return self.pieces if dim == self.pieces_dim else 1

    def _axis(self, dim: int) -> Intervals:
        splits = self._splits(dim)
        if self._pieces_along(dim) > 1:
            splits.append(Split(count=self.pieces))
        return cut_axis(self.shape[dim], splits)


def mesh_grid(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]
) -> MeshGrid:
    """A tensor laid over a mesh by one placement for each mesh dimension."""
    return MeshGrid(shape=shape, mesh_shape=mesh_shape, placements=placements)


def check_placements(mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]) -> None:
    """Refuse placements that no tensor could have on a mesh of that shape."""
    positions(("mesh_shape", mesh_shape))
    if len(mesh_shape) != len(placements) or 0 in mesh_shape:
        raise ValueError(f"mesh_shape={mesh_shape} and placements={placements} do not fit")
    for placement in placements:
        if isinstance(placement, Replicate):
            continue
        factor = placement.split_factor if isinstance(placement, StridedShard) else 1
        if placement.dim < 0 or factor < 1:
            raise ValueError(f"{placement} needs a dimension >= 0 and a split factor >= 1")


def row_major(shape: tuple[int, ...]) -> list[int]:
    """How far one step along each dimension goes in row-major order."""
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _placed(cut: Intervals, held: Intervals) -> list[tuple[int, int, int]]:
    """Start, local start and length of each interval of ``cut``, which lie within ``held``."""
    within = np.searchsorted(held.starts, cut.starts, side="right") - 1
    local = (held.local() - held.starts)[within] + cut.starts
    return list(zip(cut.starts.tolist(), local.tolist(), cut.lengths.tolist(), strict=True))
