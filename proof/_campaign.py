"""What a campaign is: a promise, something that tries to break it, and what came of it.

Knows no campaign and no storage of checkpoints; ``run.py`` runs them, and every module beside it
that does not begin with ``_`` is one, by its value ``CAMPAIGN``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

HOLDFAST = "holdfast"
BATCHES = 2**20  # more than a campaign ever has


def batch_of(seed: int) -> int:
    """Which batch of a run has that seed: 0, 1, 2 and so on. For a campaign whose cases are a list:
    batch by batch it goes through all of it."""
    return seed % BATCHES


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one batch came to. ``facts`` are numbers that add up over batches, by what they count;
    each of ``violations`` is one sentence that names the case, so that it can be run again. Of
    ``violated`` cases at most a few are told in words. ``is_last``: no case is left after it."""

    cases: int
    violated: int = 0
    violations: tuple[str, ...] = ()
    facts: Mapping[str, int] = field(default_factory=dict)
    is_last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """One promise and what tries to break it.

    ``run(subject, seed)`` does one batch, of seconds up to ``batch_timeout_s``, in a process of its
    own; the same subject and seed are the same cases again. It returns what it found and raises
    only if the campaign itself is broken. ``cases`` is how many make a full run for holdfast;
    ``peer_cases`` for each of the others, of which fewer tell enough. If it ``ends``, a full run is
    every batch up to one that ``is_last``, and ``cases`` only says about how many they are.
    ``unavailable(subject)`` says in words why this machine cannot run it, or ``None``.
    """

    name: str
    promise: str
    counted: str
    cases: int
    run: Callable[[str, int], Outcome]
    subjects: tuple[str, ...] = (HOLDFAST,)
    peer_cases: int = 200
    batch_timeout_s: float = 600
    ends: bool = False
    unavailable: Callable[[str], str | None] = lambda _: None
