"""``save_async`` while a GPT trains: what the training notices, beside DCP's ``async_save``.

A model and its AdamW state of 1 GiB on one rank, and of half of that on two ranks under DDP; real
steps. How long the training thread is held up is measured from outside: the call, and the time
between two hooks of torch's optimizers around holdfast's. What DCP makes it wait for is added to
its call likewise. It is compared with a plain copy of the state in the same loop, into memory that
is there.

- Long steps: forward and backward outlast the copy in the background. Short steps may not. A save
  that begins just before the optimizer steps is the worst case: that waits for all of the copy.
  With a quarter of the memory it waits for the writer, too.
- Ten steps with a save begun before the first, beside none, beside a process that writes as many
  bytes with direct I/O or by ``holdfast.save``, and beside DCP.
- One number in a hundred learns, saved with ``incremental=True``: the bytes in the folder.
- The process's memory after 50 saves.

``python benchmarks/saving_async.py --quick`` tries it all on a small model, whose numbers mean
nothing; names of parts (stall, ranks, loop, low-rank, memory) leave out the others.
"""

import argparse
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from _disk import in_folder
from _measure import FULL, MIB, QUICK, Extent, Measurement, Place, at_most, told
from _report import as_lines
from _savers import BESIDE, DCP
from _saving_jobs import Held, held_up, loops, low_rank, memory, set_up, tear_down
from _training import Batch, Shape
from distributed import on_ranks
from holdfast.testing import RankGang

ASYNC = "holdfast"
QUARTER = "holdfast, a quarter of the memory"
WRITER = "a process that writes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured."""

    shape: Shape
    half: Shape
    long: Batch
    short: Batch
    loop: Batch
    repeats: int
    steps: int
    saves: tuple[int, int]
    low_rank: tuple[int, int]


IN_EARNEST = Plan(
    shape=Shape(width=1024, layers=7, tokens=4096),  # 1.07 GiB of state
    half=Shape(width=1024, layers=3, tokens=4096),
    long=(4, 128),
    short=(1, 8),
    loop=(2, 128),
    repeats=3,
    steps=10,
    saves=(3, 50),
    low_rank=(2048, 64),  # 1 GiB of model
)
SMALL = Plan(
    shape=Shape(width=256, layers=10, tokens=1024),
    half=Shape(width=256, layers=3, tokens=1024),
    long=(4, 128),
    short=(1, 8),
    loop=(2, 128),
    repeats=2,
    steps=10,
    saves=(2, 5),
    low_rank=(512, 8),
)


def measure(extent: Extent = FULL, parts: Sequence[str] = ()) -> list[Measurement]:
    plan = IN_EARNEST if extent == FULL else replace(SMALL, repeats=extent.repeats(SMALL.repeats))
    return [each for name in parts or PARTS for each in in_folder(partial(PARTS[name], plan=plan))]


def stall(folder: Path, plan: Plan) -> list[Measurement]:
    """On one rank."""
    with RankGang(1) as gang:
        size = on_ranks(gang, set_up, folder, plan.shape)[0]
        names = ("copy", ASYNC, *DCP)
        long = _worst(on_ranks(gang, held_up, names, plan.long, plan.repeats))
        own = ("copy", ASYNC)  # DCP's call takes as long, whatever the steps
        short = _worst(on_ranks(gang, held_up, own, plan.short, plan.repeats))
        late = _worst(on_ranks(gang, held_up, own, plan.short, plan.repeats, late=True))
        quarter = _worst(on_ranks(gang, held_up, (QUARTER,), plan.short, plan.repeats, late=True))
        on_ranks(gang, tear_down)
    what = f"{size / 2**30:.2f} GiB"
    waits = quarter.saves[QUARTER]
    known = [(each.wait_s, each.predicted_s) for each in waits if each.predicted_s]
    return [
        *_long(f"{what}, long steps", long),
        *_short(f"{what}, short steps", short),
        *_short(f"{what}, begun late", late),
        at_most(
            f"{what}, a quarter of the memory: wait, off what was predicted",
            [abs(wait_s / predicted_s - 1) for wait_s, predicted_s in known] or [math.inf],
            "x",
            0.2,
        ),
        told(f"{what}, a quarter of the memory: wait", [each.wait_s for each in waits], "s"),
        told(
            f"{what}, a quarter of the memory: predicted",
            [each.predicted_s or 0.0 for each in waits],
            "s",
        ),
    ]


def ranks(folder: Path, plan: Plan) -> list[Measurement]:
    """Two of them under DDP. Each writes its part of what both hold, which is what is compared."""
    with RankGang(2) as gang:
        size = on_ranks(gang, set_up, folder, plan.half)[0]
        names = ("copy", ASYNC, DCP[0], DCP[1], DCP[2])
        long = _worst(on_ranks(gang, held_up, names, plan.long, plan.repeats))
        short = _worst(on_ranks(gang, held_up, names, plan.short, plan.repeats))
        late = _worst(on_ranks(gang, held_up, names, plan.short, plan.repeats, late=True))
        on_ranks(gang, tear_down)
    what = f"{size / 2**30:.2f} GiB, DDP on 2 ranks"
    return [
        *_long(f"{what}, long steps", long),
        *_short(f"{what}, short steps", short),
        *_short(f"{what}, begun late", late),
    ]


