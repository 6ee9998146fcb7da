"""The fastest choice of options where what they free is no prefix of the step, as in a U-Net.

A chain frees memory in order: what stage ``i`` drops is gone from its forward to its backward. With
skip connections a tensor may live on because a far stage needs it, so here the step is a row of
intervals with a known peak each, and every option says what it frees in which. Choosing is then an
integer program, solved by HiGHS through SciPy, which the extra ``solver`` brings. Knows intervals
and bytes, not stages.
"""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast import _checks
from holdfast.activation._solving.schedule import Infeasible
from holdfast.errors import PlanError

_NONE_FITS = 2  # the status by which milp says so
_OUT_OF_TIME = 1

# A solver works to a tolerance, so a choice that misses the budget by a byte can pass for one that
# meets it. Such a choice is forbidden by name and the next asked for, this many times.
_MOST_REFUSED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A stretch of the step. ``live_bytes`` is its peak when everything is kept."""

    name: str
    live_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """What an option of a stage frees: pairs of an interval's index and the bytes freed there,
    negative where the option needs more than keeping everything does."""

    stage: int
    option: int
    freed: tuple[tuple[int, int], ...]


def solve_intervals(
    intervals: Sequence[Interval],
    savings: Sequence[Saving],
    extra_s: Mapping[tuple[int, int], float],
    budget_bytes: int,
    *,
    most_s: float = 30.0,
) -> tuple[int, ...] | Infeasible:
    """The option of each stage, of the least extra time with which no interval exceeds the budget.

    ``extra_s`` has every option there is, by stage and option; stages are numbered from 0 without
    gaps. An option without a saving frees nothing. What is returned fits to the byte.
    ``Infeasible`` tells a budget that suffices, the smallest to within some millionths, and the
    interval that sets it. A search of HiGHS that takes ``most_s`` ends with the best it has by
    then, which fits but may not be the fastest, or the smallest; ``PlanError`` if it has nothing.
    ``ImportError`` without SciPy; ``ValueError`` for numbers of stages, options or intervals that
    do not exist.
    """
    _checks.count("budget_bytes", budget_bytes, least=1)
    problem = _Problem(intervals, savings, extra_s, _checks.seconds("most_s", most_s))
    fastest = problem.fastest(budget_bytes)
    if fastest is not None:
        return problem.options(fastest)
    smallest = problem.smallest()
    peaks = problem.peaks(smallest)
    highest = int(peaks.argmax())
    if peaks[highest] <= budget_bytes:
        return problem.options(smallest)
    return Infeasible(smallest_bytes=int(peaks[highest]), reason=intervals[highest].name)


class _Problem:
    """A column for every option: which stage it belongs to, what it frees where, what it takes."""

    def __init__(
        self,
        intervals: Sequence[Interval],
        savings: Sequence[Saving],
        extra_s: Mapping[tuple[int, int], float],
        most_s: float,
    ) -> None:
        self._highs = require_highs()
        self._most_s = most_s
        self._columns = sorted(extra_s)
        self._times = np.array([_time(extra_s, column) for column in self._columns])
        self._live = np.array([interval.live_bytes for interval in intervals], np.int64)
        self._freed = self._freed_by(savings)
        stages = np.array([stage for stage, _ in self._columns])
        if not self._columns or set(stages.tolist()) != set(range(stages.max() + 1)):
            raise ValueError("extra_s must have an option of every stage, numbered from 0")
        self._one_each = (stages == np.arange(stages.max() + 1)[:, None]).astype(float)

    def options(self, chosen: np.ndarray) -> tuple[int, ...]:
        return tuple(self._columns[column][1] for column in chosen)

    def peaks(self, chosen: np.ndarray) -> np.ndarray:
        """Of every interval, exactly."""
        peaks: np.ndarray = self._live - self._freed[:, chosen].sum(axis=1)
        return peaks

    def fastest(self, budget_bytes: int) -> np.ndarray | None:
        """The columns of the fastest choice, a stage each, or None if none was found."""
        scale = self._scale()
        fits = self._highs.LinearConstraint(
            self._freed / scale, lb=(self._live - budget_bytes) / scale
        )
        # What differs by less than a millionth is the same to the solver.
        goal = self._times * (1e3 / max(self._times.max(), 1e-300))
        refused: list[Any] = []
        while len(refused) <= _MOST_REFUSED:
            found = self._run(goal, [self._one(), fits, *refused])
            if found is None or (self.peaks(found) <= budget_bytes).all():
                return found
            chosen = np.zeros(len(self._columns))
            chosen[found] = 1.0
            refused.append(self._highs.LinearConstraint(chosen, ub=len(found) - 1))
        return None

    def smallest(self) -> np.ndarray:
        """The columns of a choice whose highest interval is lowest."""
        scale = self._scale()
        peak = np.full((len(self._live), 1), 1.0)
        below = self._highs.LinearConstraint(
            np.hstack([self._freed / scale, peak]), lb=self._live / scale
        )
        none = np.zeros((len(self._one_each), 1))
        one = self._highs.LinearConstraint(np.hstack([self._one_each, none]), lb=1.0, ub=1.0)
        goal = np.append(np.zeros(len(self._columns)), 1.0)
        found = self._run(goal, [one, below])
        if found is None:  # a high enough peak is above all, so there is a choice
            raise PlanError(
                f"HiGHS found no choice of options within {self._most_s:g} s: name fewer stages, "
                "or use solver='chain'"
            )
        return found

    def _one(self) -> Any:
        return self._highs.LinearConstraint(self._one_each, lb=1.0, ub=1.0)

    def _scale(self) -> float:
        """Bytes as numbers up to a million: a millionth of that is the solver's tolerance."""
        return float(max(1, self._live.max(initial=1), abs(self._freed).max(initial=1))) / 1e6

    def _run(self, goal: np.ndarray, constraints: list[Any]) -> np.ndarray | None:
        count = len(self._columns)
        whole = np.arange(len(goal)) < count
        result = self._highs.milp(
            goal,
            integrality=whole.astype(int),
            bounds=self._highs.Bounds(0.0, np.where(whole, 1.0, np.inf)),
            constraints=constraints,
            options={"mip_rel_gap": 0.0, "time_limit": self._most_s},
        )
        if result.x is None:
            if result.status in {_NONE_FITS, _OUT_OF_TIME}:
                return None
            raise RuntimeError(f"HiGHS gave up without an answer: {result.message}")
        chosen: np.ndarray = (self._one_each * result.x[:count]).argmax(axis=1)
        return chosen

    def _freed_by(self, savings: Sequence[Saving]) -> np.ndarray:
        at = {column: index for index, column in enumerate(self._columns)}
        freed = np.zeros((len(self._live), len(self._columns)), np.int64)
        for saving in savings:
            if (saving.stage, saving.option) not in at:
                raise ValueError(f"extra_s has no option {saving.option} of stage {saving.stage}")
            for interval, freed_bytes in saving.freed:
                if not 0 <= interval < len(self._live):
                    raise ValueError(f"there is no interval {interval}, only {len(self._live)}")
                freed[interval, at[saving.stage, saving.option]] += freed_bytes
        return freed


def _time(extra_s: Mapping[tuple[int, int], float], column: tuple[int, int]) -> float:
    return _checks.between(f"extra_s[{column}]", extra_s[column], 0.0)


def require_highs() -> Any:
    """SciPy's ``optimize``, which has HiGHS; ``ImportError`` with what to install without it."""
    try:
        return importlib.import_module("scipy.optimize")
    except ImportError as error:
        raise ImportError(
            "options with skip connections are chosen by HiGHS, which comes with SciPy and is not "
            'installed: pip install "holdfast[solver]"'
        ) from error
