"""A save that refers to another checkpoint while others delete that one, call by call, in many
orders: whatever is listed in the end is whole."""

import os
from collections import Counter

import msgspec
import numpy as np
from catalog_schedules import World
from catalog_tools import Observed, leftovers

from holdfast.catalog import Catalog
from holdfast.catalog._writing import Facts, record_of, write_leaves
from holdfast.distributed import SaveOptions
from holdfast.distributed._announcing import announce
from holdfast.distributed._borrowing import Borrowed
from holdfast.errors import SaveError
from holdfast.format import CompressionLevel, LeafRef, encode_value
from holdfast.resilience import SystemClock
from holdfast.storage import MemoryStorage

SEED = int(os.environ.get("HOLDFAST_SCHEDULE_SEED", "0"))
WEEKS_S = 30 * 24 * 3600.0
X = np.arange(3)


def save_incrementally(prefix, number, last, *, overwrite=False):
    """``x`` is referred to if there is anything to refer to, and written otherwise."""

    def act(storage, clock):
        catalog = Catalog(storage, lease_s=10.0, clock=clock)
        options = SaveOptions(checkpoint_prefix=prefix, incremental=True, overwrite=overwrite)
        announced = announce(catalog, options, last)
        with announced.attempt as attempt:
            base = announced.base
            if base is not None and "x" in base.record.tensors:
                borrowed = Borrowed(base, prefix=prefix, first=0)
                placement = borrowed.placement("x")
                theirs = base.record.tensors["x"]
                tensors = {"x": msgspec.structs.replace(theirs, placement=placement)}
                files = borrowed.files
            else:
                files, tensors = write_leaves(
                    storage,
                    attempt,
                    {"x": X},
                    level=CompressionLevel.NONE,
                    tick=lambda _: None,
                    retry=lambda write: write(),
                )
            tree = encode_value({"x": LeafRef(kind="array", name="x"), "n": number})
            record = record_of(attempt, Facts(), tree=tree, files=files, tensors=tensors)
            catalog.commit(attempt, record)
        return None if base is None else base.prefix

    return act


def delete(prefix):
    return lambda storage, clock: Catalog(storage).delete(prefix)


def replace(prefix):
    def act(storage, clock):
        catalog = Catalog(storage, lease_s=10.0, clock=clock)
        catalog.write(prefix, {"n": 7, "x": X}, overwrite=True)

    return act


def collect(storage, clock):
    Catalog(storage).gc()
    Catalog(storage).gc()


ACTORS = {
    "saver": save_incrementally("new", 3, "base"),
    "second saver": save_incrementally("newer", 4, None),
    "deleter of base": delete("base"),
    "deleter of root": delete("root"),
    "deleter of new": delete("new"),
    "roller": lambda storage, clock: Catalog(storage).rollback("base"),
    "replacer": replace("base"),
    "referring replacer": save_incrementally("base", 5, "root", overwrite=True),
    "gc": collect,
    "second gc": collect,
}
SETS = [
    ("saver", "deleter of base"),
    ("saver", "deleter of base", "deleter of root"),
    ("saver", "deleter of base", "deleter of root", "gc"),
    ("saver", "deleter of root", "roller", "gc"),
    ("saver", "replacer", "deleter of root", "gc"),
    ("saver", "second saver", "deleter of base", "deleter of root"),
    ("saver", "second saver", "deleter of new", "deleter of root", "gc"),
    ("saver", "deleter of base", "gc", "second gc"),
    ("saver", "referring replacer", "deleter of base", "deleter of root"),
]


def explore(seed):
    """One schedule; ``base`` has a file of its own, or refers to that of ``root``."""
    world = World(seed)
    clean = Catalog(world.storage, clock=world.clock)
    clean.write("root", {"n": 1, "x": X})
    if seed % 2:
        save_incrementally("base", 2, "root")(world.storage, world.clock)
    else:
        clean.write("base", {"n": 2, "x": X})
    names = SETS[(seed // 2) % len(SETS)]
    world.run({name: ACTORS[name] for name in names})
    check(world, clean)
    listed = {info.prefix for info in clean.list()}
    for _ in range(4):
        clean.gc()
        world.clock.advance(WEEKS_S)
    assert {info.prefix for info in clean.list()} == listed
    check(world, clean)
    # A tombstone stays beside files that are still referred to.
    assert [key for key in leftovers(world.storage) if not key.endswith("/metadata.json")] == []
    saver = world.actors["saver"]
    return "failed" if saver.error is not None else str(saver.result)


def check(world, clean):
    listed = {info.prefix for info in clean.list()}
    for prefix in listed:
        report = clean.verify(prefix)
        assert report.is_intact, report.damage
        assert np.array_equal(clean.read(prefix)["x"], X)
    saver = world.actors["saver"]
    if saver.error is None and "deleter of new" not in world.actors:
        assert "new" in listed
    if isinstance(saver.error, SaveError) and "nothing was" in str(saver.error):
        assert "new" not in listed


def test_whatever_the_order_of_calls_what_is_referred_to_stays():
    outcomes = Counter()
    for seed in range(SEED, SEED + 400):
        try:
            outcomes[explore(seed)] += 1
        except BaseException as error:
            error.add_note(f"HOLDFAST_SCHEDULE_SEED={seed} repeats this schedule")
            raise
    assert outcomes["base"] > 40, outcomes
    assert outcomes["root"] > 10, outcomes
    assert outcomes["None"] > 10, outcomes


def test_the_intent_names_every_folder_that_the_base_has_files_in_though_it_is_replaced():
    storage = MemoryStorage()
    for prefix in ("root", "base"):
        Catalog(storage).write(prefix, {"n": 1, "x": X})
    refer_to_root = save_incrementally("base", 2, "root", overwrite=True)
    once = iter([1])

    def before(method, key):
        if method == "create" and "new/intent-" in key and next(once, None):
            refer_to_root(storage, SystemClock())

    catalog = Catalog(Observed(storage, before))
    options = SaveOptions(checkpoint_prefix="new", incremental=True)
    announced = announce(catalog, options, "base")
    assert next(once, None) is None
    assert [file.prefix for file in announced.base.record.files] == ["root"]
    assert announced.attempt.intent.refers == ("root",)
    (intent,) = storage.list("new/")
    assert intent.key == announced.attempt.intent.key
