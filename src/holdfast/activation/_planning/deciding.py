"""What each stage is to do, for calls of the sample's shapes and of others. Pure: values in, values
out; goes through JSON."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from holdfast.activation._planning.growing import grown
from holdfast.activation._planning.linking import Pass, passes_of
from holdfast.activation._planning.seen import Recipes
from holdfast.activation._planning.sizes import Growth, Size
from holdfast.activation._recipes.drops import Drops, chosen
from holdfast.activation._reporting.words import in_bytes
from holdfast.activation._solving.chain import Chain
from holdfast.activation._solving.schedule import Infeasible, Schedule, Segment, Step
from holdfast.activation._solving.simulating import simulate
from holdfast.activation._solving.solving import lowest, solve
from holdfast.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """A stage by name, class and the number of its parameters, what these are (``weights_of``),
    what can be dropped of it, and its call in the sample; without that, all calls are taken to be
    of the sample's size."""

    name: str
    kind: str
    parameters: int
    recipes: Recipes | None
    weights: tuple[str, ...] = ()
    size: Size | None = None

    @property
    def made_bytes(self) -> tuple[int, ...]:
        """The sizes of the storages that recipes make again, in the sample's call."""
        if self.recipes is None:
            return ()
        return tuple(each.size_bytes for each in self.recipes.drops.drops)


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
    """What every stage does, the schedule that says so, and what there is to say of it."""

    stages: Mapping[str, Action]
    schedule: Schedule
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The schedule chosen for a sample, and all that it takes to choose for other shapes: the
    chain, and the budget to solve it for, which is the user's, corrected by what was measured.
    ``communicates``: stages call collectives when they are run again, so that all ranks must do the
    same whatever their batches are."""

    stages: tuple[PlannedStage, ...]
    chain: Chain
    schedule: Schedule
    solved_bytes: int
    parameters: int
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

    def actions(
        self, growths: Sequence[Growth] | None = None, prior: Schedule | None = None
    ) -> Actions:
        """What the stages do for calls of the sample's shapes, or for such as have grown. Then the
        chain is solved, unless the ``prior`` schedule fits it."""
        if growths is None:
            return Actions(stages=self._actions(self.chain, self.schedule), schedule=self.schedule)
        chain = self._grown(growths)
        if prior is not None and self._fits(chain, prior):
            return Actions(stages=self._actions(chain, prior), schedule=prior)
        found = solve(chain, self.solved_bytes)
        if not isinstance(found, Infeasible):
            return Actions(stages=self._actions(chain, found.schedule), schedule=found.schedule)
        problem = (
            f"meets inputs of up to {max(each.given for each in growths):.2f} times the sample's "
            f"size, of which stages save up to {max(each.saved for each in growths):.2f} times as "
            f"much. For these the budget may be short by "
            f"{in_bytes(found.smallest_bytes - self.solved_bytes)}: all is kept as small as can be"
        )
        return replace(self._least(chain), problem=problem)

    def least(self) -> Actions:
        """What the stages do to take the least."""
        return self._least(self.chain)

    def exceeds(
        self, growths: Sequence[Growth], schedule: Schedule | None, replayed: Collection[int]
    ) -> bool:
        """Whether stages that have grown take more than there is if those in ``replayed`` keep only
        their inputs, and the others do as ``schedule`` says, or without one keep everything."""
        if schedule is None:
            schedule = Schedule(choices=(0,) * len(self.stages))
        return not self._fits(self._grown(growths), _replaying(schedule, replayed))

    def _least(self, chain: Chain) -> Actions:
        # What lives besides what stages save is not known for other shapes. Another stage than it
        # seems may set the peak: none keeps what it need not.
        schedule = _smallest(chain)
        keeping = [
            number
            for number, choice in enumerate(schedule.choices)
            if choice is not None and chain.stages[number].replayable
        ]
        schedule = _replaying(schedule, keeping)
        return Actions(stages=self._actions(chain, schedule), schedule=schedule)

    def _grown(self, growths: Sequence[Growth]) -> Chain:
        return grown(self.chain, growths, [stage.recipes for stage in self.stages])

    def _fits(self, chain: Chain, schedule: Schedule) -> bool:
        return simulate(chain, schedule).peak_bytes <= self.solved_bytes

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
        if recipes is None or len(recipes.made) != len(recipes.drops.drops):
            raise ValueError(f"stage {self.stages[number].name!r} has nothing to drop")
        return chosen(recipes.drops, dropped)


_KINDS: Final[Mapping[str, Literal["keep", "recipes", "moved"]]] = {
    "keep": "keep",
    "recipes": "recipes",
    "moved": "moved",
}


def _smallest(chain: Chain) -> Schedule:
    """The schedule with the lowest peak."""
    found, _ = lowest(lambda budget: solve(chain, budget))
    if isinstance(found, Infeasible):
        raise RuntimeError("the smallest budget is one that fits")  # noqa: TRY004 -- of ours
    return found.schedule


def _replaying(schedule: Schedule, numbers: Collection[int]) -> Schedule:
    """``schedule``, but that the stages of these numbers keep their inputs, as do all of a segment
    that has one of them."""
    alone = set(numbers)
    segments = []
    for segment in schedule.segments:
        members = range(segment.first, segment.last + 1)
        if alone.isdisjoint(members):
            segments.append(segment)
        else:
            alone.update(members)
    for number in alone:
        steps = (Step(kind="replay", stage=number), Step(kind="backward", stage=number))
        segments.append(Segment(first=number, last=number, steps=steps))
    return Schedule(
        choices=tuple(
            None if number in alone else choice for number, choice in enumerate(schedule.choices)
        ),
        segments=tuple(sorted(segments, key=lambda each: each.first)),
    )
