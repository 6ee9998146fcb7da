"""How large calls are against the sample's, and what a chain becomes of stages that have grown:
`sizes` and `growing`, pure."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.activation._planning.growing import grown
from holdfast.activation._planning.seen import Made, Recipes
from holdfast.activation._planning.sizes import (
    Growth,
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
from holdfast.activation._recipes.drops import Drops
from holdfast.activation._solving.chain import Chain, Option, Stage

KIB = 1024


def test_a_call_is_known_by_the_shapes_of_all_its_tensors_in_order():
    x, mask, deep = torch.zeros(2, 3), torch.zeros(4), torch.zeros(5, 6)
    call = (x, None, 7), {"mask": mask, "more": {"a": [deep, (x,)], "b": "text"}}
    assert shapes_of(call) == ((2, 3), (4,), (5, 6), (2, 3))
    assert shapes_of(((), {})) == ()


def test_a_call_works_on_the_first_tensor_that_needs_gradients_or_on_the_largest():
    x, y = torch.zeros(3, requires_grad=True), torch.zeros(5, requires_grad=True)
    assert numel_of(((torch.zeros(100), x, y), {})) == 3
    assert numel_of(((torch.zeros(2),), {"images": torch.zeros(100)})) == 100
    assert numel_of(((), {"flag": True})) == 0


def test_rows_of_their_own_lengths_are_known_by_their_bytes():
    rows = torch.nested.nested_tensor([torch.zeros(3, 4), torch.zeros(5, 4)], layout=torch.jagged)
    ((size,),) = shapes_of(((rows,), {}))
    assert 8 * 4 * 4 <= size < 8 * 4 * 4 + 64
    assert 8 * 4 <= numel_of(((rows,), {})) < 8 * 4 + 16


SAMPLE = ((8, 64, 16), (64,))


@pytest.mark.parametrize(
    ("shapes", "samples", "larger"),
    [
        (SAMPLE, True, False),
        (((8, 60, 16), (60,)), True, False),
        (((8, 65, 16), (65,)), False, True),
        (((4, 128, 16), (128,)), False, True),
        (((8, 32, 16), (32,)), False, False),
        (((0, 64, 16), (64,)), False, False),
        (((8, 64, 16),), False, True),
        (((8, 64), (64,)), False, True),
    ],
)
def test_shapes_are_the_samples_only_if_none_is_another_or_larger(shapes, samples, larger):
    key = key_of(SAMPLE, shapes)
    assert is_samples(key) is samples
    assert is_larger(key) is larger


lengths = st.lists(st.integers(1, 5000), min_size=3, max_size=3).map(tuple)


@given(lengths, lengths)
def test_shapes_with_the_samples_key_are_within_the_samples(sample, shape):
    if is_samples(key_of((sample,), (shape,))):
        assert within((shape,), (sample,))


def size(saved, *, numel=100, dropped=None, shapes=SAMPLE):
    total = sum(saved) if dropped is None else dropped
    return Size(shapes=shapes, numel=numel, dropped_bytes=total, saved=tuple(saved))


def test_what_did_not_grow_has_grown_by_exactly_one():
    sample = size([400, 100, 900])
    assert growth_of(sample, sample, [400, 900]) == even(1.0, 2)


def test_what_grows_with_the_square_is_told_from_what_does_not():
    """As attention's scores do in a sequence of twice the length and half the batch."""
    sample, met = size([400, 400, 100]), size([400, 400, 200])
    growth = growth_of(sample, met, [400, 100, 7])
    assert growth == Growth(given=1.0, saved=10 / 9, most=2.0, made=(1.0, 2.0, 1.0))


def test_of_storages_of_one_size_the_one_that_grew_least_counts():
    growth = growth_of(size([400, 400]), size([400, 800]), [400])
    assert growth.made == (1.0,)


def test_parameters_that_are_saved_say_nothing():
    sample, met = size([400, 1024]), size([800, 1024], numel=200, dropped=800 + 1024)
    assert growth_of(sample, met, [7], constants=[256]).made == (pytest.approx(1824 / 1424),)
    assert growth_of(sample, met, [7]).made == (1.0,)
    assert growth_of(sample, met, [7], constants=[256]).most == 2.0


def test_of_another_graph_only_the_sum_is_known_and_recipes_free_nothing():
    growth = growth_of(size([400]), size([400, 800]), [400])
    assert growth == Growth(given=1.0, saved=3.0, most=3.0, made=(0.0,))


def test_a_stage_that_saved_nothing_grows_as_what_it_is_given():
    assert growth_of(size([]), size([], numel=300), []) == even(3.0, 0)


def test_sizes_below_nothing_are_refused():
    with pytest.raises(ValueError, match="not below 0"):
        size([-1])
    with pytest.raises(ValueError, match="not below 0"):
        size([1], shapes=((3, -1),))
    with pytest.raises(ValueError, match="63 bits"):
        size([1], shapes=((1 << 63,),))


