"""How the benchmarks measure: candidates side by side in one run, and what is said of them.

Machines differ and drift, so a benchmark compares: every repeat times each candidate once, in
turn, and in another order from repeat to repeat, so that a slow second hits all of them alike and
none always comes after the same one.
"""

import concurrent.futures
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much of a benchmark is run: ``FULL`` for its numbers, less of it to see that it works.

    ``part`` is what is left of a size or a count, ``most`` the highest number of repeats.
    """

    name: str
    part: float = 1.0
    most: int | None = None

    def of(self, amount: int, *, least: int = 1) -> int:
        return max(least, int(amount * self.part))

    def repeats(self, number: int) -> int:
        return number if self.most is None else min(number, self.most)

    def upto(self, amounts: Sequence[int], *, least: int = 1) -> list[int]:
        """Those of ascending ``amounts`` that are no more than a part of the last, but at least the
        first ``least`` of them."""
        most = amounts[-1] * self.part
        return [each for n, each in enumerate(amounts) if n < least or each <= most]


FULL = Extent(name="full")
QUICK = Extent(name="quick", part=1 / 8, most=3)
TINY = Extent(name="tiny", part=1 / 256, most=1)
"""For the tests, which want to know whether it runs."""

EXTENTS = {extent.name: extent for extent in (FULL, QUICK, TINY)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a number stands in a chart: in which, whose it is, and at what. A bar has no ``at``."""

    chart: str
    series: str
    at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One number, what it should be, and whether it is. ``spread`` is the range of ``values``, of
    which the number is the median; from ten of them on that of p10 to p90."""

    name: str
    value: float
    unit: str
    target: str
    met: bool
    spread: str
    values: tuple[float, ...] = ()
    place: Place | None = None


def interleaved(
    candidates: Mapping[str, Callable[[], object]],
    *,
    repeats: int,
    calls: int = 1,
    prepare: Callable[[str], object] = lambda _: None,
) -> dict[str, list[float]]:
    """Seconds per call of each candidate, one number for each repeat.

    Each repeat times every candidate once, ``calls`` calls at a stretch, after ``prepare`` was
    called with its name, which is not timed. Nothing is warmed up and nothing is left out: call
    a candidate beforehand if its first call is another matter.
    """
    if repeats < 1 or calls < 1:
        raise ValueError(f"repeats={repeats} and calls={calls} must be at least 1")
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for repeat in range(repeats):
        for name in in_turn(candidates, repeat):
            prepare(name)
            seconds[name].append(_seconds_per_call(candidates[name], calls))
    return seconds


def in_turn(names: Iterable[str], repeat: int) -> list[str]:
    """The order of a repeat: there and back, then from the next on. After two repeats for each
    name, every one was at every place twice."""
    ordered = [*names]
    first = repeat // 2 % max(1, len(ordered))
    ordered = ordered[first:] + ordered[:first]
    return ordered[::-1] if repeat % 2 else ordered


def _seconds_per_call(call: Callable[[], object], calls: int) -> float:
    start = time.perf_counter_ns()
    for _ in range(calls):
        call()
    return (time.perf_counter_ns() - start) / calls / 1e9


def in_a_process(work: Callable[..., T], *args: Any) -> T:
    """In a fresh one, so that nothing that was there before counts."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(max_workers=1, mp_context=spawn) as pool:
        return pool.submit(work, *args).result()


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def fastest(seconds: Mapping[str, Sequence[float]], names: Sequence[str]) -> str:
    """That of ``names`` whose median is the least."""
    return min(names, key=lambda name: median(seconds[name]))


def ratios(those: Sequence[float], these: Sequence[float]) -> list[float]:
    """Of the same repeat, so that a slow second is on both sides."""
    return [a / b for a, b in zip(those, these, strict=True)]


def low_and_high(values: Sequence[float]) -> tuple[float, float]:
    """The p10 and the p90; of fewer than ten values the least and the greatest."""
    if len(values) < 10:
        return min(values), max(values)
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return deciles[0], deciles[-1]


def spread(values: Sequence[float], *, scale: float = 1.0, digits: int = 3) -> str:
    """The range of ``values`` as ``low_and_high`` has it, each times ``scale``."""
    low, high = low_and_high(values)
    return f"{low * scale:.{digits}f}\N{EN DASH}{high * scale:.{digits}f}"


def told(
    name: str, values: Sequence[float], unit: str, *, place: Place | None = None
) -> Measurement:
    """The median of ``values``, which has no target."""
    return _judged(name, values, unit, "-", place, met=True)


def at_most(
    name: str, values: Sequence[float], unit: str, most: float, *, place: Place | None = None
) -> Measurement:
    """The median of ``values``, which should be that at most."""
    target = f"\N{LESS-THAN OR EQUAL TO} {most:g}"
    return _judged(name, values, unit, target, place, met=median(values) <= most)


def at_least(
    name: str, values: Sequence[float], unit: str, least: float, *, place: Place | None = None
) -> Measurement:
    """The median of ``values``, which should be that at least; over 1 if that is 1."""
    target = f"\N{GREATER-THAN OR EQUAL TO} {least:g}" if least != 1 else "> 1"
    return _judged(name, values, unit, target, place, met=median(values) >= least)


def _judged(
    name: str,
    values: Sequence[float],
    unit: str,
    target: str,
    place: Place | None,
    *,
    met: bool,
) -> Measurement:
    return Measurement(
        name=name,
        value=median(values),
        unit=unit,
        target=target,
        met=met,
        spread=spread(values) if len(values) > 1 else "-",
        values=tuple(values),
        place=place,
    )
