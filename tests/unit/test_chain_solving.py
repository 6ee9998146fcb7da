"""The schedule for a budget is the fastest of all that there are, found by trying them.

The trying knows nothing of tables: it follows the rules of the steps one by one, in every order
they allow, and lets the simulator say what each schedule comes to.
"""

import dataclasses
import functools
import itertools
import json
import math
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.activation._solving.chain import Chain, Option, Stage
from holdfast.activation._solving.floor import Floor
from holdfast.activation._solving.schedule import (
    Infeasible,
    Schedule,
    Segment,
    Simulated,
    Step,
    assemble,
)
from holdfast.activation._solving.simulating import simulate
from holdfast.activation._solving.slots import slots_for
from holdfast.activation._solving.solving import Solution, curve, solve

EXACT = 1 << 12  # more slots than any of these chains has bytes: nothing is rounded
SEEDS = range(5)
CHAINS = 40  # for each seed


def chains(seed: int) -> Iterator[Chain]:
    """Small chains of any numbers, also of such as no model has. In half of them every stage saves
    much and has one option, under a large head, so that it takes segments to fit."""
    rng = random.Random(seed)
    for number in range(CHAINS):
        tight = number % 2 == 1
        count = rng.choice((3, 4, 4) if tight else (1, 2, 3))
        yield Chain(
            stages=tuple(any_stage(rng, tight=tight) for _ in range(count)),
            base_bytes=rng.randint(0, 3),
            head_bytes=rng.randint(10, 24) if tight else rng.randint(0, 12),
        )


def any_stage(rng: random.Random, *, tight: bool) -> Stage:
    kept = [rng.randint(8, 20)] if tight else [rng.randint(0, 14) for _ in range(rng.randint(1, 3))]
    return Stage(
        name="any",
        options=tuple(
            Option(
                label="any",
                kept_bytes=kept_bytes,
                extra_s=float(rng.randint(0, 9)) if index else 0.0,
                backward_bytes=kept_bytes + rng.randint(0, 8),
            )
            for index, kept_bytes in enumerate(kept)
        ),
        input_bytes=rng.randint(0, 5),
        output_bytes=rng.randint(0, 9),
        forward_s=float(rng.randint(1, 9)),
        forward_bytes=rng.randint(0, 20),
        replayed_bytes=rng.randint(0, 20),
        replayable=rng.random() < 0.95,
        linked=rng.random() < 0.95,
    )


State = tuple[frozenset[int], frozenset[int], int | None, int]


def ways(first: int, state: State) -> Iterator[tuple[Step, State]]:
    """Every step that may come next while a segment is made again, and what is held then: inputs,
    what stages saved, the stage whose input was just made, and the next one to go backward."""
    inputs, saved, at_hand, pending = state
    for i in range(max((first, *inputs, *saved)), pending + 1):
        if i in saved and i == pending:
            yield Step(kind="backward", stage=i), (inputs, saved - {i}, None, pending - 1)
        if i in saved:
            continue
        if i in inputs or at_hand == i:
            yield Step(kind="run", stage=i), (inputs, saved, i + 1, pending)
        if i in inputs:
            after = (inputs - {i}, saved | {i}, i + 1, pending)
            yield Step(kind="replay", stage=i), after
        elif at_hand == i:
            yield Step(kind="keep_input", stage=i), (inputs | {i}, saved, at_hand, pending)


def every_remaking(first: int, last: int) -> Iterator[tuple[Step, ...]]:
    """All orders of steps that make a segment again, also those that waste time."""

    def go(steps: tuple[Step, ...], state: State, seen: frozenset[State]):
        if state[-1] < first:
            yield steps
        elif state not in seen:
            for step, after in ways(first, state):
                yield from go((*steps, step), after, seen | {state})

    yield from go((), (frozenset({first}), frozenset(), None, last), frozenset())


@functools.cache
def remakings(length: int) -> tuple[tuple[Step, ...], ...]:
    return tuple(every_remaking(0, length - 1))


