"""The least time in which a segment can be made again, for every segment and every room.

The dynamic program of Beaumont et al., "Optimal checkpointing for heterogeneous chains" (2019),
over stages ``first`` to ``last`` and slots of memory: either ``first`` is replayed and keeps all it
saves, or the stages before some ``middle`` are run, the input of ``middle`` is kept, and the stages
from it on are made again before those ahead of it. The room of a segment includes the input of its
first stage, so that all splits of a segment are shifted alike and one operation on two blocks of
rows covers them.

``O(L * W**2 * M)`` time and ``L * W * M`` numbers for ``L`` stages, segments of at most ``W``, and
``M`` slots. Numbers are of single precision: a time may be off by some millionths of a forward of
the whole chain. Where stages are not linked ``W`` is 1 and the table is one row a stage.
"""

import bisect
import itertools
from collections.abc import Iterator

import numpy as np

from holdfast.activation._solving.chain import Chain
from holdfast.activation._solving.slots import Slots

# Longer segments are not looked at when the table would be larger than this.
_MOST_BYTES = 200_000_000
_TIME = np.float32

Rows = np.ndarray[tuple[int, int], np.dtype[np.float32]]


class Remaking:
    """The table. A row holds the time of one segment for each number of slots, infinite where it
    does not fit, with ``before`` its first stage added to it: then a split is one addition."""

    def __init__(self, chain: Chain, slots: Slots) -> None:
        self._chain = chain
        self._slots = slots
        self._columns = slots.widened + 1
        count = len(chain.stages)
        longest = max(1, _MOST_BYTES // (count * self._columns * _TIME().itemsize))
        self.lengths = [min(chain.reach(first), longest) for first in range(count)]
        self._width = max(1, *self.lengths)
        self.peaks = [chain.run_peaks(each, self.lengths[each]) for each in range(count)]
        self._rises = [_rises(each) for each in self.peaks]
        times = (stage.forward_s for stage in chain.stages)
        self.before = list(itertools.accumulate(times, initial=0.0))
        # Rows of segments that do not exist are never touched, and so take no memory.
        self._rows: Rows = np.empty((count * self._width, self._columns), _TIME)
        self._enough: dict[tuple[int, int], int] = {}
        self._sums: Rows = np.empty((self._width, self._columns), _TIME)
        for first in reversed(range(count)):
            for last in range(first, first + self.lengths[first]):
                self._fill(first, last)

    def rows(self, first: int) -> Rows:
        """Segments that begin with ``first``, of 1, 2, ... stages."""
        start = first * self._width
        return self._rows[start : start + self.lengths[first]]

    def lower(self, best: np.ndarray, later: np.ndarray, first: int, *, pending_bytes: int) -> None:
        """Lower ``best`` to what it takes to run ``first`` and the ``k`` stages after it, go on
        with ``later[k]`` with their first input kept, and then make them again, for every ``k``
        that ``later`` has and every room that their run fits into. ``before`` of ``first`` is to
        be taken off afterwards."""
        rows = self.rows(first)
        shift = self._slots.size(self._chain.stages[first].input_bytes)
        for count, start, end in self._stairs(first, len(later), pending_bytes, len(best)):
            begin = max(start, shift)
            if begin < end:
                sums = self._sums[:count, : end - begin]
                np.add(
                    rows[:count, begin:end], later[:count, begin - shift : end - shift], out=sums
                )
                np.minimum(best[begin:end], sums.min(axis=0), out=best[begin:end])

    def split(self, first: int, last: int, room: int) -> int:
        """``first`` if the best is to replay it, else the stage whose input is kept."""
        stage, length = self._chain.stages[first], last - first
        kept, shift = map(self._slots.size, (stage.keep.kept_bytes, stage.input_bytes))
        replayed = np.inf
        if room >= max(kept, self._replay_from(first, last)):
            replayed = self._row(first + 1, last)[room - kept]
        fitting = self.fitting(first, length, room, self._chain.stages[last].output_bytes)
        if not fitting:
            return first
        later = self._ending(first + 1, last)[:fitting, room - shift]
        times = self.rows(first)[:fitting, room] + later - _TIME(self.before[first])
        # Of the same time the replay is preferred, and then the earliest: fewer steps.
        return first if replayed <= times.min() else first + 1 + int(times.argmin())

    def fitting(self, first: int, count: int, room: int, pending_bytes: int = 0) -> int:
        """How many of the ``count`` shortest runs from ``first`` fit, with its input kept."""
        if room < self._slots.size(self._chain.stages[first].input_bytes):
            return 0
        most_bytes = room * self._slots.slot_bytes - pending_bytes
        return bisect.bisect_right(self.peaks[first], most_bytes, hi=count)

    def _fill(self, first: int, last: int) -> None:
        stage, best = self._chain.stages[first], self._row(first, last)
        if first == last:
            enough = self._slots.size(stage.replayed_bytes)
        else:
            kept = self._slots.size(stage.keep.kept_bytes)
            start = max(kept, self._replay_from(first, last))
            enough = max(start, kept + self._enough[first + 1, last])
        self._enough[first, last] = enough
        # With enough room every stage is replayed once, and nothing is faster than that.
        best[enough:] = self.before[last + 1]
        best = best[:enough]
        best[:] = np.inf
        if first < last:
            later = self._ending(first + 1, last)
            self.lower(best, later, first, pending_bytes=self._chain.stages[last].output_bytes)
            best -= _TIME(self.before[first])
            if start < len(best):
                replayed = self._row(first + 1, last)[start - kept : len(best) - kept]
                np.minimum(best[start:], replayed, out=best[start:])

    def _replay_from(self, first: int, last: int) -> int:
        """The slots with which ``first`` can be replayed before, and have its backward after, the
        others."""
        stage, pending = self._chain.stages[first], self._chain.stages[last].output_bytes
        return self._slots.size(max(stage.forward_bytes + pending, stage.keep.backward_bytes))

    def _row(self, first: int, last: int) -> np.ndarray:
        row: np.ndarray = self._rows[first * self._width + last - first]
        return row

    def _ending(self, first: int, last: int) -> Rows:
        """Segments that end with ``last`` and begin with ``first``, the next, ..., ``last``: one
        row further on in the table and one stage shorter each time."""
        start, end = first * self._width + last - first, last * self._width
        return self._rows[start : end + 1 : max(1, self._width - 1)]

    def _stairs(
        self, first: int, count: int, pending_bytes: int, columns: int
    ) -> Iterator[tuple[int, int, int]]:
        """How many of the ``count`` shortest runs fit, from which slots to which."""
        starts = [at for at in self._rises[first] if at < count]
        for at, fitting in itertools.pairwise((*starts, count)):
            start = self._slots.size(self.peaks[first][at] + pending_bytes)
            end = columns
            if fitting < count:
                end = min(end, self._slots.size(self.peaks[first][fitting] + pending_bytes))
            yield fitting, start, end


def _rises(peaks: list[int]) -> list[int]:
    return [at for at, peak in enumerate(peaks) if not at or peak != peaks[at - 1]]
