"""The demo's own pictures: the losses of its runs, and what saves took. Knows where lines go."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.activation._reporting.drawing import (
    Frame,
    Label,
    Markup,
    Size,
    dense,
    element,
    hint,
    labelled,
    line,
    picture,
    ticks,
    up_axis,
    words,
    written,
)
from holdfast.cli._demonstration.acts import Run, Save
from holdfast.cli._demonstration.proofs import Story, in_time

_LANE: Final = 26
_ROW: Final = 42
_PHONE: Final = 500

LOSS_KEY: Final = (
    ("whole", "undisturbed"),
    ("killed", "until a rank was killed"),
    ("resumed", "resumed"),
    ("point saved", "saved"),
    ("point flipped", "saved, then a bit flipped"),
    ("point torn", "killed half-way: not there"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moment:
    """Something that happened between two steps."""

    step: float
    name: str
    about: str
    class_: str


def loss_picture(story: Story, size: Size) -> Markup:
    """Loss against step: what was undisturbed as a wide line, and on it what was not. Below are the
    two runs, with their saves."""
    frame = _loss_frame(story, size)
    whole = _points(frame, story.undisturbed)
    moments = tuple(_moments(story))
    inside = [
        *up_axis(frame, ((at, f"{at:g}") for at in ticks(*frame.up, 5))),
        *_step_axis(frame, story.course.steps),
        line(whole, "line whole"),
        *(_dot(frame, step, loss, "killed") for step, loss in story.killed.losses.items()),
        line(_points(frame, story.resumed), "line resumed"),
        *(_dot(frame, step, loss, "resumed") for step, loss in story.resumed.losses.items()),
        *(part for moment in moments for part in _upright(frame, moment)),
        *_lanes(frame, story),
        *labelled(frame, _labels(frame, moments, size), dense(whole)),
    ]
    return picture(frame, _about(story), size.class_, inside)


def stall_picture(saves: Sequence[Save], size: Size) -> Markup:
    """A bar for each save: how long it took, and, solid, how long the training waited for it."""
    longest = max((each.total_s for each in saves), default=1.0)
    frame = Frame(
        width=size.width,
        height=_ROW * max(len(saves), 1) + 4,
        left=2,
        right=2,
        top=0,
        bottom=0,
        across=(0.0, longest),
        up=(0.0, 1.0),
    )
    inside = [shape for row, each in enumerate(saves) for shape in _bars(frame, row, each)]
    about = "; ".join(_save_words(each) for each in saves)
    return picture(frame, f"What saves took. {about}.", size.class_, inside)


def _loss_frame(story: Story, size: Size) -> Frame:
    losses = [*story.undisturbed.losses.values(), *story.killed.losses.values()]
    least, most = min(losses, default=0.0), max(losses, default=1.0)
    room = (most - least) * 0.08 or 1.0
    return Frame(
        width=size.width,
        height=size.height,
        left=size.left,
        right=14,
        top=12,
        bottom=40 + 2 * _LANE,
        across=(0.0, float(story.course.steps)),
        up=(least - room, most + room),
    )


def _points(frame: Frame, run: Run) -> list[tuple[float, float]]:
    return [(frame.x(step), frame.y(loss)) for step, loss in sorted(run.losses.items())]


def _step_axis(frame: Frame, steps: int) -> Iterator[Markup]:
    for at in ticks(0, steps, 6):
        yield written(frame.x(at), frame.floor + 18, f"{at:g}", "tick", "middle")
    yield written(frame.left - 8, frame.floor + 18, "step", "tick", "end")


def _dot(frame: Frame, step: int, loss: float, class_: str) -> Markup:
    return element(
        "circle",
        hint(f"step {step}: {loss!r}"),
        class_=f"spot-{class_}",
        cx=frame.x(step),
        cy=frame.y(loss),
        r=(3.4 if class_ == "resumed" else 5) * (1 if frame.width > _PHONE else 0.7),
    )


def _moments(story: Story) -> Iterator[_Moment]:
    if story.killed.killed is not None:
        yield _Moment(
            step=_end(story.killed),
            name="SIGKILL",
            about=f"SIGKILL, amid the save of step {story.killed.killed.step}",
            class_="kill",
        )
    found = story.resumed.resumed
    if found is not None:
        yield _Moment(
            step=float(found.step),
            name="resumed",
            about=f"resumed from here, {found.saved_by} ranks to {found.ranks}",
            class_="resume",
        )


def _end(run: Run) -> float:
    """A run that was killed had begun its next step."""
    return max(run.losses, default=0) + 0.5


def _upright(frame: Frame, moment: _Moment) -> Iterator[Markup]:
    """A line down through the picture and, below the numbers of steps, through the lanes."""
    x, lanes = frame.x(moment.step), frame.floor + 26
    for top, bottom in ((frame.top, frame.floor), (lanes, lanes + 2 * _LANE)):
        yield line([(x, top), (x, bottom)], f"line {moment.class_}")


def _labels(frame: Frame, moments: Sequence[_Moment], size: Size) -> Iterator[Label]:
    for nth, moment in enumerate(moments):
        text = moment.about if size.class_ == "wide" else moment.name
        y = frame.top + 30 + 26 * nth
        yield Label(x=frame.x(moment.step), y=y, text=text, class_=moment.class_)


def _lanes(frame: Frame, story: Story) -> Iterator[Markup]:
    course, killed, resumed = story.course, story.killed, story.resumed
    marks = [(each.step, "saved") for each in killed.saves if each.step != course.flipped]
    marks += [(course.flipped, "flipped")]
    if killed.killed is not None:
        marks += [(killed.killed.step, "torn")]
    yield from _lane(frame, 0, killed, ends=(0.0, _end(killed)), class_="killed", marks=marks)
    began = float(resumed.resumed.step) if resumed.resumed is not None else 0.0
    ends = began, float(max(resumed.losses, default=0))
    after = [(each.step, "saved") for each in resumed.saves]
    yield from _lane(frame, 1, resumed, ends=ends, class_="resumed", marks=after)


def _lane(
    frame: Frame,
    nth: int,
    run: Run,
    *,
    ends: tuple[float, float],
    class_: str,
    marks: Sequence[tuple[int, str]],
) -> Iterator[Markup]:
    y = frame.floor + 40 + _LANE * nth
    ranks = run.began.ranks if run.began is not None else 0
    yield written(frame.left - 8, y + 4, f"{ranks} ranks", "tick", "end")
    left, right = map(frame.x, ends)
    yield element(
        "rect", class_=f"lane {class_}", x=left, y=y - 4, width=max(right - left, 0), height=8, rx=4
    )
    for step, kind in marks:
        title = hint(f"step_{step}: {kind}")
        yield element("circle", title, class_=f"save {kind}", cx=frame.x(step), cy=y, r=6)


def _bars(frame: Frame, row: int, save: Save) -> Iterator[Markup]:
    top = _ROW * row
    yield element(
        "text",
        element("tspan", words(f"step {save.step}, {save.ranks} ranks"), class_="strong"),
        element("tspan", words(f"  {_times(save)}")),
        x=frame.left,
        y=top + 16,
    )
    for seconds, class_ in ((save.total_s, "all"), (save.stall_s, "some")):
        width = frame.x(seconds) - frame.left
        yield element("rect", class_=class_, x=frame.left, y=top + 23, width=width, height=10, rx=2)


def _times(save: Save) -> str:
    return f"saved in {in_time(save.total_s)}, waited {in_time(save.stall_s)}"


def _save_words(save: Save) -> str:
    return f"Step {save.step}: {_times(save)}"


def _about(story: Story) -> str:
    told = "; ".join(f"{each.about} (step {each.step:g})" for each in _moments(story))
    return f"Loss at each step of three runs, which lie on one line. {told}."
