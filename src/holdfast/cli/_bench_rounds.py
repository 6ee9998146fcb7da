"""Times pieces of work in turns, for a bounded time. Knows nothing of what they do.

A disk's speed swings and other programs come and go, so that nothing is timed by itself: every
round times each piece once, those of a group in another order each time.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

MOST_ROUNDS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Something to be timed. ``before`` is done first, and not timed. ``nbytes`` is what it moves,
    if that is what matters, and ``bare`` the name of the piece that only moves as much."""

    name: str
    call: Callable[[], object]
    nbytes: int | None = None
    before: Callable[[], object] = field(default=lambda: None)
    bare: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """How long one piece took in each round."""

    work: Work
    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    def of(self, bare: "Timed") -> float:
        """The share of the bare speed that it has, in the middle of the rounds."""
        return bare.median_s / self.median_s


def timed_rounds(
    groups: Sequence[Sequence[Work]],
    *,
    seconds: float,
    most: int = MOST_ROUNDS,
    tell: Callable[[str], None] = lambda _: None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Timed]:
    """One round at least, and no further one that would not be over in time if it took as long as
    the one before."""
    taken: dict[str, list[float]] = {work.name: [] for group in groups for work in group}
    begun = last = clock()
    for nth in range(most):
        for group in groups:
            turn = nth % len(group)
            for work in [*group[turn:], *group[:turn]]:
                tell(f"round {nth + 1}: {work.name}")
                taken[work.name].append(_seconds(work, clock))
        now = clock()
        if now - begun + (now - last) > seconds:
            break
        last = now
    return [Timed(work=work, seconds=tuple(taken[work.name])) for group in groups for work in group]


def _seconds(work: Work, clock: Callable[[], float]) -> float:
    work.before()
    begun = clock()
    work.call()
    return max(clock() - begun, 1e-9)
