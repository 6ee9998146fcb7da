"""Proves that boxes hold every element of a tensor exactly once, or shows where they do not.

The proof looks at corners only. Add up the boxes as functions that are 1 inside and 0 outside,
and take away the whole tensor. What is left is 0 everywhere if and only if its mixed difference
is, and that is +1 and -1, by parity, at the corners of each box. So n boxes that are cut in d
dimensions cost one sort of n * 2**d corners, whatever their arrangement, where comparing pairs
would cost n * n. The first corner in row-major order that does not cancel is also the first
element held twice or not at all, since nothing before it adds to its sum. A grid needs no proof:
its constructor is one.

Past ``CORNERS`` corners (many dimensions cut at once, which no training does) a sweep compares
the pairs that are abreast along one dimension instead.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.reshard._box import Box, positions
from holdfast.reshard._runs import Ints

CORNERS = 1 << 22


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


def check_coverage(
    shape: tuple[int, ...], boxes: Sequence[Box], *, max_corners: int = CORNERS
) -> CoverageProblem | None:
    """``None`` if every element of a tensor of that shape is in exactly one box.

    Empty boxes hold nothing and are passed over. A problem is shown where it is met first in
    row-major order; past ``max_corners``, overlaps before holes. A corner takes about 50 bytes.
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
    pair, place = _find_problem(whole, [boxes[index] for index in kept], max_corners)
    if pair:
        first, second = sorted(kept[index] for index in pair)
        shared = boxes[first].intersect(boxes[second])
        assert shared is not None  # noqa: S101 -- both hold the element found
        return Overlap(box=shared, first=first, second=second)
    return None if place is None else Hole(box=place)


def _find_problem(whole: Box, boxes: list[Box], max_corners: int) -> tuple[list[int], Box | None]:
    """Two boxes that overlap, or a place that none holds."""
    starts, stops, edges = _ranked(whole, boxes)
    cut = [dim for dim, along in enumerate(edges) if len(along) > 2]  # noqa: PLR2004 -- two ends
    if not cut or len(boxes) << len(cut) <= max_corners:
        wrong = _first_wrong(starts, stops, edges, cut)
        if wrong is None:
            return [], None
        pair = np.flatnonzero(((starts <= wrong) & (wrong < stops)).all(axis=1))[:2].tolist()
    else:
        pair = _overlapping_pair(starts, stops)
        wrong = None if pair else _first_unheld(starts, stops, edges)
    if pair or wrong is None:
        return pair, None
    low = tuple(along[at] for along, at in zip(edges, wrong.tolist(), strict=True))
    high = tuple(along[at + 1] for along, at in zip(edges, wrong.tolist(), strict=True))
    return [], Box(low, high)


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


def _first_wrong(starts: Ints, stops: Ints, edges: list[list[int]], cut: list[int]) -> Ints | None:
    """The first place of the grid of all edges that is held other than once.

    Every box spans the dimensions that are not cut, so they say nothing.
    """
    radix = [len(edges[dim]) for dim in cut]
    signs = np.ones(len(starts) + 1, dtype=np.int64)
    signs[-1] = -1
    keys = np.zeros(len(signs), dtype=np.int64)
    places = np.zeros((1, 0), dtype=np.int64)
    for nth, dim in enumerate(cut):
        low = np.tile(np.append(starts[:, dim], 0), 1 << nth)
        high = np.tile(np.append(stops[:, dim], radix[nth] - 1), 1 << nth)
        keys = np.concatenate([keys * radix[nth] + low, keys * radix[nth] + high])
        signs = np.concatenate([signs, -signs])
        found, keys = np.unique(keys, return_inverse=True)
        before, at = np.divmod(found, radix[nth])
        places = np.hstack([places[before], at[:, None]])
    left = np.zeros(len(places), dtype=np.int64)
    np.add.at(left, keys, signs)
    wrong = np.flatnonzero(left)
    if not len(wrong):
        return None
    place = np.zeros(len(edges), dtype=np.int64)
    place[cut] = places[wrong[0]]
    return place


def _overlapping_pair(starts: Ints, stops: Ints) -> list[int]:
    """Two boxes that share an element, by a sweep along the dimension with fewest abreast."""
    count, dims = starts.shape
    dim = min(range(dims), key=lambda d: _most_abreast(starts[:, d], stops[:, d]))
    active = np.empty(count, dtype=np.int64)
    width = 0
    swept_to = -1
    for index in np.argsort(starts[:, dim], kind="stable").tolist():
        here = int(starts[index, dim])
        if here > swept_to:
            kept = active[:width][stops[active[:width], dim] > here]
            width, swept_to = len(kept), here
            active[:width] = kept
        others = active[:width]
        meets = (starts[others] < stops[index]) & (starts[index] < stops[others])
        found = np.flatnonzero(meets.all(axis=1))
        if len(found):
            return [int(others[found[0]]), index]
        active[width] = index
        width += 1
    return []


def _most_abreast(starts: Ints, stops: Ints) -> int:
    change = np.zeros(int(stops.max()) + 1, dtype=np.int64)
    np.add.at(change, starts, 1)
    np.add.at(change, stops, -1)
    return int(np.cumsum(change).max())


def _first_unheld(starts: Ints, stops: Ints, edges: list[list[int]]) -> Ints | None:
    """The first place of the grid of all edges that no box holds; the boxes are disjoint.

    Dimension by dimension: the first slab whose boxes fill less than its cross-section has it.
    """
    here = np.arange(len(starts))
    place: list[int] = []
    for dim, along in enumerate(edges):
        full = 1
        volumes = [1] * len(here)
        for other in range(dim + 1, len(edges)):
            full *= edges[other][-1]
            size = edges[other]
            spans = zip(starts[here, other].tolist(), stops[here, other].tolist(), strict=True)
            volumes = [
                volume * (size[last] - size[first])
                for volume, (first, last) in zip(volumes, spans, strict=True)
            ]
        change = [0] * len(along)
        spans = zip(starts[here, dim].tolist(), stops[here, dim].tolist(), strict=True)
        for volume, (first, last) in zip(volumes, spans, strict=True):
            change[first] += volume
            change[last] -= volume
        filled = itertools.accumulate(change[:-1])
        slab = next((nth for nth, volume in enumerate(filled) if volume < full), None)
        if slab is None:
            return None
        place.append(slab)
        here = here[(starts[here, dim] <= slab) & (stops[here, dim] > slab)]
    return np.array(place, dtype=np.int64)
