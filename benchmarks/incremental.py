"""Saving a state of which a part has changed since the last save, with ``incremental=True``.

1000 MiB in 100 tensors, of which 1, 10 or all 100 change before each save. Beside it, holdfast and
its peers save all of it; everything is timed until it is durable. What an incremental save stores
is what its folder holds. It reads and digests all tensors, so it is never free.
"""

import os
from functools import partial
from pathlib import Path

import torch

import holdfast
from _disk import in_folder
from _measure import (
    FULL,
    MIB,
    Extent,
    Measurement,
    Place,
    at_least,
    at_most,
    fastest,
    interleaved,
    ratios,
    told,
)
from _peers import DCP, HOLDFAST, SAFETENSORS, TORCH, check, way
from scaling import random_tensors

LEAVES = 100
LEAF_BYTES = 10 * MIB
CHANGED = (1, 10, 100)
REPEATS = 5
INCREMENTAL = "incremental"


def measure(extent: Extent = FULL) -> list[Measurement]:
    return [
        each
        for changed in CHANGED
        for each in in_folder(partial(_changing, extent, changed=changed))
    ]


def _changing(extent: Extent, folder: Path, *, changed: int) -> list[Measurement]:
    state = random_tensors(LEAVES, extent.of(LEAF_BYTES))
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    whole = {name: way(name, folder, state, into) for name in (HOLDFAST, TORCH, SAFETENSORS, *DCP)}
    prefixes: list[Path] = []

    def save() -> None:
        prefixes.append(folder / INCREMENTAL / f"step_{len(prefixes)}")
        holdfast.save(state, prefixes[-1], incremental=True)

    def prepare(name: str) -> None:
        """As a step would: what has changed is other tensors each time, and none as it ever was."""
        if name == INCREMENTAL:
            first = changed * len(prefixes)
            for n in range(first, first + changed):
                state[f"leaf{n % LEAVES}"].add_(1.0)
            os.sync()
        else:
            whole[name].clear()

    save()
    for each in whole.values():
        each.save()
    seconds = interleaved(
        {INCREMENTAL: save, **{name: each.save for name, each in whole.items()}},
        repeats=extent.repeats(REPEATS),
        prepare=prepare,
    )
    check(INCREMENTAL, lambda: holdfast.load(prefixes[-1], into=into), state, into)
    stored = [_size(prefix) / MIB for prefix in prefixes[1:]]
    new = changed * extent.of(LEAF_BYTES) / MIB
    what = f"{changed} % changed, incremental"
    peers = {
        "a whole save": HOLDFAST,
        TORCH: TORCH,
        SAFETENSORS: SAFETENSORS,
        "DCP at its best": fastest(seconds, tuple(DCP)),
    }
    pairs = {label: ratios(seconds[name], seconds[INCREMENTAL]) for label, name in peers.items()}
    places = {label: Place(chart=f"save, {changed} % changed", series=label) for label in peers}
    return [
        at_most(
            f"{what}: stored beyond 1.05 of what changed",
            [each - 1.05 * new for each in stored],
            "MiB",
            1,
        ),
        *(
            told(f"{what}: times as fast as {label}", pairs[label], "x", place=places[label])
            if label == "a whole save"
            else at_least(
                f"{what}: times as fast as {label}", pairs[label], "x", 1, place=places[label]
            )
            for label in peers
        ),
        told(f"{what}: stored", stored, "MiB"),
        told(f"{what}: time", seconds[INCREMENTAL], "s"),
    ]


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
