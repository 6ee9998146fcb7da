import copy
import datetime as dt
import math
import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.catalog import (
    CheckpointInfo,
    Retention,
    keep_best,
    keep_every,
    keep_last,
    keep_within,
)
from holdfast.catalog._retention import reasons_to_stay

NOW = dt.datetime(2026, 8, 1, 12, tzinfo=dt.UTC)


def info(prefix, step=None, *, hours=0.0, **metrics):
    return CheckpointInfo(
        prefix=prefix,
        ordinal=1,
        version="1",
        timestamp=NOW - dt.timedelta(hours=hours),
        world_size=1,
        size_bytes=0,
        format="multi_shard",
        step=step,
        metrics=metrics,
        tensors=0,
    )


def stay(retention, infos, *, whole=0):
    """The prefixes that stay, as one text."""
    reasons = reasons_to_stay(retention, infos, NOW, whole=whole)
    return "".join(prefix for prefix, found in reasons.items() if found)


def why(retention, infos, prefix, *, whole=0):
    return reasons_to_stay(retention, infos, NOW, whole=whole)[prefix]


# --- one rule at a time; the newest, "z", always stays


def test_the_last_few():
    infos = [info(prefix) for prefix in "zyx"]
    assert [stay(keep_last(n), infos) for n in (1, 2, 3, 99)] == ["z", "zy", "zyx", "zyx"]
    assert why(keep_last(2), infos, "y") == ("one of the 2 newest",)
    assert why(keep_last(1), infos, "z") == ("the newest",)
    assert stay(keep_last(3), []) == ""


def test_steps_that_are_a_multiple():
    infos = [info("z", 2500), info("y", 2000), info("x", 1500), info("w", 1000), info("v", 0)]
    assert stay(keep_every(1000), infos) == "zywv"
    assert stay(keep_every(1), infos) == "zyxwv"
    assert stay(keep_every(7), infos) == "zv"
    assert why(keep_every(1000), infos, "y") == ("step 2000 is a multiple of 1000",)


def test_of_several_of_one_step_the_newest_stays():
    infos = [info("z", 7), info("y", 10), info("x", 10), info("w", 20), info("v", 10)]
    assert stay(keep_every(10), infos) == "zyw"


def test_what_has_no_step_cannot_be_judged_by_it_and_stays():
    infos = [info("z", 3), info("y"), info("x", 2), info("w")]
    assert stay(keep_every(2), infos) == "zyxw"
    assert why(keep_every(2), infos, "y") == why(keep_every(2), infos, "w") == ("it has no step",)
    assert stay(keep_last(1), infos) == "z"


def test_the_best_few():
    infos = [info(p, loss=loss) for p, loss in zip("zyxwv", (5, 0.31, 3.0, 0.25, 4), strict=True)]
    assert stay(keep_best("loss"), infos) == "zw"
    assert stay(keep_best("loss", 2), infos) == "zyw"
    assert stay(keep_best("loss", 2, mode="max"), infos) == "zv"
    assert stay(keep_best("loss", 99), infos) == "zyxwv"
    assert why(keep_best("loss", 2), infos, "y") == ("loss 0.31 is among the 2 lowest",)
    assert why(keep_best("loss"), infos, "w") == ("loss 0.25 is the lowest",)
    assert why(keep_best("loss", 3, "max"), infos, "v") == ("loss 4 is among the 3 highest",)
    assert why(keep_best("loss", 1, "max"), infos, "z") == ("the newest", "loss 5 is the highest")


@pytest.mark.parametrize("mode", ["min", "max"])
def test_of_equal_ones_the_newer_is_the_better(mode):
    infos = [info("z"), info("y", loss=1.0), info("x", loss=1), info("w", loss=1.0)]
    assert stay(keep_best("loss", 2, mode), infos) == "zyx"


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_metric_that_is_no_number_or_is_missing_is_never_the_best(mode):
    infos = [info("z"), info("y", loss=math.nan), info("x", accuracy=1.0), info("w", loss=9.0)]
    assert stay(keep_best("loss", 5, mode), infos) == "zw"
    assert stay(keep_best("loss", 5, mode), infos[:3]) == "z"


