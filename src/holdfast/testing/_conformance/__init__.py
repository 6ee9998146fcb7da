"""The tests that every storage passes. Knows the contract, and of a storage only how to make one.

Each module tests one part of ``contracts.Storage``; this one puts them together.
"""

from holdfast.testing._conformance._deleting import DeletingTests
from holdfast.testing._conformance._keys import KeyTests
from holdfast.testing._conformance._listing import ListingTests
from holdfast.testing._conformance._pieces import PieceTests
from holdfast.testing._conformance._reading import ReadingTests
from holdfast.testing._conformance._small import SmallObjectTests
from holdfast.testing._conformance._upkeep import UpkeepTests
from holdfast.testing._conformance._writing import WritingTests

__all__ = ["StorageConformance"]


class StorageConformance(
    WritingTests,
    PieceTests,
    SmallObjectTests,
    ReadingTests,
    ListingTests,
    KeyTests,
    DeletingTests,
    UpkeepTests,
):
    """pytest tests for every sentence of ``contracts.Storage`` and ``ObjectWriter``.

    Inherit from it, with a name that pytest collects, and say how to make a storage that is
    empty and that nobody else uses::

        class TestMine(StorageConformance):
            def make_storage(self, tmp_path):
                return MyStorage(tmp_path)

    A storage that must be closed overrides the fixture ``storage`` instead. For a slow one,
    lower ``random_examples``, ``many_objects``, ``many_ranges`` and ``large_bytes``. A storage
    that cannot delete one version of an object passes, if it says so and removes nothing.
    """
