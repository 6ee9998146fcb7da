"""Tools for testing code that uses holdfast, the ones holdfast is tested with."""

import sys
from typing import TYPE_CHECKING, Any

from holdfast.testing._clock import FakeClock
from holdfast.testing._faulty import Fault, FaultyStorage, StorageCall
from holdfast.testing._random import seeded_rng
from holdfast.testing._ranks import RankGang, RankOutcome

if TYPE_CHECKING:
    from holdfast.testing._conformance import StorageConformance

__all__ = [
    "FakeClock",
    "Fault",
    "FaultyStorage",
    "RankGang",
    "RankOutcome",
    "StorageCall",
    "StorageConformance",
    "seeded_rng",
]


def __getattr__(name: str) -> Any:
    # The suite is made of pytest and hypothesis; everything else here works without them.
    if name != "StorageConformance":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    suite = f"{__name__}._conformance"
    if suite not in sys.modules:
        import pytest  # noqa: PLC0415

        pytest.register_assert_rewrite(suite)
    from holdfast.testing._conformance import StorageConformance  # noqa: PLC0415

    return StorageConformance
