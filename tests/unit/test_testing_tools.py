"""The tools holdfast ships for tests: a clock that obeys, random numbers that repeat."""

import asyncio
import copy
import math
import pickle
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.testing import FakeClock, seeded_rng

durations = st.floats(min_value=0, max_value=1e6)


@given(start=durations, steps=st.lists(st.tuples(st.sampled_from(["advance", "sleep"]), durations)))
def test_the_clock_moves_by_exactly_what_was_asked_and_records_only_sleeps(start, steps):
    clock = FakeClock(start)
    expected = start
    for verb, seconds in steps:
        before = clock.now()
        getattr(clock, verb)(seconds)
        expected += seconds
        assert clock.now() == expected >= before
    assert clock.slept == [seconds for verb, seconds in steps if verb == "sleep"]


@given(bad=st.floats(max_value=0, exclude_max=True) | st.sampled_from([math.nan, math.inf]))
def test_the_clock_never_goes_back(bad):
    clock = FakeClock(5)
    for move in (clock.advance, clock.sleep):
        with pytest.raises(ValueError, match=r"advance|sleep"):
            move(bad)
    with pytest.raises(ValueError, match="sleep"):
        asyncio.run(clock.sleep_async(bad))
    assert clock.now() == 5
    assert clock.slept == []


def test_sleeps_of_many_threads_are_all_counted():
    clock = FakeClock()

    def work():
        for _ in range(500):
            clock.sleep(1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clock.now() == 4000
    assert len(clock.slept) == 4000


def test_an_async_sleep_lets_other_tasks_run_and_can_be_cancelled():
    async def main():
        clock = FakeClock()
        order = []

        async def sleeper(name):
            await clock.sleep_async(1)
            order.append(name)

        first = asyncio.create_task(sleeper("first"))
        second = asyncio.create_task(sleeper("second"))
        await asyncio.sleep(0)
        first.cancel()
        await second
        with pytest.raises(asyncio.CancelledError):
            await first
        return order, clock.slept

    assert asyncio.run(main()) == (["second"], [1, 1])


def test_the_clock_starts_only_at_a_finite_time():
    with pytest.raises(ValueError, match="start"):
        FakeClock(math.nan)


def test_a_generator_names_the_seed_that_repeats_it():
    rng = seeded_rng()
    assert repr(rng) == f"seeded_rng({rng.seed_value})"
    again = seeded_rng(rng.seed_value)
    assert [rng.random() for _ in range(20)] == [again.random() for _ in range(20)]


def test_generators_without_a_seed_differ():
    assert len({seeded_rng().random() for _ in range(10)}) > 1


@pytest.mark.parametrize("travel", [copy.copy, lambda r: pickle.loads(pickle.dumps(r))])
def test_a_copied_generator_goes_on_where_the_original_was(travel):
    rng = seeded_rng(7)
    rng.random()
    other = travel(rng)
    assert other.seed_value == 7
    assert other.random() == rng.random()
