"""What a plan has to show for itself. Knows the numbers, not how they came about or are drawn.

All bytes are over what is resident when the step begins (parameters, gradients already there), as
the budget is. All are plain values that go through JSON and come back equal.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Where a stage runs: the levels from ``start`` up to, not including, ``end``.

    ``stage`` is the stage's place among the report's rows.
    """

    kind: Literal["forward", "backward"]
    stage: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The live bytes of one step, at successive torch calls. ``peak_bytes`` is the most of them."""

    bytes_: tuple[int, ...]
    marks: tuple[Mark, ...]
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """What becomes of a stage.

    ``choice``: ``"keep"``, ``"recipes"``, ``"input"``, ``"moved"``, or ``"segment 3-5"`` for each
    stage of a segment. ``kept_bytes`` is what is alive of it between its forward and its backward,
    ``kept_all_bytes`` what would be if it dropped nothing. ``detail``, in words, may be empty.
    """

    name: str
    choice: str
    kept_bytes: int
    kept_all_bytes: int
    extra_s: float
    forward_s: float
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """The least extra time a step can have within a budget."""

    budget_bytes: int
    extra_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """A plan, for people.

    ``step_s`` and ``measured_step_s`` are the quicker of two steps, without and with the plan;
    ``before`` and ``after`` are one of each. ``what_sets_it`` names what needs ``smallest_bytes``,
    as in "the head" or "the backward of blocks.3". A budget larger by ``rounding_bytes`` admits
    whatever the solver's slots hid. ``curve`` is empty if no other budget was looked at. Where
    ranks plan together, what was measured is this rank's.
    """

    model: str
    device: str
    budget_bytes: int
    save_all_peak_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: int
    step_s: float
    predicted_step_s: float
    measured_step_s: float
    before: Timeline
    after: Timeline
    curve: tuple[CurvePoint, ...]
    smallest_bytes: int
    what_sets_it: str
    rows: tuple[StageRow, ...]
    notes: tuple[str, ...]
    rounding_bytes: int
    planning_s: float
