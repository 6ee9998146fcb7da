"""In which order candidates are measured: none is always first, or always after the same one."""

import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from _measure import in_turn, interleaved


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7])
def test_everybody_is_at_every_place_equally_often(count):
    names = "abcdefg"[:count]
    orders = [in_turn(names, repeat) for repeat in range(2 * count)]
    assert all(sorted(order) == [*names] for order in orders)
    places = Counter((name, at) for order in orders for at, name in enumerate(order))
    assert [*places.values()] == [2] * count**2


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("first", range(4))
def test_who_comes_before_another_comes_after_it_the_next_time(count, first):
    names = "abcde"[:count]
    pairs = Counter(pair for n in (0, 1) for pair in pairwise(in_turn(names, 2 * first + n)))
    assert all(pairs[a, b] == pairs[b, a] == 1 for a, b in pairs)


def test_candidates_are_timed_in_these_orders():
    called = []
    candidates = {name: lambda name=name: called.append(name) for name in "abc"}
    seconds = interleaved(candidates, repeats=3)
    assert "".join(called) == "abc" + "cba" + "bca"
    assert {name: len(values) for name, values in seconds.items()} == dict.fromkeys("abc", 3)
