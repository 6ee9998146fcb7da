"""From what was seen of a step to what can be chosen. Pure: a profile in, a chain out."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from holdfast.activation._measuring.stretches import END, Course
from holdfast.activation._planning.seen import Made, Profile, Recipes, StageProfile, Way
from holdfast.activation._solving.chain import Chain, Option, Stage

AGES_S = 1e6  # no step takes that long
_MOST_OPTIONS = 12
_LEAST_RATIO = 0.5
_FASTEST_BYTES_A_SECOND = 20e9  # no tier is free, whatever was measured


class _Levels:
    """A course, read stage by stage. All levels are over the one at the start of the step."""

    def __init__(self, course: Course, count: int) -> None:
        ended: dict[Any, tuple[int, int]] = {}
        for each in course.stretches:
            ended.setdefault(each.ends_at, (each.peak_bytes, each.level_bytes))
        self._ended = ended
        self._count = count
        self.begins = [ended["forward", number][1] for number in range(count)]
        self.base = self.begins[0]
        self.end = ended["forwarded", count - 1][1]
        # Backward runs the stages in some order; each stretch belongs to the one that began it.
        self._backward: dict[int, int] = {}
        running: int | None = None
        for each in course.stretches:
            match each.ends_at:
                case ("backward", int(number)):
                    self._note(running, each.peak_bytes)
                    running = number
                case mark if mark == END:
                    self._note(running, each.peak_bytes)
                case _:
                    pass
        self.head = _head(course, count)

    def _note(self, number: int | None, peak_bytes: int) -> None:
        if number is not None:
            self._backward[number] = max(self._backward.get(number, 0), peak_bytes)

    def kept(self, number: int) -> int:
        """What a stage leaves behind, with what happens between it and the next."""
        after = self.begins[number + 1] if number + 1 < self._count else self.end
        return max(0, after - self.begins[number])

    def forward(self, number: int) -> int:
        before, within = self._ended["forward", number][0], self._ended["forwarded", number][0]
        if number == 0:
            before = within
        return max(0, before - self.begins[number], within - self.begins[number])

    def backward(self, number: int) -> int:
        return max(0, self._backward.get(number, 0) - self.begins[number])


def _head(course: Course, count: int) -> int:
    """The peak between the last forward of a stage and the first backward of one."""
    marks = [each.ends_at for each in course.stretches]
    after = marks.index(("forwarded", count - 1)) + 1
    found = []
    for each in course.stretches[after:]:
        found.append(each.peak_bytes)
        if each.ends_at != END and each.ends_at[0] == "backward":
            break
    return max(found)


class _Costs:
    """What running a stage again and making a tensor again take in a step. Parts were timed by
    themselves; whole steps, with every stage replayed or all tensors remade, say what that comes to
    with all that goes with it."""

    def __init__(self, profile: Profile) -> None:
        self._forward = _quickest(profile, lambda seen: seen.replayed_s or seen.forward_s)
        self._dropping = _quickest(profile, lambda seen: seen.dropping_s)
        replayed = [self._forward[each.alike] for each in profile.stages if each.replayable]
        made = [
            self._dropping[each.alike] + sum(one.seconds for one in each.recipes.made)
            for each in profile.stages
            if each.recipes is not None
        ]
        extra_s = profile.extra_s("replayed")
        self._replay = min(1.0, _ratio(extra_s, sum(replayed)))
        self._around_s = max(0.0, extra_s - sum(replayed)) / max(1, len(replayed))
        self._make = _ratio(profile.extra_s("remade"), sum(made))

    def replay_s(self, seen: StageProfile) -> float:
        """Every replay takes the same time more than its forward, however short that is."""
        return self._forward[seen.alike] * self._replay + self._around_s

    def make_s(self, seen: StageProfile, made: Sequence[Made]) -> float:
        """What it costs to drop these of a stage: to find them, as much as to drop one more."""
        every = len(seen.recipes.made) if seen.recipes is not None else 0
        dropping_s = self._dropping[seen.alike] * (len(made) + 1) / (every + 1)
        return (dropping_s + sum(each.seconds for each in made)) * self._make


def _quickest(
    profile: Profile, seconds: Callable[[StageProfile], list[float]]
) -> dict[object, float]:
    """Of all stages that are alike."""
    found: dict[object, float] = {}
    for seen in profile.stages:
        for each in seconds(seen):
            found[seen.alike] = min(each, found.get(seen.alike, each))
        found.setdefault(seen.alike, 0.0)
    return found


def _ratio(measured_s: float, added_s: float) -> float:
    """Not less than a half: then it is the measurement that was disturbed."""
    return max(_LEAST_RATIO, measured_s / added_s) if added_s > 0 else 1.0


def chain_of(profile: Profile) -> Chain:
    """The chain a plan is chosen from."""
    count = len(profile.stages)
    levels = {way: _Levels(course, count) for way, course in profile.courses.items()}
    kept, replayed = levels["kept"], levels["replayed"]
    costs = _Costs(profile)
    return Chain(
        stages=tuple(
            Stage(
                name=seen.name,
                options=tuple(_options(profile, seen, number, levels, costs)),
                input_bytes=min(kept.kept(number), replayed.kept(number)),
                output_bytes=seen.output_bytes,
                forward_s=costs.replay_s(seen),
                forward_bytes=kept.forward(number),
                replayed_bytes=replayed.backward(number),
                replayable=seen.replayable and seen.saved_bytes > 0,
                linked=seen.linked,
            )
            for number, seen in enumerate(profile.stages)
        ),
        base_bytes=kept.base,
        head_bytes=max(0, kept.head - kept.end),
    )


def timeless(chain: Chain) -> Chain:
    """``chain`` with times that nobody measured: the same solution is the smallest each time."""
    return replace(
        chain,
        stages=tuple(
            replace(
                stage,
                forward_s=1.0,
                options=tuple(
                    replace(option, extra_s=number / len(stage.options))
                    for number, option in enumerate(stage.options)
                ),
            )
            for stage in chain.stages
        ),
    )


def without_recipes(chain: Chain) -> Chain:
    """``chain`` with recipes so dear that none is chosen where anything else fits."""
    return replace(
        chain,
        stages=tuple(
            replace(
                stage,
                options=tuple(
                    replace(option, extra_s=option.extra_s + AGES_S) if option.dropped else option
                    for option in stage.options
                ),
            )
            for stage in chain.stages
        ),
    )


def _options(
    profile: Profile,
    seen: StageProfile,
    number: int,
    levels: Mapping[Way, _Levels],
    costs: _Costs,
) -> Iterator[Option]:
    kept = levels["kept"]
    keep = Option(
        label="keep",
        kept_bytes=kept.kept(number),
        extra_s=0.0,
        backward_bytes=kept.backward(number),
    )
    yield keep
    if seen.recipes is not None:
        fully_bytes = levels["remade"].backward(number)
        yield from _recipes(seen, seen.recipes, keep, fully_bytes, costs)
    if "moved" in levels and seen.saved_bytes:
        all_bytes = sum(each.saved_bytes for each in profile.stages)
        yield Option(
            label="moved",
            kept_bytes=min(keep.kept_bytes, levels["moved"].kept(number)),
            extra_s=max(
                profile.extra_s("moved") * seen.saved_bytes / all_bytes,
                seen.saved_bytes / _FASTEST_BYTES_A_SECOND,
            ),
            backward_bytes=levels["moved"].backward(number),
        )


def _recipes(
    seen: StageProfile, recipes: Recipes, keep: Option, fully_bytes: int, costs: _Costs
) -> list[Option]:
    """Ever more tensors dropped, the cheapest by the byte first: no other set of as many bytes
    costs less. What lives in backward falls, as they do, to what was measured with all of them."""
    made = recipes.made
    order = sorted(range(len(made)), key=lambda number: _price(made[number]))
    total = sum(each.freed_bytes for each in made)
    found: list[Option] = []
    freed = 0
    for count, number in enumerate(order, start=1):
        freed += made[number].freed_bytes
        backward = keep.backward_bytes + freed / total * (fully_bytes - keep.backward_bytes)
        found.append(
            Option(
                label="recipes",
                kept_bytes=max(0, keep.kept_bytes - freed),
                extra_s=costs.make_s(seen, [made[each] for each in order[:count]]),
                backward_bytes=round(backward),
                dropped=tuple(sorted(order[:count])),
            )
        )
    return _thinned(found)


def _price(made: Made) -> float:
    return made.seconds / max(1, made.freed_bytes)


def _thinned(options: list[Option]) -> list[Option]:
    """At most so many, spread over the bytes they keep; the last always among them."""
    if len(options) <= _MOST_OPTIONS:
        return options
    most, least = options[0].kept_bytes, options[-1].kept_bytes
    found: list[Option] = []
    for option in options[:-1]:
        due = most - len(found) * (most - least) / (_MOST_OPTIONS - 1)
        if option.kept_bytes <= due:
            found.append(option)
    return [*found, options[-1]]
