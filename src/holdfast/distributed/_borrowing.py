"""Files of another checkpoint that a record comes to name. Pure; knows records, not who wrote them.

They are named where they are: what the other checkpoint has borrowed itself is borrowed from the
folder that it is in, so that no record depends on a second one.
"""

import msgspec
import numpy as np
import numpy.typing as npt

from holdfast.catalog._committed import Found
from holdfast.catalog._placing import StoredBoxes
from holdfast.format import StoredFile, StoredPlacement
from holdfast.reshard import Box, Grid, IndexRuns
from holdfast.reshard._runs import Ints


class Borrowed:
    """The files of ``base`` that the record of ``prefix`` names, and what numbers they have there:
    ``first`` and on, in the order in which they are asked for. Without a ``base`` there are none.
    """

    def __init__(self, base: Found | None, *, prefix: str, first: int) -> None:
        self._base = base
        self._prefix = prefix
        self._first = first
        self._numbers: dict[int, int] = {}
        self._placements: dict[StoredPlacement, StoredPlacement] = {}
        self._stored: dict[str, StoredBoxes] = {}

    @property
    def files(self) -> tuple[StoredFile, ...]:
        """Those that were asked for, in the order of their numbers."""
        return tuple(self._named(index) for index in self._numbers)

    def number(self, index: int) -> int:
        """The number in the record of the base's file ``index``."""
        return self._numbers.setdefault(index, self._first + len(self._numbers))

    def placement(self, name: str) -> StoredPlacement:
        """Where all of a tensor is, as it is in the base."""
        theirs = self._found().record.tensors[name].placement
        if theirs not in self._placements:  # tensors that lie alike are many
            numbers = self._numbered(IndexRuns(runs=theirs.files).array())
            runs = IndexRuns.of(numbers).runs
            self._placements[theirs] = msgspec.structs.replace(theirs, files=runs)
        return self._placements[theirs]

    def of_cells(self, name: str, grid: Grid, cells: npt.NDArray[np.bool_]) -> Ints | None:
        """The files of these cells of a tensor, by their numbers, if the base has cut the tensor
        in this very way."""
        stored = self._boxes(name)
        return self._numbered(stored.files.array()[cells]) if stored.grid == grid else None

    def within(self, name: str, box: Box) -> list[tuple[Box, int]]:
        """The parts of a tensor that the base has stored of a box, and their numbers."""
        return [(each, self.number(index)) for each, index in self._boxes(name).within(box)]

    def _numbered(self, indexes: Ints) -> Ints:
        files, places = np.unique(indexes, return_inverse=True)
        return np.array([self.number(index) for index in files.tolist()], dtype=np.int64)[places]

    def _boxes(self, name: str) -> StoredBoxes:
        if name not in self._stored:
            self._stored[name] = StoredBoxes.of(self._found().record.tensors[name])
        return self._stored[name]

    def _named(self, index: int) -> StoredFile:
        base = self._found()
        file = base.record.files[index]
        folder = file.prefix or base.prefix
        return msgspec.structs.replace(file, prefix=None if folder == self._prefix else folder)

    def _found(self) -> Found:
        if self._base is None:
            raise ValueError("a rank refers to a checkpoint where there is none to refer to")
        return self._base
