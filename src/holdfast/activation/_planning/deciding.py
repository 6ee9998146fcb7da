"""What each stage is to do, for batches of the sample's size and of others. Pure: values in, values
out; goes through JSON."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from holdfast.activation._planning.linking import Pass, passes_of
from holdfast.activation._planning.seen import Recipes
from holdfast.activation._recipes.drops import Drops, chosen
from holdfast.activation._reporting.words import in_bytes
from holdfast.activation._solving.chain import Chain, Stage
from holdfast.activation._solving.schedule import Infeasible, Schedule
from holdfast.activation._solving.simulating import simulate
from holdfast.activation._solving.solving import Solution, solve
from holdfast.errors import PlanError

_BUCKET = 1.125
"""Batches whose sizes differ by less than this factor are decided alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """A stage by name, class and the number of its parameters, and what can be dropped of it."""

    name: str
    kind: str
    parameters: int
    recipes: Recipes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """Where stages are moved to, in the words of ``CheckpointManager``."""

    tier: str
    folder: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What a stage does in a forward. ``saves_bytes``: what that frees over keeping everything;
    ``spare_bytes``: what keeping only its input would free beyond."""

    kind: Literal["keep", "recipes", "moved", "input", "segment"]
    number: int
    saves_bytes: int = 0
    spare_bytes: int = 0
    drops: Drops | None = None
    passes: Mapping[int, Pass] = field(default_factory=dict)  # of its whole segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Actions:
    """What every stage does, and what there is to say of it."""

    stages: Mapping[str, Action]
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The schedule chosen for a sample whose first stage has an input of ``input_numel`` numbers,
    and all that it takes to choose for other sizes: the chain, and the budget to solve it for,
    which is the user's, corrected by what was measured. ``communicates``: stages call collectives
    when they are run again, so that all ranks must do the same whatever their batches are."""

    stages: tuple[PlannedStage, ...]
    chain: Chain
    schedule: Schedule
    solved_bytes: int
    input_numel: int
    tier: Tier | None = None
    communicates: bool = False

    def check(self) -> None:
        """Raise ``PlanError`` unless the parts belong together, as in a file that was edited."""
        names = [stage.name for stage in self.stages]
        if names != [stage.name for stage in self.chain.stages] or not names:
            raise PlanError("this plan does not hold together: its stages are not its chain's")
        try:
            simulate(self.chain, self.schedule)
            for number, stage in enumerate(self.chain.stages):
                for option in stage.options:
                    _KINDS[option.label]
                    self._drops(number, option.dropped)
        except (ValueError, IndexError, KeyError) as error:
            raise PlanError(f"this plan does not hold together: {error}") from error

    def bucket(self, numel: int) -> int:
        """The size of a batch, as a number: 0 for the sample's, 1 for up to 1.125 times that."""
        if not numel or not self.input_numel or self.communicates:
            return 0
        # A little less, or rounding would put the sample itself into another.
        return math.ceil(math.log(numel / self.input_numel) / math.log(_BUCKET) - 1e-9)

    def actions(self, bucket: int) -> Actions:
        """What the stages do for batches of that size. Solves the chain, but for the sample's."""
        if bucket == 0:
            return Actions(stages=self._actions(self.chain, self.schedule))
        factor = _BUCKET**bucket
        chain = _scaled(self.chain, factor)
        found = solve(chain, self.solved_bytes)
        problem = ""
        if isinstance(found, Infeasible):
            problem = (
                f"meets batches of {factor:.2f} times the sample's size, for which the budget is "
                f"short by {in_bytes(found.smallest_bytes - self.solved_bytes)}: all is kept as "
                "small as can be"
            )
            found = smallest(chain)[0]
        return Actions(stages=self._actions(chain, found.schedule), problem=problem)

    def _actions(self, chain: Chain, schedule: Schedule) -> dict[str, Action]:
        segments = {
            number: segment
            for segment in schedule.segments
            for number in range(segment.first, segment.last + 1)
        }
        found = {}
        for number, (stage, choice) in enumerate(zip(chain.stages, schedule.choices, strict=True)):
            if choice is None:
                segment = segments[number]
                alone = segment.first == segment.last
                found[stage.name] = Action(
                    kind="input" if alone else "segment",
                    number=number,
                    passes={} if alone else passes_of(segment),
                )
                continue
            option = stage.options[choice]
            spare = (
                option.kept_bytes - stage.input_bytes
                if stage.replayable and not self.communicates
                else 0
            )
            found[stage.name] = Action(
                kind=_KINDS[option.label],
                number=number,
                saves_bytes=stage.keep.kept_bytes - option.kept_bytes,
                spare_bytes=max(0, spare),
                drops=self._drops(number, option.dropped),
            )
        return found

    def _drops(self, number: int, dropped: tuple[int, ...]) -> Drops | None:
        recipes = self.stages[number].recipes
        if not dropped:
            return None
        if recipes is None:
            raise ValueError(f"stage {self.stages[number].name!r} has nothing to drop")
        return chosen(recipes.drops, dropped)


_KINDS: Final[Mapping[str, Literal["keep", "recipes", "moved"]]] = {
    "keep": "keep",
    "recipes": "recipes",
    "moved": "moved",
}


def smallest(chain: Chain) -> tuple[Solution, str]:
    """The solution with the lowest peak, and what sets that, in words."""
    floor = solve(chain, 1)
    found = solve(chain, floor.smallest_bytes) if isinstance(floor, Infeasible) else floor
    if isinstance(found, Infeasible):
        raise RuntimeError("the smallest budget is one that fits")  # noqa: TRY004 -- of ours
    return found, floor.reason if isinstance(floor, Infeasible) else ""


def _scaled(chain: Chain, factor: float) -> Chain:
    """The chain with every number of bytes and seconds so many times as large."""

    def bytes_(count: int) -> int:
        return math.ceil(count * factor)

    def stage(each: Stage) -> Stage:
        return replace(
            each,
            options=tuple(
                replace(
                    option,
                    kept_bytes=bytes_(option.kept_bytes),
                    backward_bytes=bytes_(option.backward_bytes),
                    extra_s=option.extra_s * factor,
                )
                for option in each.options
            ),
            input_bytes=bytes_(each.input_bytes),
            output_bytes=bytes_(each.output_bytes),
            forward_s=each.forward_s * factor,
            forward_bytes=bytes_(each.forward_bytes),
            replayed_bytes=bytes_(each.replayed_bytes),
        )

    return replace(
        chain,
        stages=tuple(map(stage, chain.stages)),
        base_bytes=bytes_(chain.base_bytes),
        head_bytes=bytes_(chain.head_bytes),
    )