def loop(folder: Path, plan: Plan) -> list[Measurement]:
    names = ("nothing", ASYNC, *BESIDE, DCP[0], DCP[2])
    with RankGang(1) as gang:
        on_ranks(gang, set_up, folder, plan.shape)
        (found,) = on_ranks(gang, loops, names, plan.loop, plan.steps, plan.repeats)
        on_ranks(gang, tear_down)
    none = found["nothing"]

    def slower(name: str, than: str = "nothing") -> list[float]:
        """Of the same repeat, so that a slow minute is on both sides."""
        pairs = zip(found[name], found[than], none, strict=True)
        return [(mine - theirs) / plain for mine, theirs, plain in pairs]

    what = f"{plan.steps} steps with a save"
    return [
        at_most(
            f"{what}, slower than beside {WRITER}", slower(ASYNC, WRITER), "of the steps", 0.05
        ),
        *(
            told(
                f"{what}, slower, {name}",
                slower(name),
                "of the steps",
                place=Place(chart=f"{what}: how much slower", series=name),
            )
            for name in names[1:]
        ),
        told(f"{plan.steps} steps without one", none, "s"),
    ]


def low_rank_saves(folder: Path, plan: Plan) -> list[Measurement]:
    with RankGang(1) as gang:
        (found,) = on_ranks(gang, low_rank, folder, *plan.low_rank, 5)
    what = "1 % learns, incremental"
    beyond = [(stored - 1.05 * changed) / MIB for changed, stored, _ in found]
    return [
        at_most(f"{what}: bytes stored beyond 1.05 of those that changed", beyond, "MiB", 1),
        told(f"{what}: stored", [stored / MIB for _, stored, _ in found], "MiB"),
        told(f"{what}: changed", [changed / MIB for changed, _, _ in found], "MiB"),
        told(f"{what}: written, as the record says", [said / MIB for _, _, said in found], "MiB"),
    ]


def memory_over_saves(folder: Path, plan: Plan) -> list[Measurement]:
    """Of several saves in a row the median: how much of the pool and of the training's own memory
    is in use differs from one moment to the next by more than what is looked for."""
    early, late = plan.saves
    with RankGang(1) as gang:
        on_ranks(gang, set_up, folder, plan.shape)
        (resident,) = on_ranks(gang, memory, plan.short, late)
    count = min(10, late - early)
    before, after = resident[early - 1 :][:count], resident[-count:]
    return [
        at_most(
            f"memory after {late} saves, over that after {early}",
            [(statistics.median(after) - statistics.median(before)) / MIB],
            "MiB",
            64,
        ),
        told(f"memory after {early} saves", [each / MIB for each in before], "MiB"),
        told(f"memory after {late} saves", [each / MIB for each in after], "MiB"),
    ]


PARTS: Mapping[str, Callable[..., list[Measurement]]] = {
    "stall": stall,
    "ranks": ranks,
    "loop": loop,
    "low-rank": low_rank_saves,
    "memory": memory_over_saves,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """By repeat, of the rank that took longest: a plain copy, and each way to save."""

    copies: list[float]
    saves: dict[str, list[Held]]


def _worst(by_rank: Sequence[Mapping[str, Sequence[Held | float]]]) -> Found:
    saves: dict[str, list[Held]] = {}
    copies: list[float] = []
    for name in by_rank[0]:
        for turn in zip(*(each[name] for each in by_rank), strict=True):
            held = [each for each in turn if isinstance(each, Held)]
            if held:
                saves.setdefault(name, []).append(max(held, key=lambda each: each.total_s))
            else:
                copies.append(max(each for each in turn if isinstance(each, float)))
    return Found(copies=copies, saves=saves)


def _long(what: str, found: Found) -> list[Measurement]:
    ours = found.saves[ASYNC]
    pairs = list(zip(ours, _copies(found), strict=True))
    beyond = [1000 * (held.total_s - 0.05 * copy) for held, copy in pairs]
    return [
        at_most(f"{what}: held up, beyond 0.05 of a copy", beyond, "ms", 10),
        *_all(what, found),
        told(
            f"{what}: forward and backward, of the copy in the background",
            [held.compute_s / (held.copy_s or 1.0) for held in ours],
            "x",
        ),
    ]


def _short(what: str, found: Found) -> list[Measurement]:
    ours = found.saves[ASYNC]
    pairs = list(zip(ours, _copies(found), strict=True))
    shares = [held.total_s / copy for held, copy in pairs]
    return [at_most(f"{what}: held up, of a copy", shares, "x", 1.1), *_all(what, found)]


def _copies(found: Found) -> list[float]:
    """A plain copy of what the rank writes."""
    pairs = zip(found.copies, found.saves[ASYNC], strict=True)
    return [copy * held.share for copy, held in pairs]


def _all(what: str, found: Found) -> list[Measurement]:
    """What every way to save did, for the reader to compare."""
    ours = found.saves[ASYNC]
    shown = [
        told(
            f"{what}: held up, {name}",
            [1000 * each.total_s for each in saves],
            "ms",
            place=Place(chart=what, series=name),
        )
        for name, saves in found.saves.items()
    ]
    said = [1000 * (each.said_s or 0.0) for each in ours]
    return [
        *shown,
        told(f"{what}: held up, as holdfast's record says", said, "ms"),
        told(f"{what}: a plain copy", [1000 * copy for copy in _copies(found)], "ms"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Try this benchmark; run.py runs it in earnest.")
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of: {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="a small model, few repeats")
    given = parser.parse_args()
    unknown = sorted(set(given.parts) - PARTS.keys())
    if unknown:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    found = measure(QUICK if given.quick else FULL, given.parts)
    print("\n".join(as_lines({"saving_async": found})))


if __name__ == "__main__":
    main()