def shifted(steps: tuple[Step, ...], by: int) -> tuple[Step, ...]:
    return tuple(Step(kind=step.kind, stage=step.stage + by) for step in steps)


def every_schedule(chain: Chain, first: int = 0) -> Iterator[Schedule]:
    if first == len(chain.stages):
        yield Schedule(choices=())
        return
    for rest in every_schedule(chain, first + 1):
        for option in range(len(chain.stages[first].options)):
            yield Schedule(choices=(option, *rest.choices), segments=rest.segments)
    for length in range(1, len(chain.stages) - first + 1):
        members = chain.stages[first : first + length]
        if not all(stage.replayable for stage in members):
            break
        if not all(stage.linked for stage in members[1:]):
            break
        for rest, steps in itertools.product(
            list(every_schedule(chain, first + length)), remakings(length)
        ):
            segment = Segment(first=first, last=first + length - 1, steps=shifted(steps, first))
            choices = (*(None for _ in members), *rest.choices)
            yield Schedule(choices=choices, segments=(segment, *rest.segments))


def front(chain: Chain) -> list[tuple[int, float]]:
    """The peaks and times of all schedules that no other beats in both."""
    best: dict[int, float] = {}
    for schedule in every_schedule(chain):
        found = simulate(chain, schedule)
        best[found.peak_bytes] = min(found.extra_s, best.get(found.peak_bytes, math.inf))
    kept: list[tuple[int, float]] = []
    for peak_bytes, extra_s in sorted(best.items()):
        if not kept or extra_s < kept[-1][1]:
            kept.append((peak_bytes, extra_s))
    return kept


@functools.cache
def tried(seed: int) -> list[tuple[Chain, list[tuple[int, float]]]]:
    return [(chain, front(chain)) for chain in chains(seed)]


def fastest(of: list[tuple[int, float]], budget_bytes: int) -> float:
    return min((time for peak, time in of if peak <= budget_bytes), default=math.inf)


def test_every_order_of_steps_is_tried():
    assert len(remakings(1)) == 2  # at once, and after a run for nothing
    wasteless = {
        steps
        for steps in remakings(3)
        if all(
            step.kind != "run"
            or (after.kind in {"run", "keep_input"} and after.stage == step.stage + 1)
            for step, after in itertools.pairwise(steps)
        )
    }
    assert len(wasteless) == 6


@pytest.mark.parametrize("seed", SEEDS)
def test_it_is_the_fastest_of_all_schedules_at_every_budget(seed):
    nested = 0
    for chain, found in tried(seed):
        for budget in range(max(1, found[0][0] - 2), found[-1][0] + 2):
            solved = solve(chain, budget, slots=EXACT)
            if budget < found[0][0]:
                assert isinstance(solved, Infeasible)
                assert solved.smallest_bytes == found[0][0]
                continue
            assert isinstance(solved, Solution)
            assert solved.extra_s == fastest(found, budget)
            assert solved.peak_bytes <= budget
            assert solved.rounding_bytes == 0
            followed = simulate(chain, solved.schedule)
            assert (followed.peak_bytes, followed.extra_s) == (solved.peak_bytes, solved.extra_s)
            steps = [step for segment in solved.schedule.segments for step in segment.steps]
            nested += any(step.kind == "run" for step in steps)
    assert nested > 10  # or these chains show nothing


@pytest.mark.parametrize("seed", SEEDS)
def test_coarse_slots_never_exceed_the_budget_and_lose_no_more_than_they_say(seed):
    rng = random.Random(seed)
    for chain, found in tried(seed):
        for budget in range(max(1, found[0][0] - 2), found[-1][0] + 2, 3):
            solved = solve(chain, budget, slots=rng.randint(1, 15))
            if budget < found[0][0]:
                assert isinstance(solved, Infeasible)
                assert solved.smallest_bytes == found[0][0]
                continue
            assert isinstance(solved, Solution)
            assert simulate(chain, solved.schedule).peak_bytes == solved.peak_bytes <= budget
            assert solved.extra_s >= fastest(found, budget)
            assert solved.extra_s <= fastest(found, budget - solved.rounding_bytes)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_smallest_budget_is_exact_and_has_a_schedule(seed):
    for chain, found in tried(seed):
        floor = Floor(chain)
        smallest, _ = found[0]
        assert chain.base_bytes + floor.room_bytes == smallest
        for room in range(floor.room_bytes, floor.room_bytes + 30, 5):
            assembled = simulate(chain, assemble(chain, floor, room))
            assert assembled.peak_bytes <= chain.base_bytes + room


