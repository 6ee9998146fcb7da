"""What a plan has to show, from what was measured and chosen. Pure."""

from collections import Counter
from collections.abc import Iterator, Sequence

from holdfast.activation._measuring.stretches import END, Course
from holdfast.activation._planning.deciding import PlannedStage
from holdfast.activation._planning.seen import Profile, Recipes
from holdfast.activation._reporting.report import CurvePoint, Mark, PlanReport, StageRow, Timeline
from holdfast.activation._solving.chain import Chain, Stage
from holdfast.activation._solving.solving import Point, Solution

_MOST_POINTS = 1500


def report_of(
    model: str,
    seen: Profile,
    solution: Solution,
    course: Course,
    *,
    stages: Sequence[PlannedStage],
    chain: Chain,
    floor: tuple[Solution, str],
    curve: Sequence[Point],
    limit: int,
    times: tuple[float, float],
    planning_s: float,
) -> PlanReport:
    """The report of a plan whose step was measured. ``floor``: the smallest solution and what sets
    it; ``times``: the step without and with the plan."""
    step_s, planned_s = times
    smallest, what_sets_it = floor
    notes = []
    if not any(choice != 0 for choice in solution.schedule.choices):
        notes.append("Keeping everything fits the budget: the plan changes nothing.")
    return PlanReport(
        model=model,
        device=seen.device,
        budget_bytes=limit,
        save_all_peak_bytes=seen.kept.peak_bytes,
        predicted_peak_bytes=solution.peak_bytes,
        measured_peak_bytes=course.peak_bytes,
        step_s=step_s,
        predicted_step_s=step_s + solution.extra_s,
        measured_step_s=planned_s,
        before=timeline_of(seen.kept),
        after=timeline_of(course),
        curve=tuple(
            CurvePoint(budget_bytes=each.budget_bytes, extra_s=each.extra_s) for each in curve
        ),
        smallest_bytes=min(smallest.peak_bytes, limit),
        what_sets_it=what_sets_it,
        rows=tuple(_rows(stages, chain, solution)),
        notes=tuple(notes),
        rounding_bytes=solution.rounding_bytes,
        planning_s=planning_s,
    )


def _rows(planned: Sequence[PlannedStage], chain: Chain, solution: Solution) -> Iterator[StageRow]:
    schedule = solution.schedule
    segments = {
        number: segment
        for segment in schedule.segments
        for number in range(segment.first, segment.last + 1)
    }
    for number, (known, stage) in enumerate(zip(planned, chain.stages, strict=True)):
        choice = schedule.choices[number]
        if choice is None:
            segment = segments[number]
            alone = segment.first == segment.last
            yield _row(
                stage,
                choice="input" if alone else f"segment {segment.first}-{segment.last}",
                kept_bytes=stage.input_bytes if number == segment.first else 0,
                extra_s=stage.forward_s
                * sum(
                    step.kind in {"run", "replay"} and step.stage == number
                    for step in segment.steps
                ),
                detail="run again in backward",
            )
            continue
        option = stage.options[choice]
        yield _row(
            stage,
            choice=option.label,
            kept_bytes=option.kept_bytes,
            extra_s=option.extra_s,
            detail=_remade(known.recipes, option.dropped),
        )


def _row(stage: Stage, *, choice: str, kept_bytes: int, extra_s: float, detail: str) -> StageRow:
    return StageRow(
        name=stage.name,
        choice=choice,
        kept_bytes=kept_bytes,
        kept_all_bytes=stage.keep.kept_bytes,
        extra_s=extra_s,
        forward_s=stage.forward_s,
        detail=detail,
    )


def _remade(recipes: Recipes | None, dropped: tuple[int, ...]) -> str:
    if recipes is None or not dropped:
        return ""
    counted = Counter(recipes.drops.drops[number].label for number in dropped)
    told = ", ".join(
        label if count == 1 else f"{label} x{count}" for label, count in counted.items()
    )
    return f"remakes {told}"


def timeline_of(course: Course) -> Timeline:
    """A course with at most so many points, every peak among them."""
    levels = course.levels
    step = max(1, -(-len(levels) // _MOST_POINTS))
    points = tuple(max(levels[at : at + step]) for at in range(0, len(levels), step))
    begun: dict[int, int] = {}
    marks = []
    running: tuple[int, int] | None = None
    for each in course.stretches:
        at = each.noted // step
        match each.ends_at:
            case ("forward", int(number)):
                begun[number] = at
            case ("forwarded", int(number)):
                marks.append(Mark(kind="forward", stage=number, start=begun[number], end=at))
            case ("backward", int(number)):
                if running is not None:
                    marks.append(Mark(kind="backward", stage=running[0], start=running[1], end=at))
                running = (number, at)
            case mark if mark == END and running is not None:
                marks.append(Mark(kind="backward", stage=running[0], start=running[1], end=at))
            case _:
                pass
    return Timeline(bytes_=points, marks=tuple(marks), peak_bytes=course.peak_bytes)
