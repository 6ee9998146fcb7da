"""Options over intervals: the fastest choice is the fastest of all, found by trying them."""

import dataclasses
import itertools
import random
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.activation._solving.dag_solving import Interval, Saving, solve_intervals
from holdfast.activation._solving.schedule import Infeasible
from holdfast.errors import PlanError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    live: list[int]
    freed: list[list[list[int]]]  # by stage, option after the first, and interval
    times: list[list[int]]  # by stage and option after the first

    def intervals(self) -> list[Interval]:
        return [Interval(name=f"{at}", live_bytes=live) for at, live in enumerate(self.live)]

    def savings(self) -> list[Saving]:
        return [
            Saving(stage=stage, option=option, freed=tuple(enumerate(freed)))
            for stage, options in enumerate(self.freed)
            for option, freed in enumerate(options, 1)
        ]

    def extra_s(self) -> dict[tuple[int, int], float]:
        return {
            (stage, option): float(time)
            for stage, options in enumerate(self.times)
            for option, time in enumerate([0, *options])
        }

    def peak(self, choice: tuple[int, ...]) -> int:
        peaks = list(self.live)
        for stage, option in enumerate(choice):
            for at in range(len(peaks)):
                peaks[at] -= self.freed[stage][option - 1][at] if option else 0
        return max(peaks)

    def time(self, choice: tuple[int, ...]) -> float:
        return sum(self.extra_s()[each] for each in enumerate(choice))

    def choices(self) -> list[tuple[int, ...]]:
        return list(itertools.product(*(range(len(options) + 1) for options in self.times)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    intervals = draw(st.integers(1, 5))
    live = draw(st.lists(st.integers(20, 100), min_size=intervals, max_size=intervals))
    freed = draw(
        st.lists(
            st.lists(
                st.lists(st.integers(-5, 20), min_size=intervals, max_size=intervals), max_size=2
            ),
            min_size=1,
            max_size=4,
        )
    )
    times = [[draw(st.integers(0, 9)) for _ in options] for options in freed]
    return Case(live=live, freed=freed, times=times)


@settings(max_examples=40, deadline=None)
@given(case=cases(), share=st.floats(0.3, 1.1))
def test_it_is_the_fastest_of_all_choices(case, share):
    budget = int(max(case.live) * share)
    solved = solve_intervals(case.intervals(), case.savings(), case.extra_s(), budget)
    fitting = [choice for choice in case.choices() if case.peak(choice) <= budget]
    if not fitting:
        assert isinstance(solved, Infeasible)
        assert solved.smallest_bytes == min(map(case.peak, case.choices()))
        at_smallest = solve_intervals(
            case.intervals(), case.savings(), case.extra_s(), solved.smallest_bytes
        )
        assert case.peak(at_smallest) == solved.smallest_bytes
    else:
        assert case.peak(solved) <= budget
        assert case.time(solved) == min(map(case.time, fitting))


def test_what_a_skip_connection_keeps_alive_is_not_freed_by_dropping_it_elsewhere():
    # Two levels down and up again: what "down 1" saves lives over the whole step, as "up 1" needs
    # it, so only dropping it at "up 1" too lowers the bottom. A chain would count it freed.
    names = ("down 1", "down 2", "bottom", "up 2", "up 1")
    intervals = [
        Interval(name=name, live_bytes=live << 30)
        for name, live in zip(names, (4, 6, 9, 6, 4), strict=True)
    ]
    savings = [
        Saving(stage=0, option=1, freed=((1, 1 << 30), (3, 1 << 30))),
        Saving(stage=0, option=2, freed=((1, 1 << 30), (2, 2 << 30), (3, 1 << 30))),
        Saving(stage=1, option=1, freed=((2, 1 << 30), (4, -(1 << 30)))),
    ]
    extra_s = {(0, 0): 0.0, (0, 1): 0.001, (0, 2): 0.004, (1, 0): 0.0, (1, 1): 0.002}
    assert solve_intervals(intervals, savings, extra_s, 9 << 30) == (0, 0)
    assert solve_intervals(intervals, savings, extra_s, 8 << 30) == (0, 1)
    assert solve_intervals(intervals, savings, extra_s, 7 << 30) == (2, 0)
    assert solve_intervals(intervals, savings, extra_s, 6 << 30) == (2, 1)
    assert solve_intervals(intervals, savings, extra_s, (6 << 30) - 1) == Infeasible(
        smallest_bytes=6 << 30, reason="bottom"
    )


def test_a_byte_too_many_does_not_pass_for_one_that_fits():
    # Beyond what the solver sees: one byte of a petabyte.
    live = 1 << 50
    intervals = [Interval(name="all", live_bytes=live)]
    savings = [
        Saving(stage=0, option=1, freed=((0, live // 2 - 1),)),
        Saving(stage=0, option=2, freed=((0, live // 2),)),
    ]
    extra_s = {(0, 0): 0.0, (0, 1): 1.0, (0, 2): 2.0}
    assert solve_intervals(intervals, savings, extra_s, live // 2) == (2,)
    assert solve_intervals(intervals, savings, extra_s, live // 2 + 1) == (1,)


def test_times_that_differ_by_nanoseconds_are_told_apart():
    intervals = [Interval(name="all", live_bytes=100)]
    savings = [
        Saving(stage=0, option=1, freed=((0, 50),)),
        Saving(stage=0, option=2, freed=((0, 50),)),
    ]
    extra_s = {(0, 0): 0.0, (0, 1): 3e-9, (0, 2): 2e-9}
    assert solve_intervals(intervals, savings, extra_s, 50) == (2,)


def test_hundreds_of_options_are_chosen_among():
    intervals = [Interval(name=f"{at}", live_bytes=10_000 + 7 * at) for at in range(60)]
    savings = [
        Saving(
            stage=stage,
            option=option,
            freed=tuple((at, 40 * option + (stage * at) % 11) for at in range(stage, 60)),
        )
        for stage in range(60)
        for option in range(1, 6)
    ]
    extra_s = {
        (stage, option): 0.001 * option**2 + 1e-5 * ((7 * stage) % 13)
        for stage in range(60)
        for option in range(6)
    }
    choice = solve_intervals(intervals, savings, extra_s, 10_000)
    freed = {(saving.stage, saving.option): dict(saving.freed) for saving in savings}
    for at, interval in enumerate(intervals):
        gone = sum(freed.get(each, {}).get(at, 0) for each in enumerate(choice))
        assert interval.live_bytes - gone <= 10_000


@pytest.mark.parametrize(
    ("savings", "extra_s", "match"),
    [
        ([Saving(stage=0, option=3, freed=())], {(0, 0): 0.0}, "no option 3 of stage 0"),
        ([Saving(stage=0, option=0, freed=((1, 5),))], {(0, 0): 0.0}, "no interval 1"),
        ([], {}, "an option of every stage"),
        ([], {(1, 0): 0.0}, "an option of every stage"),
        ([], {(0, 0): -1.0}, "extra_s"),
        ([], {(0, 0): float("nan")}, "extra_s"),
    ],
)
def test_numbers_that_do_not_exist_are_refused(savings, extra_s, match):
    with pytest.raises(ValueError, match=match):
        solve_intervals([Interval(name="all", live_bytes=9)], savings, extra_s, 9)


def test_without_scipy_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ImportError, match=r'pip install "holdfast\[solver\]"'):
        solve_intervals([Interval(name="all", live_bytes=9)], [], {(0, 0): 0.0}, 9)


def test_a_search_ends_when_its_time_does():
    chance = random.Random(3)
    case = Case(
        live=[30_000] * 40,
        freed=[[[chance.randrange(900) for _ in range(40)] for _ in range(3)] for _ in range(30)],
        times=[[chance.randrange(1, 1000) for _ in range(3)] for _ in range(30)],
    )
    parts = case.intervals(), case.savings(), case.extra_s()
    with pytest.raises(PlanError, match=r"no choice of options within 1e-09 s.*solver='chain'"):
        solve_intervals(*parts, 21_000, most_s=1e-9)
    # The fastest takes minutes to prove: what there is in a second fits, and that is enough.
    assert case.peak(solve_intervals(*parts, 21_000, most_s=1.0)) <= 21_000
