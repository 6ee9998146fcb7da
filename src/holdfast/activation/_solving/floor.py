"""The smallest budget that any schedule fits, to the byte. Knows no slots.

Whether stages fit some room only asks for the smallest room that they fit, so one number a segment
replaces a row of times and nothing is rounded. A schedule for any room from there on is found by
going down these numbers: of what still leaves enough for the rest, that is taken which is fastest
if the rest is run with the least memory. It fits, but need not be the fastest that does.
"""

import numpy as np

from holdfast.activation._solving.chain import Chain

# Longer segments are not looked at: beyond, the inputs they save are next to nothing.
_LONGEST = 128


class Floor:
    """A chooser of schedules by bytes. ``room_bytes`` is the least room the whole chain needs."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        count = len(chain.stages)
        self._lengths = [min(chain.reach(first), _LONGEST) for first in range(count)]
        self._peaks = [
            np.array(chain.run_peaks(each, self._lengths[each]), np.int64) for each in range(count)
        ]
        times = [stage.forward_s for stage in chain.stages]
        self._before = np.concatenate([[0.0], np.cumsum(times)])
        width = max(1, *self._lengths)
        self._needs = np.zeros((count, width), np.int64)
        self._times = np.zeros((count, width))
        self._rest_needs = np.zeros(count + 1, np.int64)
        self._rest_times = np.zeros(count + 1)
        self._rest_needs[count] = chain.head_bytes
        for first in reversed(range(count)):
            for last in range(first, first + self._lengths[first]):
                needs, times_of = self._remakes(first, last)
                self._needs[first, last - first] = needs.min()
                self._times[first, last - first] = times_of[needs == needs.min()].min()
            needs, times_of = self._ways(first)
            self._rest_needs[first] = needs.min()
            self._rest_times[first] = times_of[needs == needs.min()].min()

    @property
    def room_bytes(self) -> int:
        return int(self._rest_needs[0])

    def size(self, count_bytes: int) -> int:
        return count_bytes

    def option_or_segment(self, first: int, room: int) -> tuple[int | None, int]:
        way = _fastest(*self._ways(first), room)
        options = len(self._chain.stages[first].options)
        return (way, first) if way < options else (None, first + way - options)

    def split(self, first: int, last: int, room: int) -> int:
        return first + _fastest(*self._remakes(first, last), room)

    def _ways(self, first: int) -> tuple[np.ndarray, np.ndarray]:
        """What each option of a stage needs and takes with all after it, then each segment that
        begins with it, the shortest first."""
        stage, count = self._chain.stages[first], self._lengths[first]
        options = [
            max(
                stage.forward_bytes,
                option.backward_bytes,
                int(self._rest_needs[first + 1]) + option.kept_bytes,
            )
            for option in stage.options
        ]
        rest = slice(first + 1, first + 1 + count)
        segments = np.maximum(self._peaks[first], self._needs[first, :count])
        segments = np.maximum(segments, self._rest_needs[rest] + stage.input_bytes)
        taken = [option.extra_s + self._rest_times[first + 1] for option in stage.options]
        remade = self._times[first, :count] + self._rest_times[rest]
        return np.concatenate([options, segments]), np.concatenate([taken, remade])

    def _remakes(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """What it needs and takes to make ``first`` to ``last`` again: by replaying ``first``, then
        by keeping the input of each stage after it."""
        stage, length = self._chain.stages[first], last - first
        if not length:
            return np.array([stage.replayed_bytes]), np.array([stage.forward_s])
        pending = self._chain.stages[last].output_bytes
        replayed = max(
            stage.forward_bytes + pending,
            stage.keep.backward_bytes,
            int(self._needs[first + 1, length - 1]) + stage.keep.kept_bytes,
        )
        middles = np.arange(first + 1, last + 1)
        later = middles, last - middles
        runs = self._peaks[first][:length] + pending
        splits = np.maximum(runs, self._needs[later] + stage.input_bytes)
        splits = np.maximum(splits, self._needs[first, :length])
        ran = self._before[middles] - self._before[first]
        times = ran + self._times[later] + self._times[first, :length]
        replayed_s = stage.forward_s + self._times[first + 1, length - 1]
        return np.concatenate([[replayed], splits]), np.concatenate([[replayed_s], times])


def _fastest(needs: np.ndarray, times: np.ndarray, room: int) -> int:
    return int(np.where(needs <= room, times, np.inf).argmin())