factors = st.floats(0.01, 100)
growths = st.builds(
    Growth, given=factors, saved=factors, most=factors, made=st.tuples(factors, factors)
)


@given(growths, growths)
def test_the_larger_of_two_covers_both(one, other):
    both = one.joined(other)
    assert both.covers(one)
    assert both.covers(other)
    assert one.joined(one) == one


def recipes(*freed):
    return Recipes(
        drops=Drops(roots=(), ways=(), drops=()),
        made=tuple(Made(freed_bytes=each * KIB, seconds=0.1) for each in freed),
    )


def stage(number, *, keep=100, forward=110, backward=120, replayed=130):
    def option(label, kept, most, dropped=()):
        return Option(
            label=label,
            kept_bytes=kept * KIB,
            extra_s=0.1 * len(dropped),
            backward_bytes=most * KIB,
            dropped=dropped,
        )

    return Stage(
        name=str(number),
        options=(
            option("keep", keep, backward),
            option("recipes", keep - 40, backward, (0,)),
            option("recipes", keep - 50, backward - 5, (0, 1)),
        ),
        input_bytes=10 * KIB,
        output_bytes=10 * KIB,
        forward_s=1.0,
        forward_bytes=forward * KIB,
        replayed_bytes=replayed * KIB,
        replayable=True,
        linked=number > 0,
    )


CHAIN = Chain(stages=(stage(0), stage(1), stage(2)), base_bytes=8 * KIB, head_bytes=16 * KIB)
MADE = [recipes(40, 10)] * 3


def test_a_chain_that_did_not_grow_stays_as_it_is():
    assert grown(CHAIN, [even(1.0, 2)] * 3, MADE) == CHAIN


def test_a_chain_of_twice_the_size_has_twice_of_all():
    twice = grown(CHAIN, [even(2.0, 2)] * 3, MADE)
    assert (twice.base_bytes, twice.head_bytes) == (16 * KIB, 32 * KIB)
    for then, now in zip(CHAIN.stages, twice.stages, strict=True):
        assert now.forward_s == 2 * then.forward_s
        assert now.forward_bytes == 2 * then.forward_bytes
        assert now.replayed_bytes == 2 * then.replayed_bytes
        assert now.input_bytes == 2 * then.input_bytes
        assert [each.kept_bytes for each in now.options] == [
            2 * each.kept_bytes for each in then.options
        ]
        assert [each.backward_bytes for each in now.options] == [
            2 * each.backward_bytes for each in then.options
        ]


def test_what_is_dropped_counts_as_it_has_grown_itself():
    """Of 90 KiB saved, 40 grew fourfold and are dropped by the first recipe."""
    growth = Growth(given=1.0, saved=(50 + 160) / 90, most=4.0, made=(4.0, 1.0))
    keep, first, both = grown(CHAIN, [growth] * 3, MADE).stages[1].options
    assert keep.kept_bytes == (10 + 50 + 160) * KIB
    assert first.kept_bytes == (10 + 50) * KIB
    assert both.kept_bytes == (10 + 40) * KIB
    # What lives besides has grown as what grew most.
    assert keep.backward_bytes == keep.kept_bytes + 4 * 20 * KIB


def test_a_smaller_step_has_the_same_gradients_of_weights():
    half = grown(CHAIN, [even(0.5, 2)] * 3, MADE)
    assert (half.base_bytes, half.head_bytes) == (8 * KIB, 16 * KIB)
    assert half.stages[0].keep.kept_bytes == 50 * KIB
    assert half.stages[0].keep.backward_bytes == (50 + 20) * KIB
    assert half.stages[0].replayed_bytes == (50 + 30) * KIB


def test_what_a_stage_leaves_is_what_the_next_is_given():
    """A second tower that grows alone begins after the last stage of the first."""
    unit, larger = even(1.0, 2), even(3.0, 2)
    first, second, third = grown(CHAIN, [unit, unit, larger], MADE).stages
    assert first == CHAIN.stages[0]
    assert second.input_bytes == 30 * KIB
    assert second.keep.kept_bytes == (30 + 90) * KIB
    assert third.keep.kept_bytes == 300 * KIB


@given(st.lists(growths, min_size=3, max_size=3), st.integers(0, 2), st.floats(1, 3))
def test_no_stage_takes_less_when_one_grows(before, number, factor):
    after = list(before)
    old = before[number]
    after[number] = replace(
        old, given=old.given * factor, saved=old.saved * factor, most=old.most * factor
    )
    small, large = grown(CHAIN, before, MADE), grown(CHAIN, after, MADE)
    for one, other in zip(small.stages, large.stages, strict=True):
        assert one.forward_bytes <= other.forward_bytes
        assert one.replayed_bytes <= other.replayed_bytes
        for less, more in zip(one.options, other.options, strict=True):
            assert less.kept_bytes <= more.kept_bytes
            assert less.backward_bytes <= more.backward_bytes
