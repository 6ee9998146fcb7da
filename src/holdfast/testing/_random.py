"""Random numbers that say how to get the same ones again."""

import random
import secrets
from typing import Any


class SeededRandom(random.Random):
    """``random.Random`` that knows its seed. Made by ``seeded_rng``."""

    seed_value: int

    def __init__(self, seed_value: int) -> None:
        super().__init__(seed_value)
        self.seed_value = seed_value

    def __repr__(self) -> str:
        return f"seeded_rng({self.seed_value})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.seed_value,), self.getstate()


def seeded_rng(seed: int | None = None) -> SeededRandom:
    """A generator whose ``repr`` names its seed, so that a failure can be replayed.

    Without a seed it picks one; print the generator, or use it in an assertion's message.
    """
    return SeededRandom(secrets.randbits(32) if seed is None else seed)
