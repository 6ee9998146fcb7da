"""Sets a plan beside torch's best at the same budget: time, peak, and whether the step is the same.

Every way to run has a model of its own, made alike, and stays on it: as in training, where nothing
is put on and taken off between steps. The models take their steps in turn, in random order, and
what is compared are the steps of one round.
"""

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from _fitting_models import Case
from _fitting_search import Bench
from _fitting_torch import Choice
from holdfast.activation import measure_peak

PLAIN, OURS = "save everything", "holdfast"
RESAMPLES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A plan for one model: ``applied`` puts it on until the end of the context. Its planner takes
    ``smallest_bytes`` for the least that the model can be made to take."""

    applied: Callable[[], contextlib.AbstractContextManager[object]]
    planning_s: float
    smallest_bytes: int


Fit = Callable[[Case, Any, Any, int], Fitted | None]
"""Plans a case's model and sample for so many bytes. ``None`` if it says that this cannot be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """The median of paired ratios, and the interval that holds it with 95 %, by bootstrap."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a plan did at one budget. ``percent`` is of the way from torch's floor to saving
    everything; below the floor there is none, and nothing of torch's. ``exact``: every gradient
    and buffer after a step has the bits it has without a plan."""

    percent: int | None
    budget_bytes: int
    peak_bytes: int
    exact: bool
    planning_s: float
    smallest_bytes: int
    plain_s: float
    over_plain: Ratio
    torchs: str | None = None
    torch_over_plain: Ratio | None = None
    over_torch: Ratio | None = None


def compare(
    case: Case,
    fit: Fit,
    budget_bytes: int,
    *,
    pairs: int,
    percent: int | None = None,
    choices: Sequence[Choice] = (),
) -> Outcome | None:
    """The plan beside that of ``choices`` which turns out fastest. ``None`` if there is no plan."""
    ours, bare = Bench(case), Bench(case)
    fitted = fit(case, ours.model, ours.sample, budget_bytes)
    if fitted is None:
        return None
    with contextlib.ExitStack() as stack:
        stack.enter_context(fitted.applied())
        exact = _same(_after_a_step(ours), _after_a_step(bare))
        peak_bytes = measure_peak(ours.step, device="cpu").peak_bytes
        seats = {PLAIN: bare, OURS: ours}
        for choice in choices:
            seats[choice.label] = Bench(case)
            stack.enter_context(seats[choice.label].running(choice))
        seconds = in_turn(seats, rounds=pairs)

    best = min(
        (choice.label for choice in choices),
        key=lambda label: statistics.median(seconds[label]),
        default=None,
    )
    return Outcome(
        percent=percent,
        budget_bytes=budget_bytes,
        peak_bytes=peak_bytes,
        exact=exact,
        planning_s=fitted.planning_s,
        smallest_bytes=fitted.smallest_bytes,
        plain_s=statistics.median(seconds[PLAIN]),
        over_plain=ratio(seconds[OURS], seconds[PLAIN]),
        torchs=best,
        torch_over_plain=None if best is None else ratio(seconds[best], seconds[PLAIN]),
        over_torch=None if best is None else ratio(seconds[OURS], seconds[best]),
    )


def in_turn(seats: Mapping[str, Bench], *, rounds: int) -> dict[str, list[float]]:
    """Seconds of each one's steps. In every round each takes one, after one that is not timed at
    the start."""
    order, names = random.Random(0), list(seats)
    for bench in seats.values():
        bench.clear()
        bench.step()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        order.shuffle(names)
        for name in names:
            bench = seats[name]
            bench.clear()
            began = time.perf_counter()
            bench.step()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def ratio(one: Sequence[float], other: Sequence[float]) -> Ratio:
    pairs = np.array(one) / np.array(other)
    drawn = np.random.default_rng(0).choice(pairs, size=(RESAMPLES, len(pairs)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return Ratio(median=float(np.median(pairs)), low=float(low), high=float(high))


def _after_a_step(bench: Bench) -> list[Any]:
    """The gradients and buffers, under one seed."""
    bench.clear()
    torch.manual_seed(7)
    bench.step()
    parameters = bench.model.parameters()
    return [*(each.grad for each in parameters), *bench.model.buffers()]


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))
