"""The fastest schedule of a chain that fits a budget. Pure: knows numbers, not models.

Stage by stage from the last: with so much room left, each option of a stage leaves so much for the
stages after it, and so does each segment that begins there, whose remaking ``rotor`` has priced for
every room. The constraint is the peak at every stage and not the sum of what is kept. One table
holds the answer for every budget up to the largest it was made for.

Memory is counted in slots. A schedule that is returned has been followed step by step in bytes, so
it fits exactly; ``rounding_bytes`` bounds what slots may have hidden.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from holdfast import _checks
from holdfast.activation._solving.chain import Chain, Option, Stage
from holdfast.activation._solving.floor import Floor
from holdfast.activation._solving.rotor import Remaking, Rows
from holdfast.activation._solving.schedule import Infeasible, Schedule, Simulated, assemble
from holdfast.activation._solving.simulating import simulate
from holdfast.activation._solving.slots import Slots, slots_for

_SLOTS_PER_STAGE = 20
_FEWEST_SLOTS = 500
_MOST_SLOTS = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A schedule that fits, with its exact peak and extra time.

    ``rounding_bytes`` bounds what counting memory in slots cost: no schedule that
    fits the budget less that much is faster than this one, to single precision. A chain of more
    than about 130 linked stages also leaves out segments too long for the table.
    """

    schedule: Schedule
    extra_s: float
    peak_bytes: int
    rounding_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The extra time of a step at a budget."""

    budget_bytes: int
    extra_s: float


def solve(chain: Chain, budget_bytes: int, *, slots: int | None = None) -> Solution | Infeasible:
    """The fastest schedule whose peak is at most ``budget_bytes``.

    ``Infeasible`` is exact: a schedule is returned whenever one fits, also where slots would hide
    it. ``slots`` is how finely memory is divided at most; 20 a stage and from 500 to 4,000 in all
    unless given. ``ValueError`` for a budget or slots that are no positive whole number.
    """
    _checks.count("budget_bytes", budget_bytes, least=1)
    most = _default_slots(chain) if slots is None else _checks.count("slots", slots, least=1)
    everything = _keeping_everything(chain)
    found = simulate(chain, everything)
    if found.peak_bytes <= budget_bytes:
        return _solution(everything, found, rounding_bytes=0)
    counted = slots_for(chain, max(0, budget_bytes - chain.base_bytes), most)
    schedule, found = _fastest(chain, counted, budget_bytes)
    if found.peak_bytes > budget_bytes:
        return Infeasible(smallest_bytes=found.peak_bytes, reason=found.peak_at)
    return _solution(schedule, found, rounding_bytes=counted.rounding_bytes)


def lowest(
    solve_for: Callable[[int], Solution | Infeasible], tries: int = 1
) -> tuple[Solution | Infeasible, str]:
    """The solution with the lowest peak, and what sets that, in words. ``tries`` for a solver that
    may not find again what it has found."""
    found, reason = solve_for(1), "nothing"
    while isinstance(found, Infeasible) and tries > 0:
        reason, tries = found.reason, tries - 1
        found = solve_for(found.smallest_bytes)
    return found, reason


def curve(chain: Chain, *, points: int = 64, slots: int | None = None) -> tuple[Point, ...]:
    """Time against memory: ``points`` budgets evenly from the smallest that is feasible to the
    peak of keeping everything, each with the fastest schedule found for it.

    One table is read at every budget, so low budgets are counted in coarser slots than ``solve``
    would use and may show a little more time. Never rises with the budget.
    """
    _checks.count("points", points, least=2)
    most = _default_slots(chain) if slots is None else _checks.count("slots", slots, least=1)
    everything = simulate(chain, _keeping_everything(chain))
    low = chain.base_bytes + Floor(chain).room_bytes
    high = max(low, everything.peak_bytes)
    budgets = sorted({low + (high - low) * index // (points - 1) for index in range(points)})
    found = _along(chain, slots_for(chain, high - chain.base_bytes, most), budgets)
    # The smallest budget is the one people ask for next: slots of its own size.
    _, lowest = _fastest(chain, slots_for(chain, low - chain.base_bytes, most), low)
    found = sorted([everything, *found, lowest], key=lambda each: each.extra_s)
    return tuple(
        Point(
            budget_bytes=budget,
            extra_s=next(each.extra_s for each in found if each.peak_bytes <= budget),
        )
        for budget in budgets
    )


def _along(chain: Chain, counted: Slots, budgets: list[int]) -> list[Simulated]:
    """The schedules of one table for these budgets, and for a few slots more, some of which fit
    them after all."""
    table = _Table(chain, counted)
    fitting = [(budget - chain.base_bytes) // counted.slot_bytes for budget in budgets]
    slack = counted.widened - counted.room
    rooms = {*fitting, *(room + slack for room in fitting)}
    feasible = (room for room in sorted(rooms) if table.rooms(room, room))
    return [simulate(chain, assemble(chain, table, room)) for room in feasible]


def _default_slots(chain: Chain) -> int:
    return min(max(_SLOTS_PER_STAGE * len(chain.stages), _FEWEST_SLOTS), _MOST_SLOTS)


def _keeping_everything(chain: Chain) -> Schedule:
    return Schedule(choices=(0,) * len(chain.stages))


def _fastest(chain: Chain, counted: Slots, budget_bytes: int) -> tuple[Schedule, Simulated]:
    """The fastest of the schedules for a few slots too many that fits after all; the last of them,
    for no slot too many, always does. If slots hide all that fit, one found by bytes; if none
    does, the one of the smallest peak."""
    table = _Table(chain, counted)
    for room in reversed(table.rooms(counted.room, counted.widened)):
        schedule = assemble(chain, table, room)
        found = simulate(chain, schedule)
        if found.peak_bytes <= budget_bytes:
            return schedule, found
    floor = Floor(chain)
    room_bytes = max(budget_bytes - chain.base_bytes, floor.room_bytes)
    schedule = assemble(chain, floor, room_bytes)
    return schedule, simulate(chain, schedule)


def _solution(schedule: Schedule, found: Simulated, *, rounding_bytes: int) -> Solution:
    return Solution(
        schedule=schedule,
        extra_s=found.extra_s,
        peak_bytes=found.peak_bytes,
        rounding_bytes=rounding_bytes,
    )


class _Table:
    """The least extra time from each stage on, for every number of slots left: a chooser by slots.

    Of single precision, as the times of ``rotor``.
    """

    def __init__(self, chain: Chain, counted: Slots) -> None:
        self._chain = chain
        self._counted = counted
        self._remaking = Remaking(chain, counted)
        count = len(chain.stages)
        self._spans = [
            [self._span(stage, each) for each in stage.options] for stage in chain.stages
        ]
        self._rows: Rows = np.full((count + 1, counted.widened + 1), np.inf, np.float32)
        self._rows[count, counted.size(chain.head_bytes) :] = 0.0
        for first in reversed(range(count)):
            self._fill(first)

    def rooms(self, least: int, most: int) -> list[int]:
        """``least``, and the further numbers of slots up to ``most`` that allow a lower time than
        one slot less; only those with which the chain fits."""
        times = self._rows[0].tolist()
        return [
            room
            for room in range(least, most + 1)
            if times[room] < math.inf and (room == least or times[room] < times[room - 1])
        ]

    def size(self, count_bytes: int) -> int:
        return self._counted.size(count_bytes)

    def split(self, first: int, last: int, room: int) -> int:
        return self._remaking.split(first, last, room)

    def option_or_segment(self, first: int, room: int) -> tuple[int | None, int]:
        times: dict[tuple[int | None, int], float] = {}
        stage = self._chain.stages[first]
        spans = self._spans[first]
        for index, (option, (kept, start)) in enumerate(zip(stage.options, spans, strict=True)):
            if room >= start:
                times[index, first] = option.extra_s + self._rows[first + 1, room - kept]
        fitting = self._remaking.fitting(first, self._remaking.lengths[first], room)
        if fitting:
            left = room - self.size(stage.input_bytes)
            later = self._rows[first + 1 : first + 1 + fitting, left]
            remade = self._remaking.rows(first)[:fitting, room] + later
            best = int(remade.argmin())
            times[None, first + best] = remade[best] - self._remaking.before[first]
        return min(times, key=times.__getitem__)

    def _fill(self, first: int) -> None:
        best, columns = self._rows[first], self._counted.widened + 1
        length = self._remaking.lengths[first]
        if length:
            later = self._rows[first + 1 : first + 1 + length]
            self._remaking.lower(best, later, first, pending_bytes=0)
            best -= np.float32(self._remaking.before[first])
        options = self._chain.stages[first].options
        for option, (kept, start) in zip(options, self._spans[first], strict=True):
            if start < columns:
                later = self._rows[first + 1, start - kept : columns - kept]
                np.minimum(best[start:], later + np.float32(option.extra_s), out=best[start:])

    def _span(self, stage: Stage, option: Option) -> tuple[int, int]:
        """The slots an option keeps, and those with which it can be taken at all."""
        kept = self.size(option.kept_bytes)
        peak_bytes = max(stage.forward_bytes, option.backward_bytes)
        return kept, max(kept, self.size(peak_bytes))
