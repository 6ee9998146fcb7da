"""The loss scale: growth, backoff, limits, hysteresis, state."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.precision import DynamicLossScaler, MixedPrecisionOptions


def made(**changes):
    return DynamicLossScaler(MixedPrecisionOptions.for_fp16(**changes))


def test_it_grows_after_an_interval_without_overflow():
    scaler = made(initial_scale=4, growth_interval=3)
    assert [scaler.update(overflow=False) for _ in range(7)] == [4, 4, 8, 8, 8, 16, 16]


def test_an_overflow_shrinks_it_and_the_interval_begins_anew():
    scaler = made(initial_scale=4, growth_interval=3)
    steps = [False, False, True, False, False, False]
    assert [scaler.update(overflow=each) for each in steps] == [4, 4, 2, 2, 2, 4]


def test_limits():
    scaler = made(initial_scale=4, growth_interval=1, max_scale=6, min_scale=3)
    assert [scaler.update(overflow=False) for _ in range(3)] == [6, 6, 6]
    assert [scaler.update(overflow=True) for _ in range(3)] == [3, 3, 3]


def test_a_thousand_overflows_leave_the_smallest_scale():
    """torch's would be 0 after 166, and the next gradient would be divided by it."""
    scaler = made()
    for _ in range(1000):
        scaler.update(overflow=True)
    assert scaler.scale == 1.0
    assert scaler.get_stats().total_overflows == 1000


def test_hysteresis_counts_overflows_in_a_row():
    scaler = made(initial_scale=16, hysteresis=3)
    steps = [True, True, False, True, True, True, True, False, True]
    assert [scaler.update(overflow=each) for each in steps] == [16, 16, 16, 16, 16, 8, 4, 4, 4]


def test_a_scale_that_is_not_dynamic_stays_but_counts():
    scaler = made(dynamic_scaling=False, initial_scale=4, growth_interval=1)
    assert [scaler.update(overflow=each) for each in (True, True, False)] == [4, 4, 4]
    stats = scaler.get_stats()
    assert (stats.total_overflows, stats.consecutive_overflows) == (2, 0)
    assert stats.steps_since_last_overflow == 1


def test_stats():
    scaler = made(initial_scale=8, growth_interval=2)
    for overflow in (True, True, False, False, False):
        scaler.update(overflow=overflow)
    stats = scaler.get_stats()
    assert stats.current_scale == 4  # 8, 4, 2, 2, 4, 4
    assert stats.steps_since_last_overflow == 3
    assert stats.consecutive_overflows == 0
    assert stats.total_overflows == 2


def test_a_loss_is_scaled_in_fp32_and_its_gradient_flows():
    loss = torch.tensor(2.0, dtype=torch.float16, requires_grad=True)
    scaled = made(initial_scale=2.0**15).scale_loss(loss)
    assert scaled.dtype is torch.float32
    assert scaled.item() == 2.0**16
    scaled.backward()
    assert loss.grad.item() == 2.0**15


def test_retired_it_stays_at_1():
    scaler = made(growth_interval=1)
    scaler.retire()
    assert [scaler.update(overflow=each) for each in (False, True, False)] == [1, 1, 1]


@given(
    before=st.lists(st.booleans(), max_size=30),
    after=st.lists(st.booleans(), max_size=30),
    interval=st.integers(1, 6),
    hysteresis=st.integers(1, 4),
)
def test_from_its_state_it_goes_on_as_if_nothing_had_happened(before, after, interval, hysteresis):
    """Whatever the other one was told: hyper-parameters are state too."""
    scaler = made(growth_interval=interval, hysteresis=hysteresis, growth_factor=1.7)
    for overflow in before:
        scaler.update(overflow=overflow)
    other = made(initial_scale=3)
    other.load_state_dict(scaler.state_dict())
    for overflow in after:
        assert other.update(overflow=overflow) == scaler.update(overflow=overflow)
        assert other.state_dict() == scaler.state_dict()
        assert 1.0 <= scaler.scale <= 2.0**24
    assert other.get_stats() == scaler.get_stats()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"scale": 0.0}, "scale is 0"),
        ({"scale": math.inf}, "scale is inf"),
        ({"scale": math.nan}, "scale is nan"),
        ({"scale": 2.0**30}, "is not in"),
        ({"scale": "much"}, "scale"),
        ({"growth_tracker": -1}, "growth_tracker is -1"),
        ({"growth_factor": 0.1}, "growth_factor"),
        ({"total_overflows": 1.5}, "total_overflows"),
    ],
)
def test_what_is_no_state_changes_nothing(changes, named):
    scaler = made()
    before = scaler.state_dict()
    with pytest.raises(ValueError, match=named):
        scaler.load_state_dict({**before, **changes})
    assert scaler.state_dict() == before


def test_a_state_without_a_scale():
    with pytest.raises(ValueError, match="no state of a loss scaler"):
        made().load_state_dict({})