def test_infinity_is_a_number():
    infos = [info("z"), info("y", loss=1.0), info("x", loss=-math.inf), info("w", loss=math.inf)]
    assert stay(keep_best("loss"), infos) == "zx"
    assert stay(keep_best("loss", mode="max"), infos) == "zw"


def test_whole_numbers_that_no_float_can_tell_apart_are_told_apart():
    infos = [info("z"), info("y", tokens=2**53), info("x", tokens=2**53 + 1)]
    assert stay(keep_best("tokens", mode="max"), infos) == "zx"


def test_the_young():
    infos = [info("z", hours=30), info("y", hours=-5), info("x", hours=23.99), info("w", hours=24)]
    assert stay(keep_within(24), infos) == "zyx"
    assert why(keep_within(24), infos, "x") == ("younger than 24 h",)
    assert why(keep_within(0.5), infos, "y") == ("younger than 0.5 h",)
    assert stay(keep_within(1e300), infos) == "zyxw"


def test_what_is_newer_than_the_newest_whole_one_stays_too():
    infos = [info(prefix, 1) for prefix in "zyxw"]
    assert stay(keep_last(1), infos, whole=2) == "zyx"
    assert why(keep_every(10), infos, "z", whole=2) == ("newer than the newest that is whole",)
    assert why(keep_every(10), infos, "x", whole=2) == ("the newest that is whole",)
    assert why(keep_last(1), infos, "z", whole=2)[1:] == ("the newest",)


# --- values


def test_they_read_as_they_are_written():
    retention = keep_last(3) | keep_best("loss", 2)
    assert repr(retention) == "keep_last(3) | keep_best('loss', 2)"
    both = (
        keep_best("acc", mode="max") | keep_every(1000) | keep_within(24) | keep_within(0.1234567)
    )
    assert repr(both) == (
        "keep_best('acc', mode='max') | keep_every(1000) | keep_within(24) | keep_within(0.1234567)"
    )
    names = {name: getattr(holdfast, name) for name in ("keep_last", "keep_every", "keep_best")}
    names["keep_within"] = holdfast.keep_within
    assert eval(repr(both), names) == both
    assert repr(keep_last(1) | keep_last(1)) == "keep_last(1)"


def test_they_are_values():
    retention = keep_last(3) | keep_best("loss", 2)
    assert retention == keep_best("loss", 2) | keep_last(3)
    assert hash(retention) == hash(keep_best("loss", 2) | keep_last(3))
    assert retention != keep_last(3)
    assert retention != "keep_last(3) | keep_best('loss', 2)"
    assert pickle.loads(pickle.dumps(retention)) == copy.deepcopy(retention) == retention
    with pytest.raises(AttributeError):
        retention.rules = ()
    with pytest.raises(TypeError, match="unsupported operand"):
        retention | 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: keep_last(0), "n must be a whole number, at least 1, not 0"),
        (lambda: keep_last(True), "n must be a whole number, at least 1, not True"),
        (lambda: keep_last(2.0), "n must be a whole number, at least 1, not 2.0"),
        (lambda: keep_every(-5), "steps must be a whole number, at least 1, not -5"),
        (lambda: keep_best("loss", 0), "n must be a whole number, at least 1, not 0"),
        (lambda: keep_best(""), "metric must be a text of 1 to 1024 characters, not ''"),
        (lambda: keep_best(3), "metric must be a text of 1 to 1024 characters, not 3"),
        (lambda: keep_best("loss", mode="best"), "mode must be 'min' or 'max', not 'best'"),
        (lambda: keep_within(0), "hours must be more than 0, not 0"),
        (lambda: keep_within(-1), "hours must be a number, at least 0, not -1"),
        (lambda: keep_within(math.nan), "hours must be a number, at least 0, not nan"),
        (lambda: keep_within("24"), "hours must be a number, at least 0, not '24'"),
        (lambda: Retention(rules=()), r"rules must be those of keep_last and the like, not \(\)"),
        (lambda: Retention(rules=(3,)), "rules must be those of keep_last and the like"),
    ],
)
def test_what_cannot_be_meant_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --- laws


