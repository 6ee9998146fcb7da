"""Tensors of an open checkpoint in pieces of bounded size, and what their digests prove."""

from collections.abc import Iterator
from typing import Any, Final

import numpy.typing as npt

from holdfast.catalog import OpenCheckpoint
from holdfast.catalog._names import record_key
from holdfast.catalog._placing import StoredBoxes
from holdfast.catalog._reading import TensorReader
from holdfast.format import StoredTensor, dtype_of
from holdfast.reshard import Box, split_box

PIECE_ELEMENTS: Final = 4 * 1024 * 1024
"""How many elements are in memory at once: as float64, 32 MiB."""

Array = npt.NDArray[Any]


class StoredTensors:
    """The tensors of one checkpoint, as they are stored."""

    def __init__(self, opened: OpenCheckpoint) -> None:
        self.opened = opened
        self.tensors = opened.found.record.tensors
        self._reader = TensorReader(opened.storage, opened.found.prefix, opened.found.record)

    def tensor(self, name: str) -> StoredTensor:
        """``TensorNotFoundError``, with names that are near, if there is none."""
        return self._reader.tensor(name)

    def pieces(self, name: str, within: Box | None = None) -> Iterator[Box]:
        """The tensor, or a box of it, in row-major pieces. ``CorruptedError`` if not all of it is
        stored: there is no end to the pieces of what a record merely claims."""
        box = within or Box.whole(self.tensor(name).shape)
        self._reader.check_stored([(name, box)])
        yield from split_box(box, PIECE_ELEMENTS)

    def read(self, name: str, box: Box) -> Array:
        return self.opened.read(name, box.start, box.stop)

    def nbytes(self, name: str) -> int:
        tensor = self.tensors[name]
        return Box.whole(tensor.shape).size * dtype_of(tensor.dtype).itemsize

    def parts(self, name: str) -> list[tuple[Box, int]]:
        """The boxes that a tensor is stored in, in order, and their files' indexes."""
        tensor = self.tensor(name)
        stored = StoredBoxes.of(tensor)
        stored.check(name, record_key(self.opened.found.prefix))
        within = stored.within(Box.whole(tensor.shape))
        return sorted(within, key=lambda part: (part[0].start, part[0].stop))

    def digests(self, name: str, box: Box, index: int) -> bytes:
        """Those of the chunks of one such box."""
        shard = self._reader.shard(index)
        return bytes(shard.table.digests_of(self._reader.placed(name, box, shard)))

    def file(self, index: int) -> tuple[str, str, str, str]:
        """Which file it is: two records that say the same here name one and the same."""
        found = self.opened.found
        file = found.record.files[index]
        return self.opened.storage.url, file.prefix or found.prefix, file.name, file.digest


def proven_same(a: StoredTensors, b: StoredTensors, name: str) -> bool:
    """Whether digests prove that both have the same bytes for a tensor of one dtype and shape.
    They do not if the two store it in other parts, though it may be the same."""
    mine, others = a.parts(name), b.parts(name)
    return [box for box, _ in mine] == [box for box, _ in others] and all(
        a.file(index) == b.file(at) or a.digests(name, box, index) == b.digests(name, box, at)
        for (box, index), (_, at) in zip(mine, others, strict=True)
    )
