"""What a plan comes to, in a sentence and four figures. Knows which numbers matter, not how they
are shown.
"""

from dataclasses import dataclass
from typing import Final

from holdfast.activation._reporting.report import PlanReport
from holdfast.activation._reporting.words import (
    as_share,
    exactly,
    in_bytes,
    in_seconds,
    more_by_share,
    plain,
)

_ROOM: Final = 1.25
_GAIN: Final = 0.2  # of a step: touching less memory may gain some of this, but no plan gains more


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A number that matters: in few digits, exactly, and what to make of it."""

    name: str
    shown: str
    exact: str
    about: str


def budget_in_sight(report: PlanReport) -> bool:
    """Whether a picture of the peaks has room for the budget: one far above presses them flat."""
    peak = max(report.before.peak_bytes, report.save_all_peak_bytes, report.measured_peak_bytes)
    return report.budget_bytes <= peak * _ROOM


def share_of_step(report: PlanReport, extra_s: float) -> float:
    """Extra seconds as a share of the step that saves everything; 0 if that took no time."""
    return extra_s / report.step_s if report.step_s > 0 else 0.0


def extra_s(report: PlanReport) -> float:
    """What the plan adds to a step."""
    return report.measured_step_s - report.step_s


def is_timed(report: PlanReport) -> bool:
    """Whether what was measured can be what the plan adds. A plan only adds work: if the step came
    out much faster, something else on the machine slowed the step without it."""
    return share_of_step(report, extra_s(report)) >= -_GAIN


def subject(report: PlanReport) -> str:
    """What was planned for, such as ``12 stages on cpu``."""
    stages = "1 stage" if len(report.rows) == 1 else f"{len(report.rows)} stages"
    return f"{stages} on {plain(report.device)}"


def verdict(report: PlanReport) -> str:
    """That it fits, and at what cost."""
    return (
        f"It fits: a measured step peaks at {in_bytes(report.measured_peak_bytes)}, within the "
        f"budget of {in_bytes(report.budget_bytes)}, {_cost(report)}."
    )


def figures(report: PlanReport) -> tuple[Figure, ...]:
    """The peak before and after, the budget, the extra time, the smallest budget possible."""
    return _peak(report), _budget(report), _time(report), _smallest(report)


def closing(report: PlanReport) -> str:
    """What planning took, and how finely it looked."""
    steps = f", {report.planning_s / report.step_s:.1f} times a step" if report.step_s > 0 else ""
    said = f"Planned in {in_seconds(report.planning_s)}{steps}."
    if report.rounding_bytes:
        said += (
            f" Memory is counted in steps: no plan for {in_bytes(report.rounding_bytes)} less is "
            "foreseen to be faster."
        )
    return said


def _cost(report: PlanReport) -> str:
    if not is_timed(report):
        return "and the machine was too busy to tell how much longer it takes"
    share = share_of_step(report, extra_s(report))
    if share <= 0 or more_by_share(share) == more_by_share(0):
        return "and takes no longer"
    return f"and takes {more_by_share(share)[1:]} longer"


def _peak(report: PlanReport) -> Figure:
    before, after = report.save_all_peak_bytes, report.measured_peak_bytes
    about = f"{as_share(after / before)} of saving everything, " if before > 0 else ""
    about += f"measured (predicted {in_bytes(report.predicted_peak_bytes)})"
    return Figure(
        name="Peak",
        shown=f"{in_bytes(before)} → {in_bytes(after)}",
        exact=f"{exactly(before)} → {exactly(after)}",
        about=about,
    )


def _budget(report: PlanReport) -> Figure:
    budget = report.budget_bytes
    return Figure(
        name="Budget",
        shown=in_bytes(budget),
        exact=exactly(budget),
        about=f"{in_bytes(budget - report.measured_peak_bytes)} to spare",
    )


def _time(report: PlanReport) -> Figure:
    extra = extra_s(report)
    shown = more_by_share(share_of_step(report, extra))
    times = f"{in_seconds(report.step_s)} → {in_seconds(report.measured_step_s)} a step"
    about = f"{times}, measured"
    if not is_timed(report):
        foreseen = share_of_step(report, report.predicted_step_s - report.step_s)
        shown = "not known"
        about = f"{times}: too busy a machine (foreseen {more_by_share(foreseen)})"
    return Figure(name="Extra time", shown=shown, exact=f"{extra:+.6f} s a step", about=about)


def _smallest(report: PlanReport) -> Figure:
    return Figure(
        name="Smallest foreseen",
        shown=in_bytes(report.smallest_bytes),
        exact=exactly(report.smallest_bytes),
        about=f"set by {plain(report.what_sets_it)}",
    )
