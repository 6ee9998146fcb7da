"""The memory of a step, before and after, as a picture. Knows timelines and where to draw them.

Both steps are drawn on one axis, lined up at their stages' boundaries; below them a ribbon has, for
each stage's forward and backward, the colour of what becomes of it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from holdfast.activation._reporting.drawing import (
    Frame,
    Label,
    Markup,
    Size,
    area,
    byte_ticks,
    dense,
    element,
    hint,
    labelled,
    level,
    line,
    picture,
    up_axis,
    written,
)
from holdfast.activation._reporting.folding import kind_of
from holdfast.activation._reporting.lines import highest, named, places, span, thinned
from holdfast.activation._reporting.report import Mark, PlanReport, Timeline
from holdfast.activation._reporting.summary import budget_in_sight
from holdfast.activation._reporting.words import in_bytes, plain, shared_prefix


def timeline_picture(report: PlanReport, size: Size) -> Markup:
    before = thinned(report.before, size.points)
    after = thinned(report.after, size.points)
    frame = _frame(report, size)
    at = places(before)
    steps = [
        _Step(timeline=before, at=at, name="before"),
        _Step(timeline=after, at=places(after, before), name="after"),
    ]
    inside = [
        *_bands(frame, before, at),
        *up_axis(frame, byte_ticks(frame.up[1], 5)),
        *(shape for step in steps for shape in _shapes(frame, step)),
        *_limits(frame, report),
        *_ribbon(frame, report, before, at),
        *_hints(frame, report, before, at),
        *labelled(frame, _labels(frame, report, steps), _drawn(frame, report, steps)),
    ]
    return picture(frame, _about(report), size.class_, inside)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    timeline: Timeline
    at: Sequence[float]
    name: str


def _frame(report: PlanReport, size: Size) -> Frame:
    drawn = [report.before.peak_bytes, report.after.peak_bytes]
    if budget_in_sight(report):
        drawn.append(report.budget_bytes)
    return Frame(
        width=size.width,
        height=size.height,
        left=size.left,
        right=8,
        top=34,
        bottom=48,
        across=(0.0, 1.0),
        up=(0.0, max(*drawn, 1) * 1.06),
    )


def _bands(frame: Frame, before: Timeline, at: Sequence[float]) -> Iterator[Markup]:
    for kind in ("forward", "backward"):
        marks = [mark for mark in before.marks if mark.kind == kind]
        for place, mark in enumerate(sorted(marks, key=lambda mark: mark.start)):
            yield _column(frame, mark, at, f"band {'odd' if place % 2 else 'even'}")
        if marks:
            ends = [frame.x(end) for mark in marks for end in span(mark, at)]
            yield written((min(ends) + max(ends)) / 2, 13, kind, "tick", "middle")


def _points(frame: Frame, step: _Step) -> list[tuple[float, float]]:
    levels = zip(step.at, step.timeline.bytes_, strict=True)
    return [(frame.x(at), frame.y(level)) for at, level in levels]


def _drawn(
    frame: Frame, report: PlanReport, steps: Sequence[_Step]
) -> Iterator[tuple[float, float]]:
    for step in steps:
        yield from dense(_points(frame, step))
    y = frame.y(report.budget_bytes)
    yield from dense([(frame.left, y), (frame.right_edge, y)])


def _shapes(frame: Frame, step: _Step) -> Iterator[Markup]:
    points = _points(frame, step)
    yield area(points, frame.floor, f"area {step.name}")
    yield line(points, f"line {step.name}")


def _limits(frame: Frame, report: PlanReport) -> Iterator[Markup]:
    if budget_in_sight(report):
        yield level(frame, frame.y(report.budget_bytes), "line budget")


def _ribbon(
    frame: Frame, report: PlanReport, before: Timeline, at: Sequence[float]
) -> Iterator[Markup]:
    shared = shared_prefix([row.name for row in report.rows])
    free_from = 0.0
    for mark in sorted(before.marks, key=lambda mark: mark.start):
        if mark.stage >= len(report.rows):
            continue
        row = report.rows[mark.stage]
        left, right = (frame.x(end) for end in span(mark, at))
        yield element(
            "rect",
            class_=f"choice {kind_of(row.choice)}",
            x=left,
            y=frame.floor + 6,
            width=right - left - min((right - left) * 0.06, 0.6),
            height=12,
        )
        name = plain(row.name)[shared:]
        half, middle = len(name) * 3.1 + 3, (left + right) / 2
        if middle - half >= free_from and middle + half <= frame.width and half <= 40:  # noqa: PLR2004 -- px
            free_from = middle + half
            yield written(middle, frame.floor + 34, name, "stage", "middle")


def _hints(
    frame: Frame, report: PlanReport, before: Timeline, at: Sequence[float]
) -> Iterator[Markup]:
    afterwards = {name: highest(report.after, mark) for name, mark in named(report.after)}
    for name, mark in named(before):
        if mark.stage >= len(report.rows):
            continue
        row = report.rows[mark.stage]
        text = f"{mark.kind} of {row.name} ({row.choice}): {in_bytes(highest(before, mark))}"
        if name in afterwards:
            text += f" → {in_bytes(afterwards[name])}"
        yield _column(frame, mark, at, "spot", hint(text))


def _labels(frame: Frame, report: PlanReport, steps: Sequence[_Step]) -> Iterator[Label]:
    for step in steps:
        levels = step.timeline.bytes_
        if not levels:
            continue
        top = max(range(len(levels)), key=levels.__getitem__)
        yield Label(
            x=frame.x(step.at[top]),
            y=frame.y(step.timeline.peak_bytes),
            text=f"{step.name} {in_bytes(step.timeline.peak_bytes)}",
            class_=step.name,
        )
    if budget_in_sight(report):
        yield Label(
            x=frame.left,
            y=frame.y(report.budget_bytes),
            text=f"budget {in_bytes(report.budget_bytes)}",
            class_="budget",
        )


def _column(frame: Frame, mark: Mark, at: Sequence[float], class_: str, *inside: Markup) -> Markup:
    left, right = (frame.x(end) for end in span(mark, at))
    return element(
        "rect",
        *inside,
        class_=class_,
        x=left,
        y=frame.top - 14,
        width=right - left,
        height=frame.floor - frame.top + 14,
    )


def _about(report: PlanReport) -> str:
    return (
        "Live memory over one step. Saving everything it peaks at "
        f"{in_bytes(report.before.peak_bytes)}; with the plan at "
        f"{in_bytes(report.after.peak_bytes)}. The budget is {in_bytes(report.budget_bytes)}."
    )
