"""Knows a list of whole numbers written as arithmetic runs. Does not know what they number."""

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexRuns:
    """Numbers, 0 or more, in order: each run ``(first, step, count)`` is first, first + step, ...

    Cuts of a grid, files of its cells and ranks of a mesh are kept so: 8,192 of them are one run
    or a few. A run of one number may have any step.
    """

    runs: tuple[tuple[int, int, int], ...]
    _ends: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for run in self.runs:
            first, step, count = run
            if count < 1 or first < 0 or first + step * (count - 1) < 0:
                raise ValueError(f"{run} is no run (first, step, count) of numbers >= 0")
        ends = itertools.accumulate(count for _, _, count in self.runs)
        object.__setattr__(self, "_ends", tuple(ends))

    @classmethod
    def of(cls, values: Ints | list[int] | tuple[int, ...]) -> "IndexRuns":
        """``values`` as few runs, found greedily from the left."""
        if len(values) <= 2:  # noqa: PLR2004 -- always one run, or none
            few = tuple(int(value) for value in values)
            step = few[-1] - few[0] if few else 0
            return cls(runs=((few[0], step, len(few)),) if few else ())
        array = np.asarray(values, dtype=np.int64)
        steps = np.diff(array)
        turns = np.flatnonzero(np.diff(steps)) + 1
        runs: list[tuple[int, int, int]] = []
        at = 0
        for end in [*turns.tolist(), len(steps)]:
            if at < end:
                runs.append((int(array[at]), int(steps[at]), end - at + 1))
                at = end + 1
        if at < len(array):
            runs.append((int(array[at]), 0, 1))
        return cls(runs=tuple(runs))

    @property
    def bounds(self) -> tuple[int, int]:
        """The smallest and the largest number; ``(0, -1)`` if there are none."""
        ends = [
            value
            for first, step, count in self.runs
            for value in (first, first + step * (count - 1))
        ]
        return (min(ends), max(ends)) if ends else (0, -1)

    @property
    def rises(self) -> bool:
        """Whether each number is larger than the one before it. Costs a look at every run."""
        before = -1
        for first, step, count in self.runs:
            if first <= before or (step < 1 and count > 1):
                return False
            before = first + step * (count - 1)
        return True

    def below(self, value: int) -> int:
        """How many of the numbers, which must rise, are less than ``value``; found by halving."""
        at = bisect.bisect_left(self.runs, value, key=_first) - 1
        if at < 0:
            return 0
        first, step, count = self.runs[at]
        reached = 1 if count == 1 else min(count, -((first - value) // step))
        return self._ends[at] - count + reached

    def array(self) -> Ints:
        """All of the numbers, expanded."""
        parts = [first + step * np.arange(count) for first, step, count in self.runs]
        return np.concatenate([np.empty(0, dtype=np.int64), *parts])

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"{index} is not one of {len(self)} numbers")
        at = bisect.bisect_right(self._ends, index)
        first, step, count = self.runs[at]
        return first + step * (index - self._ends[at] + count)

    def __iter__(self) -> Iterator[int]:
        for first, step, count in self.runs:
            for index in range(count):
                yield first + step * index


def sums(first: int, loops: Sequence[range]) -> Iterator[int]:
    """``first`` plus one number of each loop, the last loop running fastest; takes no memory,
    where ``itertools.product`` keeps every loop as a tuple."""
    if not loops:
        yield first
    elif len(loops) == 1:
        for step in loops[0]:
            yield first + step
    else:
        for step in loops[0]:
            yield from sums(first + step, loops[1:])


def _first(run: tuple[int, int, int]) -> int:
    return run[0]
