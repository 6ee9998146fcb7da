"""torch.distributed.checkpoint through holdfast's storage and through its own, in one run.

The same calls, ``dcp.save`` and ``dcp.load``, of the same model and Adam state, once with
``HoldfastWriter`` and ``HoldfastReader`` and once with ``FileSystemWriter`` and
``FileSystemReader``, on 1 and on 2 ranks. Both are durable when they return: ``sync_files`` is on.
A load is cold, dropped from the page cache, or warm, in it; both fill the state's own tensors.
DCP writes with 1, 2 or 4 threads, and the best of the three, by its median in this run, is compared
with. Beside cold loads the bare disk is read, too, by every rank on 1, 2 or 4 threads. Times begin
when every rank waits for its next call, and end when the slowest is done.
"""

import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from _disk import RAW, cold, in_folder, raw_read, raw_write
from _measure import (
    FULL,
    MIB,
    Extent,
    Measurement,
    Place,
    at_least,
    fastest,
    interleaved,
    ratios,
    told,
)
from _peers import DCP, HOLDFAST
from _ranks import Training
from distributed import on_ranks
from holdfast.cli._bench_disk import take_into_cache
from holdfast.integrations.dcp import HoldfastReader, HoldfastWriter
from holdfast.testing import RankGang

STATE_BYTES = 2048 * MIB
SMALL_TENSORS = 10_000
REPEATS = 5
REPEATS_OF_SMALL = 3

SAVE_TIMES = 1.2
LOAD_TIMES = 2.0


def measure(extent: Extent = FULL) -> list[Measurement]:
    found: list[Measurement] = []
    for ranks in (1, 2):
        found += in_folder(partial(compared, extent, ranks=ranks, small=None))
    small = extent.of(SMALL_TENSORS)
    return [*found, *in_folder(partial(compared, extent, ranks=1, small=small))]


def compared(extent: Extent, folder: Path, *, ranks: int, small: int | None) -> list[Measurement]:
    """``small`` is how many tensors of 1 KiB there are, instead of a training's."""
    names = [HOLDFAST, *DCP]
    repeats = extent.repeats(REPEATS_OF_SMALL if small else REPEATS)
    with RankGang(ranks) as gang:
        size = sum(on_ranks(gang, set_up, folder, extent.of(STATE_BYTES), small=small))
        for name in names:
            on_ranks(gang, save, name)
        saved = interleaved(
            {name: partial(on_ranks, gang, save, name) for name in names},
            repeats=repeats,
            prepare=partial(empty, folder),
        )
        loads: dict[str, Callable[[], object]] = {
            name: partial(on_ranks, gang, load, name) for name in names
        }
        bare: dict[str, Callable[[], object]] = {}
        if not small:
            on_ranks(gang, bare_write)
            bare = {name: partial(on_ranks, gang, bare_read, name) for name in RAW}
        from_disk = interleaved({**bare, **loads}, repeats=repeats, prepare=lambda _: cold(folder))
        for name in names:
            on_ranks(gang, check, name)
        from_cache = interleaved(
            loads, repeats=repeats, prepare=lambda name: take_into_cache(folder / name)
        )
    what = f"{small:,} tensors of 1 KiB" if small else f"{ranks} rank{'s' * (ranks > 1)}"
    found: list[Measurement] = []
    if bare:
        pairs = ratios(from_disk[fastest(from_disk, tuple(RAW))], from_disk[HOLDFAST])
        found.append(told(f"dcp cold load, {what}, of the bare disk's speed", pairs, "x"))
        # What a reader that is as fast as the disk would reach: the target may lie beyond it.
        best = ratios(
            from_disk[fastest(from_disk, tuple(DCP))], from_disk[fastest(from_disk, tuple(RAW))]
        )
        found.append(told(f"dcp cold load, {what}, bare disk, times as fast as DCP", best, "x"))
    for verb, seconds, least in (
        ("save", saved, SAVE_TIMES),
        ("cold load", from_disk, LOAD_TIMES),
        ("warm load", from_cache, LOAD_TIMES),
    ):
        found += _told(f"dcp {verb}, {what}", seconds, least, None if small else size)
    return found


class Here:
    """What a rank holds between calls: one state to save, one to load into."""

    def __init__(self, folder: Path, states: Sequence[dict[str, Any]], *, alone: bool) -> None:
        self.saved, self.into = states
        self.folder = folder
        self.alone = alone


HERE: list[Here] = []  # in a rank's process, where each call is a function of its own


def set_up(rank: int, folder: Path, size_bytes: int, *, small: int | None) -> int:
    """Returns how many bytes are this rank's."""
    ranks = torch.distributed.get_world_size()
    states = [
        _small(seed, small) if small else Training(size_bytes, ranks=ranks, seed=seed).tensors()
        for seed in (1, 2)
    ]
    HERE.append(Here(folder, states, alone=ranks == 1))
    return sum(tensor.nbytes for tensor in _local(states[0]))


def save(rank: int, name: str) -> None:
    here = HERE[0]
    path = here.folder / name / "a"
    writer = (
        HoldfastWriter(path)
        if name == HOLDFAST
        else dcp.FileSystemWriter(path, thread_count=DCP[name])
    )
    dcp.save(dict(here.saved), storage_writer=writer, no_dist=here.alone)


def load(rank: int, name: str) -> None:
    here = HERE[0]
    path = here.folder / name / "a"
    reader = HoldfastReader(path) if name == HOLDFAST else dcp.FileSystemReader(path)
    dcp.load(dict(here.into), storage_reader=reader, no_dist=here.alone)


def bare_write(rank: int) -> None:
    """As many bytes as this rank loads, in a file of its own."""
    here = HERE[0]
    raw_write(here.folder / f"bare-{rank}", sum(each.nbytes for each in _local(here.saved)), 2)


def bare_read(rank: int, name: str) -> None:
    raw_read(HERE[0].folder / f"bare-{rank}", RAW[name])


def check(rank: int, name: str) -> None:
    here = HERE[0]
    for tensor in _local(here.into):
        tensor.zero_()
    load(rank, name)
    pairs = zip(_local(here.into), _local(here.saved), strict=True)
    if not all(torch.equal(loaded, saved) for loaded, saved in pairs):
        raise AssertionError(f"{name} did not load what it saved")


def empty(folder: Path, name: str) -> None:
    """Remove what the candidate wrote."""
    shutil.rmtree(folder / name)
    os.sync()


def _small(seed: int, count: int) -> dict[str, Any]:
    random = torch.Generator().manual_seed(seed)
    return {"model": {f"leaf{n}": torch.rand(256, generator=random) for n in range(count)}}


def _local(state: Any) -> list[Any]:
    if isinstance(state, dict):
        return [tensor for each in state.values() for tensor in _local(each)]
    return [state.to_local() if hasattr(state, "to_local") else state]


def _told(
    what: str, seconds: dict[str, list[float]], least: float, size_bytes: int | None
) -> list[Measurement]:
    """How many times as fast; and the speeds of both, or without a size their times."""
    peer = fastest(seconds, tuple(DCP))
    return [
        at_least(
            f"{what}, times as fast as DCP's own storage",
            ratios(seconds[peer], seconds[HOLDFAST]),
            "x",
            least,
            place=Place(chart=what, series="DCP's own storage"),
        ),
        *(
            told(f"{what}, {name}", seconds[name], "s")
            if size_bytes is None
            else told(
                f"{what}, {name}", [size_bytes / taken / 1e9 for taken in seconds[name]], "GB/s"
            )
            for name in (HOLDFAST, peer)
        ),
    ]
