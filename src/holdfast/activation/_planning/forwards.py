"""What forwards met of other shapes than the sample's, and what is decided for the next that begin
alike. Knows sizes, not how stages are run.

A forward is known by the shapes of its first call of a stage. What its stages are given, and what
they would save, is learned while they keep only inputs; when such a forward comes again, the chain
is solved for the largest call of each stage that was met. Only so many are known: what did not come
for the longest time is forgotten.
"""

import threading
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeVar

from holdfast.activation._layers.layer_forward import Arguments
from holdfast.activation._planning.deciding import Action, Actions, Decision
from holdfast.activation._planning.sizes import (
    Growth,
    Key,
    Shapes,
    Size,
    even,
    growth_of,
    is_larger,
    is_samples,
    key_of,
    numel_of,
    shapes_of,
    within,
)
from holdfast.activation._recipes.dropping import Dropping
from holdfast.activation._solving.schedule import Schedule

_MOST_KNOWN = 64
_MOST_ALIKE = 8  # shapes of one key, none within another
_MOST_EXPECTED = 32  # shapes a stage, taken without a second look

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True, kw_only=True)
class Acting:
    """What a stage does, ready to be done."""

    action: Action
    dropping: Dropping | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """What every stage does, by number, the schedule that says so, and what there is to say."""

    stages: tuple[Acting, ...]
    schedule: Schedule
    problem: str


class Known:
    """Forwards that begin alike: what of each stage was met, and what was decided, for what."""

    __slots__ = ("decided", "expected", "is_stale", "met", "solved_for")

    def __init__(self, count: int) -> None:
        self.met: list[Growth | None] = [None] * count
        self.solved_for: tuple[Growth, ...] = ()
        self.decided: Decided | None = None
        self.is_stale = False
        self.expected: list[set[Shapes]] = [set() for _ in range(count)]


