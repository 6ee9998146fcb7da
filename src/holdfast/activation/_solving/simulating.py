"""Follows a schedule step by step and counts what lives. Knows the rules, not how to choose.

The gradient of what stage ``i`` put out is counted with the stage's own backward; while earlier
stages are run or replayed before that, it is counted as ``output_bytes`` of stage ``i``.
"""

from holdfast.activation._solving.chain import Chain
from holdfast.activation._solving.schedule import Schedule, Segment, Simulated, Step


def simulate(chain: Chain, schedule: Schedule) -> Simulated:
    """The exact peak and extra time of ``schedule``, by the numbers of ``chain``.

    ``ValueError`` if it cannot be followed: a choice that the stage does not have, a segment that
    cannot be made again from the input of its first stage, a step before what it needs.
    """
    _check(chain, schedule)
    counted = _Counted(chain.base_bytes)
    starting = {segment.first: segment for segment in schedule.segments}
    kept: list[int] = []
    for index, (stage, choice) in enumerate(zip(chain.stages, schedule.choices, strict=True)):
        counted.see(sum(kept) + stage.forward_bytes, f"the forward of {stage.name}")
        if choice is not None:
            kept.append(stage.options[choice].kept_bytes)
            counted.extra_s += stage.options[choice].extra_s
        else:
            kept.append(stage.input_bytes if index in starting else 0)
    counted.see(sum(kept) + chain.head_bytes, "head")
    for index in reversed(range(len(kept))):
        stage, choice = chain.stages[index], schedule.choices[index]
        kept.pop()
        if choice is not None:
            backward_bytes = stage.options[choice].backward_bytes
            counted.see(sum(kept) + backward_bytes, f"the backward of {stage.name}")
        elif index in starting:
            _Remade(chain, starting[index], counted, sum(kept)).follow()
    return Simulated(
        peak_bytes=counted.peak_bytes, peak_at=counted.peak_at, extra_s=counted.extra_s
    )


def _check(chain: Chain, schedule: Schedule) -> None:
    stages, choices = chain.stages, schedule.choices
    if len(choices) != len(stages):
        raise ValueError(f"{len(choices)} choices are not one for each of {len(stages)} stages")
    for stage, choice in zip(stages, choices, strict=True):
        if choice is not None and not 0 <= choice < len(stage.options):
            raise ValueError(f"stage {stage.name!r} has no option {choice}")
    members = [i for segment in schedule.segments for i in range(segment.first, segment.last + 1)]
    if members != [index for index, choice in enumerate(choices) if choice is None]:
        raise ValueError("the stages without an option are not exactly those of the segments")
    for segment in schedule.segments:
        if chain.reach(segment.first) < segment.last - segment.first + 1:
            raise ValueError(
                f"stages {segment.first} to {segment.last} cannot be made again from the input of "
                f"{stages[segment.first].name!r}"
            )


class _Counted:
    __slots__ = ("_base_bytes", "extra_s", "peak_at", "peak_bytes")

    def __init__(self, base_bytes: int) -> None:
        self._base_bytes = base_bytes
        self.peak_bytes = -1
        self.peak_at = ""
        self.extra_s = 0.0

    def see(self, live_bytes: int, where: str) -> None:
        if self._base_bytes + live_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_at = self._base_bytes + live_bytes, where


class _Remade:
    """A segment while it is made again: what is held of which stage, and whose input is at hand."""

    __slots__ = (
        "_at_hand",
        "_before",
        "_chain",
        "_counted",
        "_inputs",
        "_next",
        "_saved",
        "_segment",
    )

    def __init__(self, chain: Chain, segment: Segment, counted: _Counted, before: int) -> None:
        self._chain = chain
        self._segment = segment
        self._counted = counted
        self._before = before
        self._inputs = {segment.first: chain.stages[segment.first].input_bytes}
        self._saved: dict[int, int] = {}
        self._at_hand: int | None = None
        self._next = segment.last

    def follow(self) -> None:
        for step in self._segment.steps:
            if not self._allowed(step):
                raise ValueError(
                    f"segment {self._segment.first} to {self._segment.last} cannot do "
                    f"{step.kind} {step.stage} now: it needs what is not held, or a later stage is"
                )
            match step.kind:
                case "run":
                    self._run(step.stage)
                case "keep_input":
                    self._keep_input(step.stage)
                case "replay":
                    self._replay(step.stage)
                case "backward":
                    self._backward(step.stage)
        if self._next >= self._segment.first:
            raise ValueError(
                f"segment {self._segment.first} to {self._segment.last} ends before the backward "
                f"of stage {self._next}"
            )

    def _allowed(self, step: Step) -> bool:
        index = step.stage
        if not self._segment.first <= index <= self._next:
            return False
        if step.kind == "backward":
            return index == self._next and index in self._saved
        if any(held > index for held in (*self._inputs, *self._saved)) or index in self._saved:
            return False
        if step.kind == "keep_input":
            return index == self._at_hand and index not in self._inputs
        return index in self._inputs or (step.kind == "run" and index == self._at_hand)

    def _run(self, index: int) -> None:
        stage = self._chain.stages[index]
        pending = self._chain.stages[self._next].output_bytes
        self._see(index, stage.forward_bytes + pending, "running again")
        self._counted.extra_s += stage.forward_s
        self._at_hand = index + 1

    def _keep_input(self, index: int) -> None:
        self._inputs[index] = self._chain.stages[index].input_bytes

    def _replay(self, index: int) -> None:
        stage = self._chain.stages[index]
        if index < self._next:
            pending = self._chain.stages[self._next].output_bytes
            self._see(index, stage.forward_bytes + pending, "replaying")
        else:
            self._see(index, stage.replayed_bytes, "replaying")
        self._counted.extra_s += stage.forward_s
        del self._inputs[index]
        self._saved[index] = stage.keep.kept_bytes
        self._at_hand = index + 1

    def _backward(self, index: int) -> None:
        # What was replayed last is still at hand: its backward was counted with the replay.
        if self._at_hand != index + 1:
            self._see(index, self._chain.stages[index].keep.backward_bytes, "the backward of")
        del self._saved[index]
        self._at_hand = None
        self._next -= 1

    def _see(self, index: int, live_bytes: int, doing: str) -> None:
        held = (*self._inputs.items(), *self._saved.items())
        others = sum(held_bytes for each, held_bytes in held if each != index)
        name = self._chain.stages[index].name
        self._counted.see(self._before + others + live_bytes, f"{doing} {name}")
