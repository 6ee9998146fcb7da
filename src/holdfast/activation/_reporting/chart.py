"""The memory of a step as a chart of letters. Knows timelines and block letters, no terminal.

The step after stands solid in the shade of the step before, lined up with it stage by stage.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from holdfast.activation._reporting.lines import places, span
from holdfast.activation._reporting.report import PlanReport, Timeline
from holdfast.activation._reporting.words import columns, in_bytes

ROWS: Final = 9
SHADE: Final = "░"
SOLID: Final = "█"
LIMIT: Final = "┄"
_EIGHTHS: Final = " ▁▂▃▄▅▆▇█"


def legend(report: PlanReport) -> str:
    """What the chart's letters stand for."""
    letters = [f"{SHADE} before", f"{SOLID} after"]
    if report.budget_bytes < _top(report):
        letters.append(f"{LIMIT} budget")
    return ", ".join(letters)


def chart(report: PlanReport, width: int) -> tuple[str, ...]:
    """Lines of at most ``width`` columns, the axis and its words included."""
    top = _top(report)
    sides = _sides(report, top)
    margin = max(map(columns, sides))
    across = max(width - margin - 2, 1)
    at = places(report.before)
    before = _levels(report.before, at, across)
    after = _levels(report.after, places(report.after, report.before), across)
    lines = [
        f"{side:>{margin}} ┤{_row(row, top, before, after, report.budget_bytes)}".rstrip()
        for row, side in enumerate(sides)
    ]
    below = f"{'0':>{margin}} └{'─' * across}"
    return (*lines, below, f"{'':{margin}}  {_ends(report.before, at, across)}".rstrip())


def _top(report: PlanReport) -> int:
    return max(report.before.peak_bytes, report.after.peak_bytes, 1)


def _sides(report: PlanReport, top: int) -> list[str]:
    sides = [""] * ROWS
    sides[0] = in_bytes(top)
    if report.budget_bytes < top:
        row = _row_of(report.budget_bytes, top)
        sides[row] = f"budget {in_bytes(report.budget_bytes)}"
    return sides


def _row_of(level: int, top: int) -> int:
    return min(max(ROWS - 1 - level * ROWS // top, 0), ROWS - 1)


def _levels(timeline: Timeline, at: Sequence[float], across: int) -> list[int]:
    """The most in each column; where nothing happens, what was alive before."""
    levels = [-1] * across
    for place, level in zip(at, timeline.bytes_, strict=True):
        column = min(int(place * across), across - 1)
        levels[column] = max(levels[column], level)
    last = 0
    for column, level in enumerate(levels):
        last = level if level >= 0 else last
        levels[column] = last
    return levels


def _row(row: int, top: int, before: Sequence[int], after: Sequence[int], budget: int) -> str:
    empty = LIMIT if budget < top and row == _row_of(budget, top) else " "
    floor = ROWS - 1 - row
    return "".join(
        _letter(level * ROWS / top - floor, shade * ROWS / top - floor, empty)
        for level, shade in zip(after, before, strict=True)
    )


def _letter(solid: float, shade: float, empty: str) -> str:
    """One letter, for how far the two reach into its height."""
    eighths = min(max(round(solid * 8), 0), 8)
    if eighths:
        return _EIGHTHS[eighths]
    return SHADE if shade >= 0.5 else empty  # noqa: PLR2004 -- half of the letter's height


def _ends(before: Timeline, at: Sequence[float], across: int) -> str:
    words = [" "] * across
    for kind, middle in _middles(before, at):
        start = int(middle * across) - len(kind) // 2
        if 0 <= start <= across - len(kind):
            words[start : start + len(kind)] = kind
    return "".join(words)


def _middles(before: Timeline, at: Sequence[float]) -> Iterator[tuple[str, float]]:
    for kind in ("forward", "backward"):
        ends = [end for mark in before.marks if mark.kind == kind for end in span(mark, at)]
        if ends:
            yield kind, (min(ends) + max(ends)) / 2
