"""Knows how mesh dimensions cut one dimension of a tensor. Knows no ranks and no other dimension.

The cutting is DTensor's: a dimension of length L over n coordinates is chunks of ceil(L / n), of
which the last may be shorter or empty; the next mesh dimension cuts each chunk again. A strided
cut first cuts into ``factor`` chunks, cuts every one of these over the n coordinates, and gives a
coordinate its part of each. So what a coordinate holds is one or several intervals, in rising
order, and the intervals of all coordinates tile the dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.reshard._runs import Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One mesh dimension of ``count`` coordinates that cuts; ``factor`` is 1 unless strided."""

    count: int
    factor: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """Intervals sorted by owner, then start; ``owners`` are coordinates in row-major order."""

    starts: Ints
    lengths: Ints
    owners: Ints

    @property
    def stops(self) -> Ints:
        return self.starts + self.lengths

    def local(self) -> Ints:
        """Where each interval begins in its owner's local array."""
        ahead = np.cumsum(self.lengths) - self.lengths
        new = np.diff(self.owners, prepend=-1) != 0
        local: Ints = ahead - ahead[new][np.cumsum(new) - 1]
        return local

    def totals(self, owners: int) -> Ints:
        """How much each of that many owners holds."""
        held = np.zeros(owners, dtype=np.int64)
        np.add.at(held, self.owners, self.lengths)
        return held

    def _select(self, keep: Ints | np.ndarray[tuple[int], np.dtype[np.bool_]]) -> "Intervals":
        return Intervals(
            starts=self.starts[keep], lengths=self.lengths[keep], owners=self.owners[keep]
        )


def cut_axis(size: int, splits: Sequence[Split], at: Sequence[int] | None = None) -> Intervals:
    """The intervals of all coordinates, or of the one coordinate ``at``.

    For all of them this takes memory and time by their number; for one, by its own intervals.
    Owners are numbered as in an array whose dimensions are the splits' counts.
    """
    held = Intervals(
        starts=np.zeros(min(size, 1), dtype=np.int64),
        lengths=np.full(min(size, 1), size, dtype=np.int64),
        owners=np.zeros(min(size, 1), dtype=np.int64),
    )
    for index, split in enumerate(splits):
        only = None if at is None else at[index]
        if split.factor == 1:
            held = _chunked(held, split.count, only)
        else:
            held = _strided(held, split, only)
    return held


def _chunked(held: Intervals, count: int, only: int | None) -> Intervals:
    if not len(held.starts):
        return held
    local = held.local()
    ends = local + held.lengths
    chunk = -(-held.totals(int(held.owners[-1]) + 1) // count)[held.owners]
    if only is None:
        first = local // chunk
        pieces = (ends - 1) // chunk - first + 1
        source = np.repeat(np.arange(len(local)), pieces)
        nth = np.arange(len(source)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        part = first[source] + nth
    else:
        source = np.arange(len(local))
        part = np.full(len(local), only, dtype=np.int64)
    low = np.maximum(local[source], part * chunk[source])
    high = np.minimum(ends[source], (part + 1) * chunk[source])
    cut = Intervals(
        starts=(held.starts - local)[source] + low,
        lengths=high - low,
        owners=held.owners[source] * count + part,
    )
    return cut._select(high > low)  # noqa: SLF001 -- our own


def _strided(held: Intervals, split: Split, only: int | None) -> Intervals:
    cut = _chunked(_chunked(held, split.factor, None), split.count, only)
    first, part = np.divmod(cut.owners, split.count)
    owners = first // split.factor * split.count + part
    cut = Intervals(starts=cut.starts, lengths=cut.lengths, owners=owners)
    return _joined(cut._select(np.lexsort((cut.starts, owners))))  # noqa: SLF001 -- our own


def _joined(cut: Intervals) -> Intervals:
    """Neighbours of one owner made one."""
    if not len(cut.starts):
        return cut
    new = np.ones(len(cut.starts), dtype=np.bool_)
    new[1:] = (np.diff(cut.owners) != 0) | (cut.starts[1:] != cut.stops[:-1])
    begins = np.flatnonzero(new)
    return Intervals(
        starts=cut.starts[begins],
        lengths=np.add.reduceat(cut.lengths, begins),
        owners=cut.owners[begins],
    )