@pytest.mark.parametrize("seed", SEEDS)
def test_the_curve_is_what_each_budget_gives(seed):
    for chain, found in tried(seed):
        drawn = curve(chain, points=7, slots=EXACT)
        assert drawn[0].budget_bytes == found[0][0]
        assert drawn[-1].budget_bytes >= found[-1][0]
        assert len(drawn) <= 7
        for point in drawn:
            assert point.extra_s == fastest(found, point.budget_bytes)


def test_what_slots_hide_is_found_if_it_fits_after_all():
    def stage(kept_bytes: int) -> Stage:
        kept = ((kept_bytes, 0.0), (0, 1.0))
        return dataclasses.replace(
            block(0),
            options=tuple(
                Option(label="any", kept_bytes=each, extra_s=extra_s, backward_bytes=0)
                for each, extra_s in kept
            ),
            forward_bytes=0,
            replayable=False,
        )

    stages = tuple(map(stage, (101, 103, 107, 109, 113, 127)))
    chain = Chain(stages=stages, base_bytes=0, head_bytes=0)
    # All but the last are 533 bytes, but 30 slots of 20 bytes where there are 26.
    solved = solve(chain, 533, slots=27)
    counted = slots_for(chain, 533, 27)
    assert 5 * counted.size(101) > counted.room
    assert solved.extra_s == 1.0
    assert solved.peak_bytes == 533


def block(index: int, *, size: int = 1 << 20, linked: bool = True) -> Stage:
    """About a block of a transformer: it saves 17 times its input."""
    kept = ((17, 0.0), (11, 0.03), (8, 0.15))
    return Stage(
        name=f"blocks.{index}",
        options=tuple(
            Option(
                label="recipes" if extra else "keep",
                kept_bytes=times * size,
                extra_s=extra * 0.01,
                backward_bytes=20 * size,
            )
            for times, extra in kept
        ),
        input_bytes=size,
        output_bytes=size,
        forward_s=0.01,
        forward_bytes=19 * size,
        replayed_bytes=21 * size,
        replayable=True,
        linked=linked,
    )


def blocks(count: int, **how: object) -> Chain:
    stages = tuple(block(index, **how) for index in range(count))
    return Chain(stages=stages, base_bytes=3 << 20, head_bytes=30 << 20)


def save_everything(chain: Chain) -> int:
    return simulate(chain, Schedule(choices=(0,) * len(chain.stages))).peak_bytes


def test_a_budget_of_everything_drops_nothing():
    chain = blocks(12)
    solved = solve(chain, save_everything(chain))
    assert solved == Solution(
        schedule=Schedule(choices=(0,) * 12),
        extra_s=0.0,
        peak_bytes=save_everything(chain),
        rounding_bytes=0,
    )
    assert solve(chain, save_everything(chain) - 1).extra_s > 0


def test_slots_that_divide_the_sizes_lose_next_to_nothing():
    chain = blocks(48)
    budget = save_everything(chain) // 2
    solved = solve(chain, budget)
    assert solved.rounding_bytes < 2 * budget / (20 * 48) * 1.25  # two slots, 20 a stage
    assert solved.extra_s == solve(chain, budget, slots=10_000).extra_s


def test_below_one_input_a_block_segments_nest():
    chain = blocks(48)
    tight = solve(chain, 70 << 20)
    assert isinstance(tight, Solution)
    assert tight.peak_bytes <= 70 << 20
    # All 48 inputs and the largest stage would be 72 MiB.
    steps = [step for segment in tight.schedule.segments for step in segment.steps]
    assert any(step.kind == "keep_input" for step in steps)
    assert tight.extra_s < 48 * 0.01


