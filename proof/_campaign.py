"""What a campaign is: a promise, something that tries to break it, and what came of it.

Knows no campaign and no storage of checkpoints; ``run.py`` runs them, and every module beside it
that does not begin with ``_`` is one, by its value ``CAMPAIGN``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

HOLDFAST = "holdfast"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one batch came to. ``facts`` are numbers that add up over batches, by what they count;
    each of ``violations`` is one sentence that names the case, so that it can be run again. Of
    ``violated`` cases at most a few are told in words."""

    cases: int
    violated: int = 0
    violations: tuple[str, ...] = ()
    facts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """One promise and what tries to break it.

    ``run(subject, seed)`` does one batch, of seconds up to ``batch_timeout_s``, in a process of its
    own; the same subject and seed are the same cases again. It returns what it found and raises
    only if the campaign itself is broken. ``cases`` is how many make a full run for holdfast;
    ``peer_cases`` for each of the others, of which fewer tell enough. ``unavailable(subject)`` says
    in words why this machine cannot run it, or ``None``.
    """

    name: str
    promise: str
    counted: str
    cases: int
    run: Callable[[str, int], Outcome]
    subjects: tuple[str, ...] = (HOLDFAST,)
    peer_cases: int = 200
    batch_timeout_s: float = 600
    unavailable: Callable[[str], str | None] = lambda _: None
