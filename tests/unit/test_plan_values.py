"""What a plan is chosen from and what it says, without a model: a profile becomes a chain, and a
schedule becomes actions and rows, for the sample's size and for others."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.activation._measuring.stretches import END, Course, Stretch
from holdfast.activation._planning.choosing import AGES_S, chain_of, without_recipes
from holdfast.activation._planning.deciding import Decision, PlannedStage
from holdfast.activation._planning.linking import Pass, passes_of
from holdfast.activation._planning.seen import Made, Profile, Recipes, StageProfile
from holdfast.activation._planning.showing import report_of, timeline_of
from holdfast.activation._planning.sizes import bucket, even
from holdfast.activation._recipes.drops import Drop, Drops
from holdfast.activation._recipes.expecting import Expected
from holdfast.activation._solving.chain import Chain, Option, Stage
from holdfast.activation._solving.schedule import Schedule, Segment, Step
from holdfast.activation._solving.simulating import simulate
from holdfast.activation._solving.solving import Solution, curve, lowest, solve
from holdfast.errors import PlanError

KIB = 1024


def course(*stretches):
    """Of ``(mark, peak, level)`` in KiB, one noted level each."""
    return Course(
        stretches=tuple(
            Stretch(ends_at=mark, peak_bytes=peak * KIB, level_bytes=level * KIB, noted=number + 1)
            for number, (mark, peak, level) in enumerate(stretches)
        ),
        levels=tuple(peak * KIB for _, peak, _ in stretches),
    )


def step_of(kept, *, peak, base=4, head=10, backward=3):
    """The course of a step whose stages leave ``kept`` behind, each with a ``peak`` of its own."""
    found, level = [], base
    for number, each in enumerate(kept):
        found.append((("forward", number), level, level))
        found.append((("forwarded", number), level + peak, level + each))
        level += each
    found.append((("backward", len(kept) - 1), level + head, level))
    for number in reversed(range(len(kept))):
        mark = ("backward", number - 1) if number else END
        found.append((mark, level + backward, level - kept[number]))
        level -= kept[number]
    return course(*found)


def drop(label):
    return Drop(
        label=label,
        size_bytes=KIB,
        holders=(),
        operations=(),
        results=(),
        watched=(),
        expects=Expected(),
        reads=0,
    )


def recipes(*made):
    return Recipes(
        drops=Drops(roots=(), ways=(), drops=tuple(drop(label) for label, _, _ in made)),
        made=tuple(Made(freed_bytes=freed * KIB, seconds=cost) for _, freed, cost in made),
    )


MADE = recipes(("gelu", 40, 0.1), ("layer_norm", 10, 0.1), ("gelu", 20, 0.1))


def stage_profile(number, **changed):
    return StageProfile(
        **{
            "name": f"blocks.{number}",
            "kind": "Block",
            "forward_s": [2.0, 1.0],
            "saved_bytes": 90 * KIB,
            "input_numel": 100,
            "output_bytes": 8 * KIB,
            "recipes": MADE,
            "linked": number > 0,
            **changed,
        }
    )


def profile(stages=None, **courses):
    stages = stages or [stage_profile(number) for number in range(3)]
    count = len(stages)
    return Profile(
        stages=tuple(stages),
        courses={
            "kept": step_of([100] * count, peak=120),
            "replayed": step_of([8] * count, peak=120, backward=110),
            "remade": step_of([30] * count, peak=120, backward=40),
            **courses,
        },
        seconds={"kept": 10.0, "replayed": 13.0, "remade": 10.9, "moved": 16.0},
        device="cpu",
    )


# ---- choosing ----------------------------------------------------------------------------------


def test_a_chain_has_what_was_measured():
    chain = chain_of(profile())
    assert chain.base_bytes == 4 * KIB
    assert chain.head_bytes == 10 * KIB
    for stage in chain.stages:
        assert stage.keep == Option(
            label="keep", kept_bytes=100 * KIB, extra_s=0.0, backward_bytes=103 * KIB
        )
        assert stage.input_bytes == 8 * KIB
        assert stage.output_bytes == 8 * KIB
        assert stage.forward_bytes == 120 * KIB
        assert stage.replayed_bytes == 118 * KIB
    assert [stage.linked for stage in chain.stages] == [False, True, True]


def test_a_chain_predicts_the_step_it_was_read_from():
    """Nothing is lost on the way: its simulated peak is the one that was measured."""
    seen = profile()
    chain = chain_of(seen)
    everything = simulate(chain, Schedule(choices=(0, 0, 0)))
    assert everything.peak_bytes == seen.kept.peak_bytes
    replayed = Schedule(
        choices=(None,) * 3,
        segments=tuple(
            Segment(
                first=number,
                last=number,
                steps=(Step(kind="replay", stage=number), Step(kind="backward", stage=number)),
            )
            for number in range(3)
        ),
    )
    found = simulate(chain, replayed)
    assert found.peak_bytes == seen.courses["replayed"].peak_bytes
    assert found.extra_s == pytest.approx(seen.extra_s("replayed"))


def test_recipes_are_taken_the_cheapest_by_the_byte_first():
    options = chain_of(profile()).stages[0].options
    assert [each.label for each in options] == ["keep", "recipes", "recipes", "recipes"]
    assert [each.dropped for each in options] == [(), (0,), (0, 2), (0, 1, 2)]
    assert [each.kept_bytes // KIB for each in options] == [100, 60, 40, 30]
    # By themselves 0.1 s each; a step with all of them took 0.9 s more for the three stages.
    assert [each.extra_s for each in options] == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert options[-1].backward_bytes == 70 * KIB
    falling = [each.backward_bytes for each in options]
    assert falling == sorted(falling, reverse=True)


def test_times_are_those_of_whole_steps():
    slower = replace(profile(), seconds={"kept": 10.0, "replayed": 16.0, "remade": 11.8})
    chain = chain_of(slower)
    assert chain.stages[0].forward_s == pytest.approx(2.0)
    assert chain.stages[0].options[-1].extra_s == pytest.approx(0.6)


def test_every_replay_takes_as_much_more_than_its_forward_however_short_that_is():
    stages = [stage_profile(0, replayed_s=[1.0]), stage_profile(1, kind="Long", replayed_s=[3.0])]
    chain = chain_of(
        replace(profile(stages), seconds={"kept": 10.0, "replayed": 16.0, "remade": 10.0})
    )
    assert [stage.forward_s for stage in chain.stages] == pytest.approx([2.0, 4.0])


def test_dropping_takes_time_beside_the_making_and_so_does_finding_what_to_drop():
    stages = [stage_profile(number, dropping_s=[0.4]) for number in range(3)]
    seconds = {"kept": 10.0, "replayed": 13.0, "remade": 10.0 + 3 * (0.4 + 0.3)}
    options = chain_of(replace(profile(stages), seconds=seconds)).stages[0].options
    assert [each.extra_s for each in options] == pytest.approx([0.0, 0.3, 0.5, 0.7])


def test_a_disturbed_measurement_does_not_make_things_free():
    lucky = replace(profile(), seconds={"kept": 10.0, "replayed": 9.0, "remade": 10.0})
    chain = chain_of(lucky)
    assert all(stage.forward_s == pytest.approx(0.5) for stage in chain.stages)
    assert chain.stages[0].options[-1].extra_s == pytest.approx(0.15)


def test_many_recipes_are_thinned_and_all_of_them_stay_a_choice():
    made = recipes(*((f"op{number}", 1, 0.01 * number) for number in range(80)))
    stages = [stage_profile(number, recipes=made) for number in range(2)]
    for stage in chain_of(profile(stages)).stages:
        kept = [each.kept_bytes for each in stage.options]
        assert len(kept) <= 14
        assert kept == sorted(kept, reverse=True)
        assert stage.options[-1].dropped == tuple(range(80))
        gaps = [before - after for before, after in itertools.pairwise(kept[1:])]
        assert max(gaps) <= 9 * KIB


def test_a_stage_without_recipes_or_that_must_not_be_replayed():
    stages = [stage_profile(0, recipes=None), stage_profile(1, replayable=False)]
    first, second = chain_of(profile(stages)).stages
    assert [each.label for each in first.options] == ["keep"]
    assert first.replayable
    assert not second.replayable
    assert not chain_of(profile([stage_profile(0, saved_bytes=0)])).stages[0].replayable


def test_a_tier_is_one_option_more():
    moved = step_of([12] * 3, peak=120, backward=104)
    for stage in chain_of(profile(moved=moved)).stages:
        last = stage.options[-1]
        assert last.label == "moved"
        assert last.kept_bytes == 12 * KIB
        assert last.extra_s == pytest.approx(2.0)


def test_backward_in_another_order_than_forward_turned_around():
    """As of two towers: what a stretch takes belongs to the stage that began it."""
    kept = course(
        (("forward", 0), 0, 0),
        (("forwarded", 0), 10, 10),
        (("forward", 1), 10, 10),
        (("forwarded", 1), 30, 30),
        (("backward", 0), 31, 30),
        (("backward", 1), 45, 20),
        (END, 33, 0),
    )
    stages = [stage_profile(0, recipes=None), stage_profile(1, recipes=None)]
    chain = chain_of(profile(stages, kept=kept, remade=kept))
    assert [each.keep.backward_bytes // KIB for each in chain.stages] == [45, 23]
    assert chain.head_bytes == KIB


# ---- deciding ----------------------------------------------------------------------------------


def chain(count=4, *, replayable=True):
    keep = Option(label="keep", kept_bytes=100 * KIB, extra_s=0.0, backward_bytes=103 * KIB)
    less = Option(
        label="recipes",
        kept_bytes=60 * KIB,
        extra_s=0.1,
        backward_bytes=103 * KIB,
        dropped=(0,),
    )
    return Chain(
        stages=tuple(
            Stage(
                name=f"blocks.{number}",
                options=(keep, less),
                input_bytes=8 * KIB,
                output_bytes=8 * KIB,
                forward_s=1.0,
                forward_bytes=110 * KIB,
                replayed_bytes=115 * KIB,
                replayable=replayable,
                linked=number > 0,
            )
            for number in range(count)
        ),
        base_bytes=4 * KIB,
        head_bytes=2 * KIB,
    )


def floor():
    return lowest(lambda budget: solve(chain(), budget))


def decision(schedule, of=None, *, solved=300 * KIB):
    of = of or chain()
    return Decision(
        stages=tuple(
            PlannedStage(name=each.name, kind="Block", parameters=1, recipes=MADE)
            for each in of.stages
        ),
        chain=of,
        schedule=schedule,
        solved_bytes=solved,
        parameters=4,
    )


PAIR = Segment(
    first=0,
    last=1,
    steps=tuple(
        Step(kind=kind, stage=stage)
        for kind, stage in [
            ("run", 0),
            ("keep_input", 1),
            ("replay", 1),
            ("backward", 1),
            ("replay", 0),
            ("backward", 0),
        ]
    ),
)
MIXED = Schedule(choices=(None, None, 1, 0), segments=(PAIR,))


def test_the_actions_of_the_sample_are_those_of_its_schedule():
    found = decision(MIXED).actions()
    assert found.problem == ""
    first, second, third, fourth = found.stages.values()
    assert [each.kind for each in found.stages.values()] == [
        "segment",
        "segment",
        "recipes",
        "keep",
    ]
    assert first.passes == second.passes
    assert third.saves_bytes == 40 * KIB
    assert third.spare_bytes == 52 * KIB
    assert third.drops is not None
    assert [each.label for each in third.drops.drops] == ["gelu"]
    assert (fourth.saves_bytes, fourth.spare_bytes, fourth.drops) == (0, 92 * KIB, None)


def test_a_stage_alone_in_its_segment_keeps_its_input():
    alone = Segment(
        first=3, last=3, steps=(Step(kind="replay", stage=3), Step(kind="backward", stage=3))
    )
    actions = decision(Schedule(choices=(0, 0, 0, None), segments=(alone,))).actions()
    assert actions.stages["blocks.3"].kind == "input"


def test_nothing_is_spared_by_a_stage_that_cannot_be_replayed():
    actions = decision(Schedule(choices=(0,) * 4), chain(replayable=False)).actions()
    assert {each.spare_bytes for each in actions.stages.values()} == {0}


@pytest.mark.parametrize(
    ("length", "expected"),
    [(1000, 0), (999, 0), (1001, 1), (1125, 1), (1126, 2), (889, 0), (888, -1), (500, -5)],
)
def test_lengths_are_decided_for_in_steps_of_an_eighth(length, expected):
    assert bucket(length, 1000) == expected


@given(st.integers(1, 10**12), st.integers(1, 10**12))
def test_a_length_is_never_taken_for_a_smaller_one(length, sample):
    found = bucket(length, sample)
    assert 1.125**found * sample >= length * (1 - 1e-6)
    assert 1.125 ** (found - 1) * sample < length * (1 + 1e-6)


def grown_by(*factors):
    return [even(factor, len(MADE.made)) for factor in factors]


def test_smaller_batches_keep_what_fits_and_larger_ones_keep_less():
    made = decision(Schedule(choices=(1,) * 4), solved=420 * KIB)
    small = made.actions(grown_by(*[0.5] * 4))
    large = made.actions(grown_by(*[1.5] * 4))
    assert {each.kind for each in small.stages.values()} == {"keep"}
    assert {each.kind for each in large.stages.values()} & {"segment", "input"}
    assert small.problem == large.problem == ""


def test_a_batch_that_no_schedule_fits_is_kept_as_small_as_can_be_and_told():
    made = decision(Schedule(choices=(0,) * 4))
    found = made.actions(grown_by(*[5.2] * 4))
    assert "5.20 times the sample's size" in found.problem
    assert "short by" in found.problem
    assert found.stages["blocks.0"].kind in {"segment", "input"}
    assert found.stages["blocks.1"].kind in {"segment", "input"}


@pytest.mark.parametrize("factor", [1e-9, 0.03, 0.9, 1.125, 30.0, 1e6, 1e18])
def test_any_size_can_be_decided_for(factor):
    found = decision(Schedule(choices=(0,) * 4)).actions(grown_by(*[factor] * 4))
    assert list(found.stages) == [f"blocks.{number}" for number in range(4)]


@pytest.mark.parametrize(
    "spoiled",
    [
        {"schedule": Schedule(choices=(0,) * 3)},
        {"schedule": Schedule(choices=(2, 0, 0, 0))},
        {"schedule": Schedule(choices=(-1, 0, 0, 0))},
        {"schedule": Schedule(choices=(None, None, 0, 0))},
        {"schedule": replace(MIXED, segments=(replace(PAIR, steps=PAIR.steps[1:]),))},
        {"schedule": replace(MIXED, segments=(replace(PAIR, steps=PAIR.steps[:-1]),))},
        {"schedule": replace(MIXED, segments=(replace(PAIR, last=7),))},
        {"stages": ()},
        {"stages": (PlannedStage(name="other", kind="Block", parameters=1, recipes=MADE),) * 4},
        {"stages": tuple(replace(each, recipes=None) for each in decision(MIXED).stages)},
        {"stages": tuple(replace(each, recipes=recipes()) for each in decision(MIXED).stages)},
    ],
)
def test_parts_that_do_not_belong_together_are_refused(spoiled):
    decision(MIXED).check()
    with pytest.raises(PlanError, match="does not hold together"):
        replace(decision(MIXED), **spoiled).check()


def test_an_unknown_kind_of_option_is_refused():
    made = decision(MIXED)
    stages = list(made.chain.stages)
    stages[0] = replace(
        stages[0], options=(stages[0].keep, replace(stages[0].options[1], label="magic"))
    )
    with pytest.raises(PlanError, match="magic"):
        replace(made, chain=replace(made.chain, stages=tuple(stages))).check()


def test_the_smallest_solution_is_one_that_fits_and_a_byte_less_does_not():
    found, why = floor()
    assert simulate(chain(), found.schedule).peak_bytes == found.peak_bytes
    assert why
    below = solve(chain(), found.peak_bytes - 1)
    assert not isinstance(below, Solution)
    assert below.smallest_bytes == found.peak_bytes


def test_the_passes_of_a_segment_say_what_is_done_before_each_backward():
    assert passes_of(PAIR) == {
        1: Pass(holds=frozenset({1}), replays=frozenset()),
        0: Pass(holds=frozenset(), replays=frozenset()),
    }


# ---- reporting ---------------------------------------------------------------------------------


def report(schedule, *, extra_s=1.5):
    seen = profile([stage_profile(number) for number in range(4)])
    return report_of(
        "Model",
        seen,
        Solution(
            schedule=schedule,
            extra_s=extra_s,
            peak_bytes=250 * KIB,
            rounding_bytes=7,
        ),
        step_of([8, 0, 60, 100], peak=110),
        stages=decision(schedule).stages,
        chain=chain(),
        floor=floor(),
        curve=curve(chain()),
        limit=300 * KIB,
        times=(10.0, 12.0),
        planning_s=99.0,
    )


def test_a_report_says_what_was_measured_and_what_was_predicted():
    found = report(MIXED)
    assert found.model == "Model"
    assert found.budget_bytes == 300 * KIB
    assert found.predicted_peak_bytes == 250 * KIB
    assert found.measured_peak_bytes == (4 + 8 + 60 + 110) * KIB
    assert found.save_all_peak_bytes == (4 + 300 + 120) * KIB
    assert (found.step_s, found.measured_step_s) == (10.0, 12.0)
    assert found.predicted_step_s == 11.5
    assert found.smallest_bytes == floor()[0].peak_bytes
    assert found.rounding_bytes == 7
    assert found.notes == ()
    assert found.before.peak_bytes == found.save_all_peak_bytes


def test_every_stage_has_a_row():
    first, second, third, fourth = report(MIXED).rows
    assert [each.choice for each in (first, second, third, fourth)] == [
        "segment 0-1",
        "segment 0-1",
        "recipes",
        "keep",
    ]
    assert [each.kept_bytes // KIB for each in (first, second, third, fourth)] == [8, 0, 60, 100]
    assert [each.extra_s for each in (first, second, third, fourth)] == [2.0, 1.0, 0.1, 0.0]
    assert third.detail == "remakes gelu"
    assert fourth.detail == ""
    assert {each.kept_all_bytes for each in (first, second, third, fourth)} == {100 * KIB}


def test_a_plan_that_changes_nothing_says_so():
    assert any("fits" in note for note in report(Schedule(choices=(0,) * 4), extra_s=0.0).notes)


def test_a_timeline_has_every_stage_forward_and_backward():
    found = timeline_of(step_of([10, 20], peak=30))
    assert [(each.kind, each.stage) for each in found.marks] == [
        ("forward", 0),
        ("forward", 1),
        ("backward", 1),
        ("backward", 0),
    ]
    for mark in found.marks:
        assert 0 <= mark.start <= mark.end <= len(found.bytes_)


@given(st.lists(st.integers(0, 10**12), max_size=5000), st.integers(0, 4999))
def test_a_long_timeline_is_thinned_and_keeps_its_peak(levels, at):
    at = min(at, len(levels))
    peaks = [max(part, default=0) for part in (levels[:at], levels[at:])]
    found = timeline_of(
        Course(
            stretches=tuple(
                Stretch(ends_at=mark, peak_bytes=peak, level_bytes=0, noted=noted)
                for mark, peak, noted in zip(
                    (("backward", 0), END), peaks, (at, len(levels)), strict=True
                )
            ),
            levels=tuple(levels),
        )
    )
    assert len(found.bytes_) <= 1500
    assert max(found.bytes_, default=0) == max(levels, default=0) == found.peak_bytes
    (mark,) = found.marks
    assert 0 <= mark.start <= mark.end <= max(1, len(found.bytes_))


def test_recipes_are_left_out_where_anything_else_fits():
    """Numbers of options stay what they were, so that a schedule is one of the chain itself."""
    whole, plain = chain(), without_recipes(chain())
    lowest_bytes = floor()[0].peak_bytes
    for budget in range(lowest_bytes, simulate(whole, Schedule(choices=(0,) * 4)).peak_bytes, 997):
        found = solve(plain, budget)
        chosen = [each for each in found.schedule.choices if each is not None]
        assert found.extra_s >= solve(whole, budget).extra_s
        if found.extra_s < AGES_S:
            assert set(chosen) <= {0}
            assert simulate(whole, found.schedule).extra_s == pytest.approx(found.extra_s)
        else:
            assert set(chosen) - {0}
