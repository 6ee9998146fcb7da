"""Which stretches of a file are in use. Knows offsets and sizes; never touches a file."""

import bisect


class Extents:
    """Stretches of a file that has no end, taken and given back. Not thread-safe.

    Each request gets the smallest free stretch that fits, of several the first, and the rest of
    it stays free; neighbours that become free are joined. A training asks for the same sizes step
    after step, so the file stops growing after the first one.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._sizes: dict[int, int] = {}
        self._end = 0

    @property
    def end(self) -> int:
        """Where the last stretch in use ends: a file of this size holds them all."""
        return self._end

    def take(self, size: int) -> int:
        """The offset of ``size`` bytes that nobody else has until they are given back."""
        fitting = [(self._sizes[start], start) for start in self._starts]
        free, start = min((each for each in fitting if each[0] >= size), default=(0, self._end))
        if not free:
            self._end += size
            return start
        self._drop(start)
        if free > size:
            self._add(start + size, free - size)
        return start

    def give(self, start: int, size: int) -> None:
        """Free what ``take`` gave, all of it."""
        at = bisect.bisect(self._starts, start)
        after = self._starts[at] if at < len(self._starts) else None
        before = self._starts[at - 1] if at else None
        if after == start + size:
            size += self._drop(after)
        if before is not None and before + self._sizes[before] == start:
            start, size = before, size + self._drop(before)
        if start + size == self._end:
            self._end = start
        else:
            self._add(start, size)

    def _add(self, start: int, size: int) -> None:
        bisect.insort(self._starts, start)
        self._sizes[start] = size

    def _drop(self, start: int) -> int:
        del self._starts[bisect.bisect_left(self._starts, start)]
        return self._sizes.pop(start)
