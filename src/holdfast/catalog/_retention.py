"""Which checkpoints are to stay, as values. Decides from what a listing says; deletes nothing and
reads nothing."""

import datetime as dt
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, final, get_args

from holdfast import _checks
from holdfast.catalog._info import CheckpointInfo
from holdfast.format._record_check import MAX_METRIC_CHARS

Mode = Literal["min", "max"]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Retention:
    """Which checkpoints stay: those that any of its rules holds. Made by ``keep_last``,
    ``keep_every``, ``keep_best`` and ``keep_within``, and put together with ``|``.

    Whatever it says, the newest checkpoint stays.
    """

    rules: tuple["Rule", ...]

    def __post_init__(self) -> None:
        if not self.rules or not all(isinstance(rule, Rule) for rule in self.rules):
            raise ValueError(f"rules must be those of keep_last and the like, not {self.rules!r}")

    def __or__(self, other: "Retention") -> "Retention":
        if not isinstance(other, Retention):
            return NotImplemented
        return Retention(rules=tuple(dict.fromkeys((*self.rules, *other.rules))))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Retention) and frozenset(self.rules) == frozenset(other.rules)

    def __hash__(self) -> int:
        return hash(frozenset(self.rules))

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.rules))


def keep_last(n: int) -> Retention:
    """Keep the ``n`` newest."""
    return Retention(rules=(_Last(n=_checks.count("n", n, least=1)),))


def keep_every(steps: int) -> Retention:
    """Keep those whose step is a multiple of ``steps``, 0 among them; of several of the same step
    the newest. It cannot judge those that were saved without a step, and keeps them."""
    return Retention(rules=(_Every(steps=_checks.count("steps", steps, least=1)),))


def keep_best(metric: str, n: int = 1, mode: Mode = "min") -> Retention:
    """Keep the ``n`` with the lowest (``"max"``: highest) value of a metric; of equal ones the
    newer. It holds none that were saved without that metric, and none whose value is NaN."""
    _checks.text("metric", metric, most=MAX_METRIC_CHARS)
    if mode not in get_args(Mode):
        raise ValueError(f"mode must be 'min' or 'max', not {mode!r}")
    return Retention(rules=(_Best(metric=metric, n=_checks.count("n", n, least=1), mode=mode),))


def keep_within(hours: float) -> Retention:
    """Keep those younger than that: by the clock of the machine that saved them, compared with
    that of the one that prunes."""
    if not _checks.between("hours", hours, 0):
        raise ValueError(f"hours must be more than 0, not {hours!r}")
    return Retention(rules=(_Within(hours=hours),))


def reasons_to_stay(
    retention: Retention, infos: Sequence[CheckpointInfo], now: dt.datetime, *, whole: int = 0
) -> dict[str, tuple[str, ...]]:
    """Why each of these checkpoints, given the newest first, stays; one without a reason goes.

    ``whole`` is the place among them of the newest that is known to be whole. That one stays
    whatever the rules say, and so do those before it.
    """
    reasons: dict[str, list[str]] = {info.prefix: [] for info in infos}
    for newer in infos[:whole]:
        reasons[newer.prefix].append("newer than the newest that is whole")
    for newest in infos[whole : whole + 1]:
        reasons[newest.prefix].append("the newest that is whole" if whole else "the newest")
    for rule in retention.rules:
        for held, reason in rule.held(infos, now):
            if reason not in reasons[held.prefix]:
                reasons[held.prefix].append(reason)
    return {prefix: tuple(found) for prefix, found in reasons.items()}


Held = Iterator[tuple[CheckpointInfo, str]]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class _Last:
    n: int

    def held(self, infos: Sequence[CheckpointInfo], _: dt.datetime) -> Held:
        reason = "the newest" if self.n == 1 else f"one of the {self.n} newest"
        return ((info, reason) for info in infos[: self.n])

    def __repr__(self) -> str:
        return f"keep_last({self.n})"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class _Every:
    steps: int

    def held(self, infos: Sequence[CheckpointInfo], _: dt.datetime) -> Held:
        seen: set[int] = set()
        for info in infos:
            if info.step is None:
                yield info, "it has no step"
            elif info.step % self.steps == 0 and info.step not in seen:
                seen.add(info.step)
                yield info, f"step {info.step} is a multiple of {self.steps}"

    def __repr__(self) -> str:
        return f"keep_every({self.steps})"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class _Best:
    metric: str
    n: int
    mode: Mode

    def held(self, infos: Sequence[CheckpointInfo], _: dt.datetime) -> Held:
        measured = [
            (info.metrics[self.metric], info)
            for info in infos
            if not math.isnan(info.metrics.get(self.metric, math.nan))
        ]
        sign = 1 if self.mode == "min" else -1
        end = "lowest" if self.mode == "min" else "highest"
        which = f"the {end}" if self.n == 1 else f"among the {self.n} {end}"
        best = sorted(measured, key=lambda found: sign * found[0])  # equal ones as they came
        for value, info in itertools.islice(best, self.n):
            yield info, f"{self.metric} {value:.6g} is {which}"

    def __repr__(self) -> str:
        n = f", {self.n}" if self.n != 1 else ""
        mode = f", mode={self.mode!r}" if self.mode != "min" else ""
        return f"keep_best({self.metric!r}{n}{mode})"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class _Within:
    hours: float

    def held(self, infos: Sequence[CheckpointInfo], now: dt.datetime) -> Held:
        for info in infos:
            if (now - info.timestamp).total_seconds() < self.hours * 3600:
                yield info, f"younger than {self.hours:g} h"

    def __repr__(self) -> str:
        return f"keep_within({self.hours!r})"


Rule = _Last | _Every | _Best | _Within