METRICS = st.dictionaries(
    st.sampled_from(["loss", "acc"]),
    st.one_of(st.floats(), st.integers(-(2**63) + 1, 2**63 - 1)),
)
FOUND = st.lists(
    st.builds(
        lambda step, hours, metrics: info("", step, hours=hours, **metrics),
        st.none() | st.integers(0, 50),
        st.floats(-10, 10_000),
        METRICS,
    ),
    max_size=12,
).map(lambda infos: [replace(each, prefix=f"p{nth}") for nth, each in enumerate(infos)])
RULES = st.one_of(
    st.builds(keep_last, st.integers(1, 8)),
    st.builds(keep_every, st.integers(1, 12)),
    st.builds(
        keep_best,
        st.sampled_from(["loss", "acc", "none"]),
        st.integers(1, 5),
        st.sampled_from(["min", "max"]),
    ),
    st.builds(keep_within, st.floats(0.001, 10_000)),
)
RETENTIONS = st.lists(RULES, min_size=1, max_size=4).map(
    lambda rules: Retention(rules=tuple(rule for each in rules for rule in each.rules))
)


def kept(retention, infos, *, whole=0):
    return {p for p, found in reasons_to_stay(retention, infos, NOW, whole=whole).items() if found}


@given(RETENTIONS, RETENTIONS, FOUND)
def test_a_union_keeps_what_either_keeps_and_nothing_else(one, other, infos):
    assert kept(one | other, infos) == kept(one, infos) | kept(other, infos)


@given(RETENTIONS, RETENTIONS, RETENTIONS, FOUND)
def test_the_order_of_a_union_does_not_matter(one, other, third, infos):
    assert one | other == other | one
    assert (one | other) | third == one | (other | third)
    assert one | one == one
    assert kept(one | other, infos) == kept(other | one, infos)
    assert hash((one | other) | third) == hash(third | other | one)


@given(RETENTIONS, FOUND, st.integers(0, 11))
def test_the_newest_and_all_down_to_the_newest_whole_one_stay(retention, infos, whole):
    prefixes = [each.prefix for each in infos]
    assert set(prefixes[:1]) <= kept(retention, infos)
    if whole < len(infos):
        guarded = kept(retention, infos, whole=whole)
        assert guarded == kept(retention, infos) | set(prefixes[: whole + 1])


@given(st.integers(1, 8), st.integers(1, 5), st.floats(0.001, 5000), FOUND)
def test_more_generous_numbers_never_keep_less(n, more, hours, infos):
    assert kept(keep_last(n), infos) <= kept(keep_last(n + more), infos)
    assert kept(keep_best("loss", n), infos) <= kept(keep_best("loss", n + more), infos)
    assert kept(keep_within(hours), infos) <= kept(keep_within(hours + more), infos)
    assert kept(keep_every(n * more), infos) <= kept(keep_every(n), infos)


@given(RETENTIONS, FOUND)
def test_pruning_twice_is_pruning_once(retention, infos):
    first = kept(retention, infos)
    left = [each for each in infos if each.prefix in first]
    assert kept(retention, left) == first


@given(st.integers(1, 5), st.sampled_from(["min", "max"]), FOUND)
def test_nothing_that_goes_is_better_than_what_is_best(n, mode, infos):
    reasons = reasons_to_stay(keep_best("loss", n, mode), infos[1:], NOW)
    measured = [e for e in infos[1:] if not math.isnan(e.metrics.get("loss", math.nan))]
    best = [each for each in measured if any("loss" in why for why in reasons[each.prefix])]
    assert len(best) == min(n, len(measured))
    for gone in measured:
        if gone in best:
            continue
        worst = (max if mode == "min" else min)(each.metrics["loss"] for each in best)
        if mode == "min":
            assert gone.metrics["loss"] >= worst
        else:
            assert gone.metrics["loss"] <= worst
