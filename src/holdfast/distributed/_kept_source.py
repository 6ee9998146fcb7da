"""The bytes of what a snapshot kept, on their way to a shard. Knows no layouts and no files."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from holdfast.distributed._snapshot import Kept
from holdfast.distributed._tensor_source import rechunked
from holdfast.distributed._units import Span
from holdfast.format import ShardEntry, dtype_of
from holdfast.reshard import Box, Part


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSource:
    """A part of a kept tensor: ``catalog``'s ``Source``. ``is_last`` if it is not read again, so
    that its memory may be used for something else."""

    entry: ShardEntry
    kept: Kept
    part: Part
    is_last: bool = False

    def last(self) -> "KeptSource":
        """The same, to be read for the last time."""
        return replace(self, is_last=True)

    def span(self) -> Span:
        """Which bytes of the kept tensor are read: more than those of the part if these do not lie
        together."""
        itemsize = dtype_of(self.entry.dtype).itemsize
        found = _together(self.part.array_shape, self.part.local)
        return (
            (0, self.kept.nbytes) if found is None else (found[0] * itemsize, found[1] * itemsize)
        )

    def chunks(self) -> Iterator[memoryview]:
        if _together(self.part.array_shape, self.part.local) is None:
            data = self.kept.read(0, self.kept.nbytes)  # other parts are among these bytes, too
            yield from rechunked((self._picked(data),))
        else:
            yield from rechunked(self.kept.read(*self.span(), spend=self.is_last))

    def _picked(self, data: Iterator[memoryview]) -> memoryview:
        """The part's bytes, out of all of the tensor's."""
        itemsize = dtype_of(self.entry.dtype).itemsize
        whole = np.empty((*self.part.array_shape, itemsize), np.uint8)
        into, at = whole.reshape(-1).data, 0
        for piece in data:
            into[at : at + len(piece)] = piece
            at += len(piece)
        where = tuple(map(slice, self.part.local.start, self.part.local.stop))
        return np.ascontiguousarray(whole[where]).reshape(-1).data


def _together(shape: tuple[int, ...], box: Box) -> Span | None:
    """Where the elements of a box are in an array of that shape; ``None`` if not in one row."""
    start = 0
    is_inside = False
    for length, low, high in zip(shape, box.start, box.stop, strict=True):
        if is_inside and (low, high) != (0, length):
            return None
        is_inside = is_inside or high - low != 1
        start = start * length + low
    return start, start + box.size
