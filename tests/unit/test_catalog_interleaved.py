"""Savers, deleters and gc at the same time on one storage, call by call, in thousands of orders."""

import itertools
import os
from collections import Counter

import numpy as np
import pytest
from catalog_schedules import World
from catalog_tools import leftovers

from holdfast.catalog import Catalog
from holdfast.errors import SaveError

SEED = int(os.environ.get("HOLDFAST_SCHEDULE_SEED", "0"))
WEEKS_S = 30 * 24 * 3600.0


def state(number):
    return {"x": np.full(3, number), "n": number}


def save(prefix, number, *, overwrite):
    def act(storage, clock):
        catalog = Catalog(storage, lease_s=10.0, clock=clock)
        return catalog.write(prefix, state(number), overwrite=overwrite)

    return act


def delete(prefix):
    return lambda storage, clock: Catalog(storage).delete(prefix)


def roll_back(prefix):
    return lambda storage, clock: Catalog(storage).rollback(prefix)


def collect(storage, clock):
    Catalog(storage).gc()
    Catalog(storage).gc()


ACTORS = {
    "saver 1": save("a", 1, overwrite=True),
    "saver 2": save("a", 2, overwrite=True),
    "saver 3": save("a", 3, overwrite=False),
    "deleter": delete("a"),
    "second deleter": delete("a"),
    "roller": roll_back("a"),
    "gc": collect,
    "second gc": collect,
}
NUMBERS = {"saver 1": 1, "saver 2": 2, "saver 3": 3}
SETS = [
    ("saver 1", "deleter", "gc"),
    ("saver 3", "deleter", "gc"),
    ("saver 1", "saver 2"),
    ("saver 1", "saver 2", "gc"),
    ("saver 1", "saver 3", "deleter", "gc"),
    ("saver 3", "gc", "second gc"),
    ("saver 1", "roller", "gc"),
    ("saver 3", "roller", "deleter"),
    ("saver 1", "saver 2", "deleter", "second deleter", "gc"),
    ("saver 3", "saver 1", "roller", "gc", "second gc"),
]


def explore(seed):
    """One schedule. Returns what each actor came to."""
    world = World(seed)
    clean = Catalog(world.storage, clock=world.clock)
    clean.write("b", state(100))
    if world.rng.random() < 0.6:
        clean.write("a", state(0))
    names = SETS[seed % len(SETS)]
    world.run({name: ACTORS[name] for name in names})
    check(world, clean)
    listed = {info.prefix for info in clean.list()}
    world.clock.advance(WEEKS_S)
    for _ in range(3):  # the first fences, the second removes, the third lifts
        clean.gc()
        world.clock.advance(WEEKS_S)
    assert {info.prefix for info in clean.list()} == listed
    check(world, clean)
    assert leftovers(world.storage) == []
    return {name: world.actors[name].error is None for name in names}


def check(world, clean):
    found = {}
    for info in clean.list():
        report = clean.verify(info.prefix)
        assert report.is_intact, report.damage
        value = clean.read(info.prefix)
        assert value["x"].tolist() == [value["n"]] * 3
        found[info.prefix] = value["n"]
    assert found.pop("b") == 100
    history = world.storage.history.get("a", [])
    last = history[-1] if history else None
    in_place = last is not None and last.state == "committed"
    assert found == ({"a": last.number} if in_place else {})
    for before, after in itertools.pairwise(history):
        if before.state == "committed" and after.state != "committed":
            assert after.state == "tombstone"
            assert after.actor in {"deleter", "second deleter", "roller"}
        if after.state == "committed" and after.number != before.number:
            assert NUMBERS.get(after.actor) == after.number
    for name, actor in world.actors.items():
        if name not in NUMBERS:
            continue
        committed = any(event.number == NUMBERS[name] for event in history)
        if actor.error is None:
            assert committed
        elif isinstance(actor.error, SaveError) and "nothing was" in str(actor.error):
            assert found.get("a") != NUMBERS[name]


def campaign(first, count):
    """Explore so many schedules. Returns how often each actor succeeded and failed."""
    outcomes = Counter()
    for seed in range(first, first + count):
        try:
            outcomes.update(explore(seed).items())
        except BaseException as error:
            error.add_note(f"HOLDFAST_SCHEDULE_SEED={seed} repeats this schedule")
            raise
    return outcomes


def test_whatever_the_order_of_calls_nothing_acknowledged_is_lost_and_nothing_broken_is_listed():
    count = 1500
    outcomes = campaign(SEED, count)
    assert sum(outcomes.values()) == sum(
        len(SETS[n % len(SETS)]) for n in range(SEED, SEED + count)
    )
    for name in ("saver 1", "saver 2", "saver 3", "deleter", "roller"):
        assert outcomes[name, True] > 50, outcomes
        assert outcomes[name, False] > 50, outcomes


@pytest.mark.proof
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(50))
def test_a_hundred_thousand_orders_of_calls(part, record_property):
    count = 2000
    outcomes = campaign(SEED + 1_000_000 + part * count, count)
    assert sum(outcomes.values()) > 3 * count
    record_property("orders of calls", count)