class Forwards:
    """All that is known for one plan. Thread-safe."""

    def __init__(self, decision: Decision) -> None:
        self._decision = decision
        self._stages = decision.stages
        self._is_fixed = decision.communicates or any(each.size is None for each in self._stages)
        self._lock = threading.Lock()
        self._learned: list[OrderedDict[Key, tuple[tuple[Shapes, ...], Growth]]] = [
            OrderedDict() for _ in self._stages
        ]
        self._known: OrderedDict[tuple[int, Key], Known] = OrderedDict()
        self._sample_growths = tuple(even(1.0, len(each.made_bytes)) for each in self._stages)
        self._sample = Known(len(self._stages))
        self._sample.solved_for = self._sample_growths
        self._sample.met = list(self._sample_growths)
        self._least: Decided | None = None
        self.planned = self._sample.decided = _ready(decision.actions())

    def least(self) -> Decided:
        """What keeps as little as can be, for what is larger than all that is known."""
        with self._lock:
            if self._least is None:
                self._least = _ready(self._decision.least())
            return self._least

    def beginning(self, number: int, shapes: Shapes) -> Known:
        """The forwards that begin with this call of a stage, decided for if they were met."""
        with self._lock:
            known = self._sample
            if not self._is_fixed and not is_samples(key := self._key(number, shapes)):
                known = self._known.get((number, key)) or Known(len(self._stages))
                _keep(self._known, (number, key), known)
            if known.is_stale:
                self._decide(known)
            return known

    def expects(self, known: Known, number: int, shapes: Shapes, call: Arguments) -> bool:
        """Whether what was decided for ``known`` holds for this call of a stage."""
        if shapes in known.expected[number] or self._is_fixed:
            return True
        with self._lock:
            growth = self._growth(number, shapes, call)
            if growth is None or not known.solved_for[number].covers(growth):
                return False
            if len(known.expected[number]) >= _MOST_EXPECTED:
                known.expected[number].clear()
            known.expected[number].add(shapes)
        return True

    def learn(self, known: Known, number: int, size: Size, constants: Collection[int]) -> bool:
        """Take note of a call that was met. Whether it was no larger than what was decided for."""
        stage = self._stages[number]
        if stage.size is None:
            return True
        growth = growth_of(stage.size, size, stage.made_bytes, constants)
        with self._lock:
            key = self._key(number, size.shapes)
            shapes, largest = self._learned[number].get(key, ((), growth))
            others = (each for each in shapes if not within(each, size.shapes))
            shapes = (size.shapes, *others)[:_MOST_ALIKE]
            _keep(self._learned[number], key, (shapes, largest.joined(growth)))
            return self._meet(known, number, growth)

    def meet(self, known: Known, number: int, call: Arguments) -> bool:
        """As ``learn``, for a stage that cannot be replayed: what it saves is taken to grow as what
        it is given."""
        with self._lock:
            return self._meet(known, number, self._by_given(number, call))

    def may_exceed(self, known: Known, decided: Decided | None, replayed: Collection[int]) -> bool:
        """Whether a forward in which these stages kept only their inputs, and the others did what
        was decided, took more than there is."""
        with self._lock:
            growths = self._filled(known)
        schedule = None if decided is None else decided.schedule
        return self._decision.exceeds(growths, schedule, replayed)

    def is_other(self, number: int, call: Arguments) -> bool:
        """Whether a call that may be replayed has other shapes than the sample's."""
        replayable = self._decision.chain.stages[number].replayable
        return (
            replayable and not self._is_fixed and not is_samples(self._key(number, shapes_of(call)))
        )

    def is_larger(self, number: int, shapes: Shapes) -> bool:
        """Whether a call has a length that the sample's has not."""
        return is_larger(self._key(number, shapes))

    def saves_more(self, number: int, call: Arguments) -> bool:
        """Whether a call saves anything, and may save more than the sample's."""
        size = self._stages[number].size
        saves = size is not None and size.dropped_bytes > 0
        return saves and self.is_larger(number, shapes_of(call))

    def _meet(self, known: Known, number: int, growth: Growth) -> bool:
        prior = known.met[number]
        known.met[number] = growth if prior is None else prior.joined(growth)
        if prior is None:
            # Whatever was decided took a guess at this stage.
            known.decided, known.is_stale = None, True
            return False
        covered = known.solved_for[number].covers(growth) if known.solved_for else False
        known.is_stale |= not covered
        return covered

    def _decide(self, known: Known) -> None:
        growths = self._filled(known)
        prior = None if known.decided is None else known.decided.schedule
        known.decided = _ready(self._decision.actions(growths, prior))
        known.solved_for = growths
        known.expected = [set() for _ in self._stages]
        known.is_stale = False

    def _filled(self, known: Known) -> tuple[Growth, ...]:
        """What was met of each stage, and for those that were not, the most of any, of which no
        recipe frees anything."""
        met = [each for each in known.met if each is not None]
        given = max(each.given for each in met)
        saved = max(each.saved for each in met)
        most = max(each.most for each in met)
        return tuple(
            Growth(given=given, saved=saved, most=most, made=(0.0,) * len(stage.made_bytes))
            if growth is None
            else growth
            for growth, stage in zip(known.met, self._stages, strict=True)
        )

    def _growth(self, number: int, shapes: Shapes, call: Arguments) -> Growth | None:
        """What is known of a call: of the sample's shapes or less, and of those met or less."""
        key = self._key(number, shapes)
        if is_samples(key):
            return self._sample_growths[number]
        if not self._decision.chain.stages[number].replayable:
            return self._by_given(number, call)
        learned = self._learned[number].get(key)
        if learned is None or not any(within(shapes, each) for each in learned[0]):
            return None
        _keep(self._learned[number], key, learned)
        return learned[1]

    def _by_given(self, number: int, call: Arguments) -> Growth:
        stage = self._stages[number]
        if stage.size is None or not stage.size.numel:
            return self._sample_growths[number]
        return even(numel_of(call) / stage.size.numel, len(stage.made_bytes))

    def _key(self, number: int, shapes: Shapes) -> Key:
        size = self._stages[number].size
        return () if size is None else key_of(size.shapes, shapes)


def _keep(latest: OrderedDict[K, V], key: K, value: V) -> None:
    latest[key] = value
    latest.move_to_end(key)
    if len(latest) > _MOST_KNOWN:
        latest.popitem(last=False)


def _ready(actions: Actions) -> Decided:
    return Decided(
        stages=tuple(
            Acting(
                action=action,
                dropping=None if action.drops is None else Dropping(name, action.drops),
            )
            for name, action in actions.stages.items()
        ),
        schedule=actions.schedule,
        problem=actions.problem,
    )
