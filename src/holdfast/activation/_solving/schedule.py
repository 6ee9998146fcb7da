"""What a step does with each stage of a chain, and what that comes to. Knows no budget.

In its first forward a stage is run by one of its options, or as a member of a *segment*: a run of
stages of which only the input of the first is kept. When backward reaches a segment its steps are
followed in order:

- ``run i``: forward of stage ``i`` from its kept input, or from what the step before made, keeping
  nothing.
- ``keep_input i``: what the step before made is the input of stage ``i``; hold it.
- ``replay i``: forward of stage ``i`` from its kept input, keeping all that it saves. Its input is
  let go, unless the stage itself saves it.
- ``backward i``: backward of stage ``i``, which must have been replayed; all that is held of it
  goes.

What is held is held until it is used, and a stage is run only while nothing of a later one is
held. These are the memory-persistent schedules of Beaumont et al., "Optimal checkpointing for
heterogeneous chains" (2019). Giving up a kept input and making it again later can, in rare chains,
beat all of them; no schedule here does.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from holdfast.activation._solving.chain import Chain

StepKind = Literal["run", "keep_input", "replay", "backward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    kind: StepKind
    stage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Stages ``first`` to ``last``, both included, and how they are made again."""

    first: int
    last: int
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """``choices`` has for each stage the index of its option, or None in a segment."""

    choices: tuple[int | None, ...]
    segments: tuple[Segment, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What a schedule comes to. ``peak_at`` says where its peak is first reached, in words."""

    peak_bytes: int
    peak_at: str
    extra_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasible:
    """No schedule fits the budget. ``smallest_bytes`` is the smallest budget that one fits, and
    ``reason`` says in words what sets it."""

    smallest_bytes: int
    reason: str


class Chooser(Protocol):
    """What a schedule is assembled from. ``room`` is what is left for a stage and all after it, in
    the chooser's own unit, of which ``size`` gives the number that some bytes take."""

    def size(self, count_bytes: int) -> int: ...

    def option_or_segment(self, first: int, room: int) -> tuple[int | None, int]:
        """The option of the stage, or None, and the last stage of the segment it begins."""

    def split(self, first: int, last: int, room: int) -> int:
        """``first`` to replay that stage and go on with the next; otherwise the stage whose input
        is kept, to make the stages from it on again before those ahead of it."""


def assemble(chain: Chain, chooser: Chooser, room: int) -> Schedule:
    choices: list[int | None] = []
    segments = []
    while len(choices) < len(chain.stages):
        first = len(choices)
        stage = chain.stages[first]
        option, last = chooser.option_or_segment(first, room)
        if option is None:
            steps = tuple(_remaking(chain, chooser, first, last, room))
            segments.append(Segment(first=first, last=last, steps=steps))
            choices += [None] * (last - first + 1)
            room -= chooser.size(stage.input_bytes)
        else:
            choices.append(option)
            room -= chooser.size(stage.options[option].kept_bytes)
    return Schedule(choices=tuple(choices), segments=tuple(segments))


def _remaking(chain: Chain, chooser: Chooser, first: int, last: int, room: int) -> Iterator[Step]:
    # A stack and no recursion: a segment may be longer than Python's stack is deep.
    todo: list[Step | tuple[int, int, int]] = [(first, last, room)]
    while todo:
        match todo.pop():
            case Step() as step:
                yield step
            case (start, end, left) if start == end:
                yield Step(kind="replay", stage=start)
                yield Step(kind="backward", stage=start)
            case (start, end, left):
                stage = chain.stages[start]
                middle = chooser.split(start, end, left)
                if middle == start:
                    yield Step(kind="replay", stage=start)
                    middle, kept = start + 1, stage.keep.kept_bytes
                    todo.append(Step(kind="backward", stage=start))
                else:
                    for each in range(start, middle):
                        yield Step(kind="run", stage=each)
                    kept = stage.input_bytes
                    todo.append((start, middle - 1, left))
                yield Step(kind="keep_input", stage=middle)
                todo.append((middle, end, left - chooser.size(kept)))
