"""The choice of options by what each frees in every stretch of the step that was seen. Pure.

A chain takes it that stages go backward in the reverse order of their forward. Where a model's
backward runs in another order, or tensors of a stage live on through skip connections, the course
of the step says what was alive when, and an integer program chooses (``dag_solving``). Each stage
is decided for itself: there are no segments here.
"""

from collections.abc import Iterator

from holdfast.activation._measuring.stretches import Course
from holdfast.activation._solving.chain import Chain, Stage
from holdfast.activation._solving.dag_solving import Interval, Saving, solve_intervals
from holdfast.activation._solving.schedule import Infeasible, Schedule, Segment, Step
from holdfast.activation._solving.solving import Solution


def solve_freely(chain: Chain, course: Course, budget_bytes: int) -> Solution | Infeasible:
    """The fastest options with which no stretch of ``course``, a step that keeps everything, would
    exceed the budget. ``ImportError`` without SciPy."""
    intervals = [
        Interval(name=_told(each.ends_at, chain), live_bytes=each.peak_bytes)
        for each in course.stretches
    ]
    savings, extra_s = [], {}
    for number, stage in enumerate(chain.stages):
        held, own = _when(course, number)
        for option, (kept, seconds, backward) in enumerate(_ways(stage)):
            extra_s[number, option] = seconds
            freed = [(each, stage.keep.kept_bytes - kept) for each in held]
            freed += [(each, stage.keep.backward_bytes - backward) for each in own]
            savings.append(Saving(stage=number, option=option, freed=tuple(freed)))
    found = solve_intervals(intervals, savings, extra_s, budget_bytes)
    if isinstance(found, Infeasible):
        return found
    peaks = [each.live_bytes for each in intervals]
    for saving in savings:
        if found[saving.stage] == saving.option:
            for place, freed_bytes in saving.freed:
                peaks[place] -= freed_bytes
    return Solution(
        schedule=_schedule(chain, found),
        extra_s=sum(extra_s[number, option] for number, option in enumerate(found)),
        peak_bytes=max(peaks),
        rounding_bytes=0,
    )


def _ways(stage: Stage) -> Iterator[tuple[int, float, int]]:
    """What is kept, the extra time and what lives in backward, of each option; last, if it can be,
    of keeping only the input."""
    for option in stage.options:
        yield option.kept_bytes, option.extra_s, option.backward_bytes
    if stage.replayable:
        yield stage.input_bytes, stage.forward_s, stage.replayed_bytes


def _when(course: Course, number: int) -> tuple[list[int], list[int]]:
    """The stretches in which a stage's tensors wait, and those of its backward."""
    marks = [each.ends_at for each in course.stretches]
    waits = marks.index(("forwarded", number)) + 1
    if ("backward", number) not in marks:
        return list(range(waits, len(marks))), []
    begins = marks.index(("backward", number)) + 1
    ends = next(
        (place for place in range(begins, len(marks)) if _is_backward(marks[place])),
        len(marks) - 1,
    )
    return list(range(waits, begins)), list(range(begins, ends + 1))


def _is_backward(mark: object) -> bool:
    return isinstance(mark, tuple) and mark[0] == "backward"


def _schedule(chain: Chain, found: tuple[int, ...]) -> Schedule:
    choices: list[int | None] = []
    segments = []
    for number, (stage, option) in enumerate(zip(chain.stages, found, strict=True)):
        if option < len(stage.options):
            choices.append(option)
            continue
        choices.append(None)
        steps = (Step(kind="replay", stage=number), Step(kind="backward", stage=number))
        segments.append(Segment(first=number, last=number, steps=steps))
    return Schedule(choices=tuple(choices), segments=tuple(segments))


def _told(mark: object, chain: Chain) -> str:
    match mark:
        case ("forwarded", int(number)):
            return f"the forward of {chain.stages[number].name}"
        case (str(kind), int(number)):
            return f"what comes before the {kind} of {chain.stages[number].name}"
        case _:
            return "the end of the step"
