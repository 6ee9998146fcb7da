"""Shows that boxes hold every element of a tensor exactly once, or where they do not.

Give every slice along every dimension a random weight, and every element the product of the
weights of its slices. If each element is held once, the weights of the boxes add up to that of the
tensor, whatever the weights are. If not, what is left is a polynomial in the weights that is not
0, of a degree of at most the number of dimensions, and so it is 0 by chance only (Schwartz and
Zippel): computed modulo a prime near 2**31, three times, for 64 dimensions with a chance of 2**-75.
The weights are drawn anew each time, so nobody can prepare boxes that pass.

The weight of a box is a product of differences of running sums. So n boxes of d dimensions cost n
times d, whatever their arrangement, where comparing pairs would cost n * n. Slab by slab along the
first dimension, the same sum tells the first slab that is wrong, then the first wrong slab in that
one along the next: the first element in row-major order that is held twice or not at all. A grid
needs no proof: its constructor is one.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from holdfast.reshard._box import Box, positions
from holdfast.reshard._runs import Ints

_PRIME: Final = 2**31 - 1
_TRIALS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """``box`` is not within the tensor."""

    box: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """The elements ``box`` are in two boxes, ``first`` and ``second`` of the list."""

    box: Box
    first: int
    second: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Hole:
    """No box holds the elements ``box``, the first of them in row-major order."""

    box: Box


CoverageProblem = Outside | Overlap | Hole


def check_coverage(shape: tuple[int, ...], boxes: Sequence[Box]) -> CoverageProblem | None:
    """``None`` if every element of a tensor of that shape is in exactly one box.

    Empty boxes hold nothing and are passed over. A problem is shown where it is met first in
    row-major order. Time and memory are by the number of boxes times dimensions.
    """
    positions(("shape", shape))
    whole = Box.whole(shape)
    for box in boxes:
        if len(box.start) != len(shape) or not whole.contains(box):
            return Outside(box=box)
    if whole.is_empty:
        return None
    kept = [index for index, box in enumerate(boxes) if not box.is_empty]
    if not kept:
        return Hole(box=whole)
    starts, stops, edges = _ranked(whole, [boxes[index] for index in kept])
    wrong = _first_wrong(starts, stops, [len(along) for along in edges])
    if wrong is None:
        return None
    pair = np.flatnonzero(((starts <= wrong) & (wrong < stops)).all(axis=1))[:2].tolist()
    if pair:
        first, second = (kept[index] for index in pair)
        shared = boxes[first].intersect(boxes[second])
        assert shared is not None  # noqa: S101 -- both hold the element found
        return Overlap(box=shared, first=first, second=second)
    low = tuple(along[at] for along, at in zip(edges, wrong.tolist(), strict=True))
    high = tuple(along[at + 1] for along, at in zip(edges, wrong.tolist(), strict=True))
    return Hole(box=Box(low, high))


def _ranked(whole: Box, boxes: list[Box]) -> tuple[Ints, Ints, list[list[int]]]:
    """Starts and stops as numbers of edges, and the edges of each dimension.

    Edges may be of any size, so they are ranked before NumPy sees them.
    """
    edges: list[list[int]] = []
    shape = (len(boxes), len(whole.start))
    starts, stops = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int64)
    for dim, end in enumerate(whole.stop):
        low = [box.start[dim] for box in boxes]
        high = [box.stop[dim] for box in boxes]
        along = sorted({0, end, *low, *high})
        rank = {edge: index for index, edge in enumerate(along)}
        starts[:, dim] = [rank[edge] for edge in low]
        stops[:, dim] = [rank[edge] for edge in high]
        edges.append(along)
    return starts, stops, edges


def _first_wrong(starts: Ints, stops: Ints, edges: list[int]) -> Ints | None:
    """The first place, in the grid of all edges, that is held other than once.

    Every box spans the dimensions that are not cut, so they say nothing.
    """
    place = np.zeros(len(edges), dtype=np.int64)
    cut = [dim for dim, count in enumerate(edges) if count > 2]  # noqa: PLR2004 -- two ends
    if not cut:
        return None if len(starts) == 1 else place
    here = np.arange(len(starts))
    for dim, (weights, full) in zip(cut, _behind(starts, stops, edges, cut), strict=True):
        held = np.zeros((edges[dim], _TRIALS), dtype=np.int64)
        np.add.at(held, starts[here, dim], weights[here])
        np.subtract.at(held, stops[here, dim], weights[here])
        slabs = np.cumsum(held, axis=0)[:-1]
        wrong = ((slabs - full) % _PRIME).any(axis=1)
        if dim == cut[0] and not wrong.any():
            return None
        place[dim] = slab = int(wrong.argmax())
        here = here[(starts[here, dim] <= slab) & (slab < stops[here, dim])]
    return place


def _behind(
    starts: Ints, stops: Ints, edges: list[int], cut: list[int]
) -> list[tuple[npt.NDArray[np.uint32], Ints]]:
    """For each cut dimension, the weight of each box, and of the tensor, across those after it."""
    weights = np.ones((len(starts), _TRIALS), dtype=np.int64)
    full = np.ones(_TRIALS, dtype=np.int64)
    behind = []
    for dim in reversed(cut):
        behind.append((weights.astype(np.uint32), full))
        drawn = np.frombuffer(secrets.token_bytes(4 * edges[dim] * _TRIALS), dtype=np.uint32)
        at = (drawn % _PRIME).astype(np.int64).reshape(-1, _TRIALS)
        weights = weights * ((at[stops[:, dim]] - at[starts[:, dim]]) % _PRIME) % _PRIME
        full = full * ((at[-1] - at[0]) % _PRIME) % _PRIME
    behind.reverse()
    return behind
