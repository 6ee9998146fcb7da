"""Extra time against memory, as a picture. Knows the points of the curve and where to draw them."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from holdfast.activation._reporting.drawing import (
    Frame,
    Label,
    Markup,
    Size,
    byte_ticks,
    dense,
    element,
    hint,
    labelled,
    line,
    percent,
    picture,
    ticks,
    up_axis,
    words,
    written,
)
from holdfast.activation._reporting.report import CurvePoint, PlanReport
from holdfast.activation._reporting.summary import budget_in_sight, extra_s, is_timed, share_of_step
from holdfast.activation._reporting.words import in_bytes, more_by_share


def curve_key(report: PlanReport) -> Iterator[Markup]:
    """What the picture's points stand for, with their numbers: there is no room for them in it."""
    for dot in _dots(report, _in_order(report)):
        yield element("li", words(_label(dot)), class_=f"mark point {dot.class_}")


def curve_picture(report: PlanReport, size: Size) -> Markup:
    points = _in_order(report)
    dots = tuple(_dots(report, points))
    frame = _frame(report, dots, points, size)
    labels = [
        Label(x=frame.x(dot.at_bytes), y=frame.y(dot.share), text=dot.name, class_=dot.class_)
        for dot in dots
    ]
    if budget_in_sight(report):
        x, y = frame.x(report.budget_bytes), frame.top + 30
        labels.append(Label(x=x, y=y, text="budget", class_="budget"))
    stairs = _stairs(frame, report, points)
    inside = [
        *_unreachable(frame, report),
        *up_axis(frame, ((at, percent(at)) for at in ticks(*frame.up, 4))),
        *_across(frame, size),
        line(stairs, "line after"),
        *_hints(frame, report, points),
        *_budget(frame, report),
        *(_drawn(frame, dot) for dot in dots),
        *labelled(frame, labels, [*dense(stairs), *_around(frame, dots)]),
    ]
    return picture(frame, _about(dots), size.class_, inside)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dot:
    name: str
    at_bytes: int
    share: float
    class_: str


def _in_order(report: PlanReport) -> list[CurvePoint]:
    return sorted(report.curve, key=lambda point: point.budget_bytes)


def _dots(report: PlanReport, points: Sequence[CurvePoint]) -> Iterator[_Dot]:
    if points:
        share = share_of_step(report, points[0].extra_s)
        yield _Dot(name="smallest", at_bytes=report.smallest_bytes, share=share, class_="smallest")
    predicted = share_of_step(report, report.predicted_step_s - report.step_s)
    yield _Dot(
        name="chosen", at_bytes=report.predicted_peak_bytes, share=predicted, class_="chosen"
    )
    if is_timed(report):
        measured = share_of_step(report, extra_s(report))
        yield _Dot(
            name="measured", at_bytes=report.measured_peak_bytes, share=measured, class_="measured"
        )
    yield _Dot(
        name="save everything", at_bytes=report.save_all_peak_bytes, share=0.0, class_="before"
    )


def _frame(
    report: PlanReport, dots: Sequence[_Dot], points: Sequence[CurvePoint], size: Size
) -> Frame:
    shares = [share_of_step(report, point.extra_s) for point in points]
    shares += [dot.share for dot in dots]
    most = max(*shares, 0.01)
    widest = max(*(dot.at_bytes for dot in dots), 1)
    if budget_in_sight(report):
        widest = max(widest, report.budget_bytes)
    return Frame(
        width=size.width,
        height=size.height,
        left=size.left,
        right=16,
        top=14,
        bottom=44,
        across=(0.0, widest * 1.04),
        up=(min(*shares, 0.0) - most * 0.02, most * 1.15),
    )


def _across(frame: Frame, size: Size) -> Iterator[Markup]:
    for value, text in byte_ticks(frame.across[1], size.width // 90):
        yield written(frame.x(value), frame.floor + 18, text, "tick", "middle")
    middle = (frame.left + frame.right_edge) / 2
    yield written(middle, frame.floor + 38, "budget for the step", "tick", "middle")


def _unreachable(frame: Frame, report: PlanReport) -> Iterator[Markup]:
    width = frame.x(report.smallest_bytes) - frame.left
    yield element(
        "rect",
        hint(f"no plan reaches less than {in_bytes(report.smallest_bytes)}"),
        class_="unreachable",
        x=frame.left,
        y=frame.top,
        width=max(width, 0),
        height=frame.floor - frame.top,
    )


def _budget(frame: Frame, report: PlanReport) -> Iterator[Markup]:
    if budget_in_sight(report):
        x = frame.x(report.budget_bytes)
        yield line([(x, frame.top), (x, frame.floor)], "line budget")


def _stairs(
    frame: Frame, report: PlanReport, points: Sequence[CurvePoint]
) -> list[tuple[float, float]]:
    """A point's time is that of every budget from its own up to the next."""
    corners: list[tuple[float, float]] = []
    for point in points:
        x, y = frame.x(point.budget_bytes), frame.y(share_of_step(report, point.extra_s))
        if corners and corners[-1][1] != y:
            corners.append((x, corners[-1][1]))
        corners.append((x, y))
    if corners:
        corners.append((max(frame.right_edge, corners[-1][0]), corners[-1][1]))
    return corners


def _hints(frame: Frame, report: PlanReport, points: Sequence[CurvePoint]) -> Iterator[Markup]:
    lefts = [frame.x(point.budget_bytes) for point in points]
    ends = itertools.pairwise([*lefts, frame.right_edge])
    for point, (left, right) in zip(points, ends, strict=True):
        share = more_by_share(share_of_step(report, point.extra_s))
        yield element(
            "rect",
            hint(f"from {in_bytes(point.budget_bytes)}: {share} time"),
            class_="spot",
            x=left,
            y=frame.top,
            width=max(right - left, 0),
            height=frame.floor - frame.top,
        )


def _drawn(frame: Frame, dot: _Dot) -> Markup:
    return element(
        "circle",
        hint(_label(dot)),
        class_=f"dot {dot.class_}",
        cx=frame.x(dot.at_bytes),
        cy=frame.y(dot.share),
        r=5,
    )


def _around(frame: Frame, dots: Sequence[_Dot]) -> Iterator[tuple[float, float]]:
    for dot in dots:
        x, y = frame.x(dot.at_bytes), frame.y(dot.share)
        yield from ((x + right, y + down) for right in (-4, 0, 4) for down in (-4, 0, 4))


def _label(dot: _Dot) -> str:
    named = f"{dot.name} {in_bytes(dot.at_bytes)}"
    return named if dot.class_ == "before" else f"{named}, {more_by_share(dot.share)}"


def _about(dots: Sequence[_Dot]) -> str:
    return f"Extra time of a step against its budget: {'; '.join(map(_label, dots))}."
