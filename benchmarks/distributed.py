"""Checkpoints of a model and its Adam state: holdfast beside the bare disk and torch's DCP.

Saving, cold and warm loading on 1 and 2 ranks, loading on another number of ranks, and memory. A
time begins when every rank waits for its next call, and ends when the slowest is done; process
group, coordinator and tensors are there before, old files are gone. What is saved is durable, what
is loaded was dropped from the page cache, or is in it, as in ``storage.py``.

The bare disk is given the same bytes by the same number of processes, by 1, 2 or 4 threads in each
with direct I/O. DCP writes with 1, 2 or 4 threads. The best of the three, by its median in this
run, is compared with. Of DCP's other settings the defaults are kept: a small
trial (256 MiB, one rank, a busy machine) found nothing that saved faster and was durable, and none
that clearly loaded faster. It is handed its dict of tensors ready-made and fills the model's own
tensors, so ``get_state_dict`` and ``set_state_dict`` cost it nothing.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from _disk import RAW, cold, in_folder
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
from _peers import DCP, DCP_DEFAULT, HOLDFAST
from _ranks import IN_PLACE, bytes_read, check, peak_of, read, set_up, write
from holdfast.catalog import Catalog
from holdfast.cli._bench_disk import take_into_cache
from holdfast.testing import RankGang

T = TypeVar("T")

STATE_BYTES = 2048 * MIB
RESHARDED_BYTES = 1024 * MIB
REPEATS = 5
CALL_S = 600.0
EXTRA_MEMORY_MIB = 128


def measure(extent: Extent = FULL) -> list[Measurement]:
    found: list[Measurement] = []
    for ranks in (1, 2):
        found += in_folder(partial(end_to_end, extent, ranks=ranks))
    for before, after in ((4, 2), (2, 4)):
        found += in_folder(partial(resharding, extent, before=before, after=after))
    for ranks in (1, 2):
        found += in_folder(partial(memory, extent, ranks=ranks))
    return found


def end_to_end(extent: Extent, folder: Path, *, ranks: int) -> list[Measurement]:
    names = [*RAW, HOLDFAST, *DCP]
    repeats = extent.repeats(REPEATS)
    with RankGang(ranks) as gang:
        size = sum(on_ranks(gang, set_up, folder, extent.of(STATE_BYTES)))
        for name in names:
            on_ranks(gang, write, name)
        written = interleaved(
            {name: partial(on_ranks, gang, write, name) for name in names},
            repeats=repeats,
            prepare=partial(empty, folder),
        )
        loads = {name: partial(on_ranks, gang, read, name) for name in (*names, IN_PLACE)}
        read_back = interleaved(loads, repeats=repeats, prepare=lambda _: cold(folder))
        for name in (HOLDFAST, IN_PLACE, *DCP):
            on_ranks(gang, check, name)
        again = interleaved(
            {name: loads[name] for name in (HOLDFAST, IN_PLACE, *DCP)},
            repeats=repeats,
            prepare=lambda name: take_into_cache(folder / (HOLDFAST if name == IN_PLACE else name)),
        )
    where = f"on {ranks} rank{'s' * (ranks > 1)}"
    return [
        _of_the_disk(f"save {where}", written),
        *_against_dcp(f"save {where}", written, 1),
        *_speeds(f"save {where}", written, size),
        _of_the_disk(f"cold load {where}", read_back),
        *_against_dcp(f"cold load {where}", read_back, 3),
        *_speeds(f"cold load {where}", read_back, size),
        *_in_place(f"cold load {where}", read_back),
        *_against_dcp(f"warm load {where}", again, 1),
        *_speeds(f"warm load {where}", again, size),
        *_in_place(f"warm load {where}", again),
        # What a loader that is as fast as the disk would reach: the target may lie beyond it.
        told(
            f"cold load {where}, bare disk, times as fast as DCP",
            ratios(
                read_back[fastest(read_back, tuple(DCP))], read_back[fastest(read_back, tuple(RAW))]
            ),
            "x",
        ),
    ]


def resharding(extent: Extent, folder: Path, *, before: int, after: int) -> list[Measurement]:
    names = [HOLDFAST, *DCP]
    with RankGang(before) as gang:
        on_ranks(gang, set_up, folder, extent.of(RESHARDED_BYTES))
        for name in names:
            on_ranks(gang, write, name)
    with RankGang(after) as gang:
        needed = sum(on_ranks(gang, set_up, folder, extent.of(RESHARDED_BYTES)))
        for name in names:
            on_ranks(gang, check, name)
        read_back = interleaved(
            {name: partial(on_ranks, gang, read, name) for name in names},
            repeats=extent.repeats(REPEATS),
            prepare=lambda _: cold(folder),
        )
        share = sum(on_ranks(gang, bytes_read, folder)) / needed
    if share < 0.99:
        raise AssertionError(f"only {share:.0%} of the bytes were counted: reads went another way")
    where = f"cold load on {after} ranks of what {before} saved"
    return [
        at_most(f"{where}, bytes read for each needed", [share], "x", 1.05),
        *_against_dcp(where, read_back, 2),
        *_speeds(where, read_back, needed),
    ]


def memory(extent: Extent, folder: Path, *, ranks: int) -> list[Measurement]:
    """The worst rank's peak over what it held before, saving and loading in processes of their
    own. A load may stage one copy of what it loads, so that is taken off; DCP stages none."""
    found = []
    for verb, work, staged in (("save", write, 0), ("load", read, 1)):
        for name in (HOLDFAST, DCP_DEFAULT):
            with RankGang(ranks) as gang:
                parts = on_ranks(gang, set_up, folder, extent.of(STATE_BYTES))
                peaks = on_ranks(gang, peak_of, work, name)
            where = f"{ranks} rank{'s' * (ranks > 1)}"
            if name == DCP_DEFAULT:
                found.append(
                    told(f"extra memory of a {verb}, {where}, DCP", [max(peaks) / MIB], "MiB")
                )
                continue
            extra = [(peak - staged * part) / MIB for peak, part in zip(peaks, parts, strict=True)]
            what = f"extra memory of a {verb}{' beyond one staged copy' * staged}, {where}"
            found.append(at_most(what, [max(extra)], "MiB", EXTRA_MEMORY_MIB))
    return found


def on_ranks(gang: RankGang, function: Callable[..., T], *args: Any, **kwargs: Any) -> list[T]:
    """``gang.run``, with time for a slow disk."""
    gang.start(function, *args, **kwargs)
    outcomes = gang.outcomes(CALL_S)
    for outcome in outcomes:
        if (error := outcome.failure()) is not None:
            raise error
    return [outcome.value for outcome in outcomes]


def empty(folder: Path, name: str) -> None:
    """Remove what the candidate wrote."""
    if name == HOLDFAST:
        Catalog(folder / name).rollback("a")
    else:
        shutil.rmtree(folder / name)
        (folder / name).mkdir()
    os.sync()


def _of_the_disk(what: str, seconds: Mapping[str, list[float]]) -> Measurement:
    pairs = ratios(seconds[fastest(seconds, tuple(RAW))], seconds[HOLDFAST])
    return at_least(f"{what}, of the bare disk's speed", pairs, "x", 0.8)


def _against_dcp(what: str, seconds: Mapping[str, list[float]], least: float) -> list[Measurement]:
    best = ratios(seconds[fastest(seconds, tuple(DCP))], seconds[HOLDFAST])
    plain = ratios(seconds[DCP_DEFAULT], seconds[HOLDFAST])
    return [
        at_least(
            f"{what}, times as fast as DCP",
            best,
            "x",
            least,
            place=Place(chart=what, series="DCP at its best"),
        ),
        told(
            f"{what}, times as fast as DCP at its defaults",
            plain,
            "x",
            place=Place(chart=what, series="DCP at its defaults"),
        ),
    ]


def _in_place(what: str, seconds: Mapping[str, list[float]]) -> list[Measurement]:
    """Beside who loads as DCP does: not all or nothing."""
    best = ratios(seconds[fastest(seconds, tuple(DCP))], seconds[IN_PLACE])
    found = [told(f"{what}, in place, times as fast as DCP", best, "x")]
    if RAW.keys() <= seconds.keys():
        pairs = ratios(seconds[fastest(seconds, tuple(RAW))], seconds[IN_PLACE])
        found.append(told(f"{what}, in place, of the bare disk's speed", pairs, "x"))
    return found


def _speeds(what: str, seconds: Mapping[str, list[float]], size_bytes: int) -> list[Measurement]:
    groups = [group for group in (RAW, DCP) if group.keys() <= seconds.keys()]
    return [
        told(f"{what}, {name}", [size_bytes / taken / 1e9 for taken in seconds[name]], "GB/s")
        for name in (HOLDFAST, *(fastest(seconds, tuple(group)) for group in groups))
    ]
