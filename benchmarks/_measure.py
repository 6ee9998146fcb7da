"""How the benchmarks measure: candidates side by side in one run, and what is said of them.

Machines differ and drift, so a benchmark compares: every repeat times each candidate once, in
turn, and the order rotates from repeat to repeat, so that a slow second hits all of them alike.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One number, what it should be, and whether it is. ``spread`` is the p10-p90 range."""

    name: str
    value: float
    unit: str
    target: str
    met: bool
    spread: str


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
    names = list(candidates)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(repeats):
        turn = repeat % len(names) if names else 0
        for name in names[turn:] + names[:turn]:
            prepare(name)
            seconds[name].append(_seconds_per_call(candidates[name], calls))
    return seconds


def _seconds_per_call(call: Callable[[], object], calls: int) -> float:
    start = time.perf_counter_ns()
    for _ in range(calls):
        call()
    return (time.perf_counter_ns() - start) / calls / 1e9


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float], *, scale: float = 1.0, digits: int = 3) -> str:
    """The p10-p90 range of ``values``, each times ``scale``."""
    if len(values) == 1:
        low = high = values[0]
    else:
        deciles = statistics.quantiles(values, n=10, method="inclusive")
        low, high = deciles[0], deciles[-1]
    return f"{low * scale:.{digits}f}\N{EN DASH}{high * scale:.{digits}f}"


def told(name: str, values: Sequence[float], unit: str) -> Measurement:
    """The median of ``values``, which has no target."""
    return Measurement(
        name=name, value=median(values), unit=unit, target="-", met=True, spread=spread(values)
    )


def at_most(name: str, values: Sequence[float], unit: str, most: float) -> Measurement:
    """The median of ``values``, which should be that at most."""
    value = median(values)
    return Measurement(
        name=name,
        value=value,
        unit=unit,
        target=f"\N{LESS-THAN OR EQUAL TO} {most:g}",
        met=value <= most,
        spread=spread(values) if len(values) > 1 else "-",
    )
