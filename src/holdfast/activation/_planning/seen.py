"""What was seen of a model's step, as values. Knows no model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from holdfast.activation._measuring.stretches import Course
from holdfast.activation._planning.sizes import Size
from holdfast.activation._recipes.drops import Drops


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """One storage that recipes can make again: what dropping it frees, and what making it costs."""

    freed_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipes:
    """What can be dropped of a stage: the drops, and of each what it frees and costs."""

    drops: Drops
    made: tuple[Made, ...]


@dataclass(slots=True, kw_only=True)
class StageProfile:
    """A stage as it was seen. ``saved_bytes``: what its graph holds besides its input, its output
    and what lives anyway; ``replayable``: run again, it does the same; ``communicates``: it calls
    collectives then; ``size``: of its call. Seconds are of its forward, of the same run again in
    backward, and of dropping all that recipes make again; of the last two there are none where
    nobody could tell."""

    name: str
    kind: str
    forward_s: list[float] = field(default_factory=list)
    replayed_s: list[float] = field(default_factory=list)
    dropping_s: list[float] = field(default_factory=list)
    saved_bytes: int = 0
    input_numel: int = 0
    output_bytes: int = 0
    recipes: Recipes | None = None
    linked: bool = False
    replayable: bool = True
    communicates: bool = False
    size: Size | None = None

    @property
    def alike(self) -> tuple[object, ...]:
        """Equal for stages that do the same work: on a machine that does other things too, the
        quickest of their runs is the best guess for each."""
        return self.kind, self.saved_bytes, self.input_numel, self.output_bytes


Way = Literal["kept", "replayed", "remade", "moved"]
"""How all stages of a step were run: as they are; run again in backward; with all dropped that
recipes make again; with all moved to another tier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The stages in the order they ran, and for each way that was tried the course of a step and
    the seconds it takes."""

    stages: tuple[StageProfile, ...]
    courses: Mapping[Way, Course]
    seconds: Mapping[Way, float]
    device: str

    @property
    def kept(self) -> Course:
        """Of a step that keeps everything."""
        return self.courses["kept"]

    def extra_s(self, way: Way) -> float:
        """What a step takes longer than one that keeps everything."""
        return max(0.0, self.seconds[way] - self.seconds["kept"])