def test_stages_that_are_not_linked_are_remade_one_by_one():
    chain = blocks(48, linked=False)
    solved = solve(chain, save_everything(chain) // 8)
    assert all(segment.first == segment.last for segment in solved.schedule.segments)
    assert solved.schedule.segments[0].steps == (
        Step(kind="replay", stage=solved.schedule.segments[0].first),
        Step(kind="backward", stage=solved.schedule.segments[0].first),
    )
    refused = solve(chain, 70 << 20)
    assert isinstance(refused, Infeasible)
    assert refused.smallest_bytes == (3 + 48 + 30) << 20


def test_what_cannot_fit_says_what_sets_it():
    chain = blocks(12)
    assert solve(chain, 1) == Infeasible(smallest_bytes=(3 + 1 + 30) << 20, reason="head")
    small_head = dataclasses.replace(chain, head_bytes=0)
    big = dataclasses.replace(chain.stages[5], forward_bytes=90 << 20, replayed_bytes=90 << 20)
    stages = (*chain.stages[:5], big, *chain.stages[6:])
    refused = solve(dataclasses.replace(small_head, stages=stages), 50 << 20)
    assert isinstance(refused, Infeasible)
    assert refused.reason.endswith("blocks.5")
    assert isinstance(solve(small_head, refused.smallest_bytes), Solution)


def test_the_smallest_budget_told_is_one_that_works():
    sizes = [(7 * index) % 13 * 100_003 + 500_000 for index in range(30)]
    stages = tuple(block(index, size=size) for index, size in enumerate(sizes))
    chain = Chain(stages=stages, base_bytes=12_345, head_bytes=23_456)
    refused = solve(chain, 1)
    assert isinstance(refused, Infeasible)
    solved = solve(chain, refused.smallest_bytes)
    assert isinstance(solved, Solution)
    assert solved.peak_bytes == refused.smallest_bytes
    assert isinstance(solve(chain, refused.smallest_bytes - 1), Infeasible)


def test_a_long_chain_is_solved_with_segments_as_long_as_the_table_allows():
    chain = blocks(300)
    solved = solve(chain, save_everything(chain) // 20)
    assert isinstance(solved, Solution)
    assert solved.peak_bytes <= save_everything(chain) // 20


def test_the_curve_falls_from_the_smallest_budget_to_everything():
    chain = blocks(24)
    drawn = curve(chain)
    assert len(drawn) == 64
    assert drawn[0].budget_bytes == solve(chain, 1).smallest_bytes
    assert drawn[-1] == dataclasses.replace(
        drawn[-1], budget_bytes=save_everything(chain), extra_s=0.0
    )
    assert all(a.extra_s >= b.extra_s for a, b in itertools.pairwise(drawn))
    for point in drawn[::9]:
        assert point.extra_s == pytest.approx(
            solve(chain, point.budget_bytes).extra_s, rel=0.1, abs=0.01
        )


def test_a_solution_is_plain_values():
    chain = blocks(8)
    solved = solve(chain, save_everything(chain) // 3)
    told = json.loads(json.dumps(dataclasses.asdict(solved)))
    assert told["schedule"]["choices"] == list(solved.schedule.choices)
    assert type(solved.extra_s) is float
    assert {type(each) for each in (solved.peak_bytes, solved.rounding_bytes)} == {int}
    json.dumps([dataclasses.asdict(point) for point in curve(chain, points=5)])
    json.dumps(dataclasses.asdict(solve(chain, 1)))


def followed(*steps: tuple[str, int], last: int = 1) -> Simulated:
    segment = Segment(
        first=0, last=last, steps=tuple(Step(kind=kind, stage=stage) for kind, stage in steps)
    )
    choices = (None,) * (last + 1)
    return simulate(blocks(last + 1), Schedule(choices=choices, segments=(segment,)))


def test_the_simulator_counts_what_lives_step_by_step():
    size, base = 1 << 20, 3 << 20
    again = followed(
        ("run", 0),
        ("keep_input", 1),
        ("replay", 1),
        ("backward", 1),
        ("replay", 0),
        ("backward", 0),
    )
    assert again.extra_s == pytest.approx(0.03)
    assert again.peak_bytes == base + size + 30 * size  # the head, over one kept input
    at_once = followed(
        ("replay", 0), ("keep_input", 1), ("replay", 1), ("backward", 1), ("backward", 0)
    )
    assert at_once.extra_s == pytest.approx(0.02)
    assert at_once.peak_bytes == base + 17 * size + 21 * size
    assert at_once.peak_at == "replaying blocks.1"


@pytest.mark.parametrize(
    "steps",
    [
        [("backward", 1)],
        [("replay", 1), ("backward", 1)],
        [("run", 1)],
        [("keep_input", 1)],
        [("run", 0), ("keep_input", 1), ("run", 0)],
        [("run", 0), ("keep_input", 1), ("keep_input", 1)],
        [("replay", 0), ("run", 0)],
        [("replay", 0), ("backward", 0)],
        [("run", 0), ("keep_input", 1), ("replay", 1), ("backward", 1)],
        [],
        [("run", 2)],
    ],
)
def test_steps_that_cannot_be_followed_are_refused(steps):
    with pytest.raises(ValueError, match="segment 0 to 1"):
        followed(*steps)


@pytest.mark.parametrize(
    ("choices", "segments", "match"),
    [
        ((0,), (), "one for each"),
        ((0, 7), (), "no option 7"),
        ((0, None), (), "without an option"),
        ((0, 0), (Segment(first=0, last=0, steps=()),), "without an option"),
    ],
)
def test_schedules_that_are_not_of_the_chain_are_refused(choices, segments, match):
    with pytest.raises(ValueError, match=match):
        simulate(blocks(2), Schedule(choices=choices, segments=segments))


def test_a_segment_over_stages_that_are_not_linked_is_refused():
    segment = Segment(first=0, last=1, steps=())
    with pytest.raises(ValueError, match=r"cannot be made again from the input of 'blocks\.0'"):
        simulate(blocks(2, linked=False), Schedule(choices=(None, None), segments=(segment,)))


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, None])
def test_a_budget_is_a_positive_whole_number(bad):
    with pytest.raises(ValueError, match="budget_bytes"):
        solve(blocks(1), bad)
    with pytest.raises(ValueError, match="slots"):
        solve(blocks(1), 1 << 40, slots=bad if bad is not None else 0)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"options": ()}, "at least one option"),
        ({"options": block(0).options[1:]}, "keeps everything and so costs nothing"),
        ({"forward_bytes": -1}, "forward_bytes"),
        ({"forward_bytes": 1 << 60}, "forward_bytes"),
        ({"input_bytes": 1.0}, "input_bytes"),
        ({"forward_s": float("nan")}, "forward_s"),
    ],
)
def test_a_stage_of_impossible_numbers_is_refused(change, match):
    with pytest.raises(ValueError, match=match):
        dataclasses.replace(block(0), **change)


def test_options_and_chains_of_impossible_numbers_are_refused():
    with pytest.raises(ValueError, match="extra_s"):
        Option(label="keep", kept_bytes=0, extra_s=-0.1, backward_bytes=0)
    with pytest.raises(ValueError, match="at least one stage"):
        Chain(stages=(), base_bytes=0, head_bytes=0)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 10**9), min_size=1, max_size=9),
    room=st.integers(1, 10**11),
    most=st.integers(1, 4000),
)
def test_slots_are_no_more_than_allowed_and_not_many_fewer(sizes, room, most):
    stages = tuple(block(index, size=size) for index, size in enumerate(sizes))
    slots = slots_for(Chain(stages=stages, base_bytes=0, head_bytes=0), room, most)
    assert slots.room <= most
    assert slots.slot_bytes <= 1.25 * math.ceil(room / most)
    assert slots.room * slots.slot_bytes <= room
    assert slots.widened * slots.slot_bytes >= room
