"""Tools for testing code that uses holdfast, the ones holdfast is tested with."""

from holdfast.testing._clock import FakeClock
from holdfast.testing._random import seeded_rng
from holdfast.testing._ranks import RankGang, RankOutcome

__all__ = ["FakeClock", "RankGang", "RankOutcome", "seeded_rng"]
