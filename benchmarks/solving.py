"""What it takes to choose a schedule for 100 blocks, all linked, with six options each.

``alike`` blocks have the same numbers, as in a transformer; ``uneven`` ones all differ, which is
the hard case: no slot divides their sizes. Memory is counted in 2,000 slots at most. Timed is all
of ``solve``, the simulation of what it found included, as processor time: it runs on one core and
waits for nothing, so what lies above the least of a few repeats is another process'. Memory is
the peak of what Python and NumPy allocate.
"""

import functools
import random
import time
import tracemalloc
from collections.abc import Callable

from _measure import FULL, MIB, Extent, Measurement, at_most, told
from holdfast.activation._solving.chain import Chain, Option, Stage
from holdfast.activation._solving.schedule import Schedule
from holdfast.activation._solving.simulating import simulate
from holdfast.activation._solving.solving import Solution, curve, solve

BLOCKS = 100
SLOTS = 2000
REPEATS = 5
SECONDS = 1.0
MEBIBYTES = 200.0
KEPT = ((17, 0.0), (14, 0.01), (11, 0.03), (9, 0.08), (8, 0.15), (5, 0.5))


def block(index: int, size: int, forward_s: float) -> Stage:
    return Stage(
        name=f"blocks.{index}",
        options=tuple(
            Option(
                label="recipes" if share else "keep",
                kept_bytes=times * size,
                extra_s=share * forward_s,
                backward_bytes=20 * size,
            )
            for times, share in KEPT
        ),
        input_bytes=size,
        output_bytes=size,
        forward_s=forward_s,
        forward_bytes=19 * size,
        replayed_bytes=21 * size,
        replayable=True,
        linked=True,
    )


def alike() -> Chain:
    stages = tuple(block(index, MIB, 0.01) for index in range(BLOCKS))
    return Chain(stages=stages, base_bytes=3 * MIB, head_bytes=30 * MIB)


def uneven() -> Chain:
    rng = random.Random(0)
    stages = tuple(
        block(index, rng.randrange(MIB // 2, 2 * MIB), rng.uniform(0.005, 0.02))
        for index in range(BLOCKS)
    )
    return Chain(stages=stages, base_bytes=3 * MIB, head_bytes=30 * MIB)


def measure(extent: Extent = FULL) -> list[Measurement]:
    found = []
    repeats = extent.repeats(REPEATS)
    for name, chain in {"alike": alike(), "uneven": uneven()}.items():
        everything = simulate(chain, Schedule(choices=(0,) * BLOCKS)).peak_bytes
        for share in (0.5, 0.25, 0.1):
            found += _solving(chain, int(everything * share), f"{name}, {share:.0%}", repeats)
        seconds = [_seconds(functools.partial(curve, chain, slots=SLOTS)) for _ in range(repeats)]
        found.append(told(f"{BLOCKS} blocks, {name}: the whole curve", [min(seconds)], "s"))
    return found


def _solving(chain: Chain, budget_bytes: int, name: str, repeats: int) -> list[Measurement]:
    def call() -> Solution:
        solved = solve(chain, budget_bytes, slots=SLOTS)
        if not isinstance(solved, Solution):
            raise TypeError(f"{name}: {solved}")
        return solved

    seconds = [_seconds(call) for _ in range(repeats)]
    tracemalloc.start()
    solved = call()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    what = f"{BLOCKS} blocks x {SLOTS} slots, {name} of everything"
    forwards = solved.extra_s / sum(stage.forward_s for stage in chain.stages)
    return [
        at_most(f"{what}: processor time", [min(seconds)], "s", SECONDS),
        at_most(f"{what}: memory", [peak / MIB], "MiB", MEBIBYTES),
        told(f"{what}: recomputed", [forwards], "forwards"),
        told(f"{what}: rounding bound", [100 * solved.rounding_bytes / budget_bytes], "%"),
    ]


def _seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start
