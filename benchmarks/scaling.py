"""How the cost of a checkpoint grows: with its bytes, with its tensors, and with the ranks.

- Bytes: 64 MiB to 4 GiB in tensors of 16 MiB. Tensors: 10 to 100,000 of 1 KiB. Saved until they are
  durable and loaded into tensors that are there, from a cold cache and up to 1 GiB also from a warm
  one, by one process: holdfast, torch.save, safetensors and DCP, at its defaults and at the best of
  1, 2 and 4 threads, take turns; Orbax, too, where it is installed, up to 1 GiB: it takes memory
  for two more copies of what it saves. Where a round of saves takes longer than ``PATIENCE_S``
  there are fewer, and where DCP alone does, it keeps to its defaults.
- Ranks: 1 to 8,192 simulated ones, with 1,000 tensors that all of them share (FSDP2). Timed is what
  rank 0 does with what the others sent: decode, plan, and encode the record. DCP's rank 0 gets as
  many plans and results, decodes, plans and writes its metadata; it takes part as far as its time
  allows, and what it would take beyond was not measured.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

import planning
from _dcp_rank_0 import dcp_rank_0
from _disk import cold, in_folder
from _measure import (
    FULL,
    MIB,
    Extent,
    Measurement,
    Place,
    at_most,
    fastest,
    in_a_process,
    interleaved,
    median,
    ratios,
    told,
)
from _peers import DCP, DCP_DEFAULT, HOLDFAST, ORBAX, check, peer_names, way
from holdfast.cli._bench_disk import take_into_cache

SIZES = (64 * MIB, 256 * MIB, 1024 * MIB, 4096 * MIB)
LEAF_BYTES = 16 * MIB
WARM_BYTES = 1024 * MIB
ORBAX_BYTES = 1024 * MIB
COUNTS = (10, 100, 1_000, 10_000, 100_000)
SMALL_BYTES = 1024
MANY = 10_000
MOST = {"save": 0.25, "cold load": 0.15}
"""Of DCP's time, for that many tensors."""

RANKS = (1, 8, 64, 512, 4096, 8192)
TENSORS = 1000
REPEATS = 5
REPEATS_OF_LONG = 3
RANK_REPEATS = 3
PATIENCE_S = 20.0
BEST = "DCP at its best"

Seconds = Mapping[str, Sequence[float]]


def measure(extent: Extent = FULL) -> list[Measurement]:
    return [*with_size(extent), *with_tensors(extent), *with_ranks(extent)]


def with_size(extent: Extent) -> list[Measurement]:
    found: list[Measurement] = []
    for size in SIZES:
        state = random_tensors(size // LEAF_BYTES, extent.of(LEAF_BYTES))
        work = partial(side_by_side, state, extent.repeats(REPEATS), and_warm=size <= WARM_BYTES)
        seconds = in_folder(work)
        amount = sum(tensor.nbytes for tensor in state.values())
        for verb, each in seconds.items():
            found += _told(verb, "bytes", amount, f"{amount / MIB:,g} MiB", each)
    return found


def with_tensors(extent: Extent) -> list[Measurement]:
    found: list[Measurement] = []
    for count in extent.upto(COUNTS, least=2):
        state = random_tensors(count, SMALL_BYTES)
        work = partial(side_by_side, state, extent.repeats(REPEATS), and_warm=False)
        for verb, each in in_folder(work).items():
            what = f"{count:,} tensors of 1 KiB"
            found += _told(verb, "tensors of 1 KiB", count, what, each)
            if count == MANY:
                pairs = ratios(each[HOLDFAST], each[fastest_dcp(each)])
                found.append(at_most(f"{verb} of {what}, of DCP's time", pairs, "x", MOST[verb]))
    return found


def random_tensors(count: int, size_bytes: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return {f"leaf{n}": torch.rand(size_bytes // 4, generator=random) for n in range(count)}


def side_by_side(
    state: dict[str, torch.Tensor], repeats: int, folder: Path, *, and_warm: bool
) -> dict[str, Seconds]:
    """Seconds of every library, by what it did: ``save``, ``cold load`` and perhaps ``warm load``.
    Each is tried once before, and compared is whether it loads what it saved."""
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    names = [HOLDFAST, *peer_names()]
    if sum(tensor.nbytes for tensor in state.values()) > ORBAX_BYTES:
        names = [name for name in names if name != ORBAX]
    ways = {name: way(name, folder, state, into) for name in names}
    first = interleaved({DCP_DEFAULT: ways[DCP_DEFAULT].save}, repeats=1)
    if median(first[DCP_DEFAULT]) > PATIENCE_S:
        ways = {name: each for name, each in ways.items() if name not in DCP or name in first}
    saves = {name: each.save for name, each in ways.items()}
    loads = {name: each.load for name, each in ways.items()}
    others = {name: save for name, save in saves.items() if name not in first}
    first |= interleaved(others, repeats=1)
    if sum(median(each) for each in first.values()) > PATIENCE_S:
        repeats = min(repeats, REPEATS_OF_LONG)
    found: dict[str, Seconds] = {
        "save": interleaved(saves, repeats=repeats, prepare=lambda name: ways[name].clear())
    }
    found["cold load"] = interleaved(loads, repeats=repeats, prepare=lambda _: cold(folder))
    for name, each in ways.items():
        check(name, each.load, state, into)
    if and_warm:
        found["warm load"] = interleaved(
            loads, repeats=repeats, prepare=lambda name: take_into_cache(folder / name)
        )
    return found


def _told(verb: str, of: str, at: float, what: str, seconds: Seconds) -> list[Measurement]:
    """Everybody's time, and how many times as fast holdfast is."""
    shown = {name: name for name in seconds if name not in DCP}
    shown["DCP"] = DCP_DEFAULT
    if len(DCP.keys() & seconds.keys()) > 1:
        shown[BEST] = fastest_dcp(seconds)
    chart = f"{verb}, by {of}"
    return [
        *(
            told(
                f"{verb} of {what}, {label}",
                seconds[name],
                "s",
                place=Place(chart=chart, series=label, at=at),
            )
            for label, name in shown.items()
        ),
        *(
            told(
                f"{verb} of {what}, times as fast as {label}",
                ratios(seconds[name], seconds[HOLDFAST]),
                "x",
                place=Place(chart=f"{chart}: times as fast as", series=label, at=at),
            )
            for label, name in shown.items()
            if name != HOLDFAST
        ),
    ]


def fastest_dcp(seconds: Seconds) -> str:
    return fastest(seconds, [name for name in DCP if name in seconds])


def with_ranks(extent: Extent) -> list[Measurement]:
    found: list[Measurement] = []
    tensors = extent.of(TENSORS)
    patient = True
    for ranks in extent.upto(RANKS, least=2):
        repeats = range(extent.repeats(RANK_REPEATS))
        ours = [in_a_process(planning.as_rank_0, "FSDP2", ranks, tensors) for _ in repeats]
        found += _of_rank_0(HOLDFAST, ranks, tensors, ours)
        if patient:
            theirs = [in_folder(partial(_dcp, ranks, tensors)) for _ in repeats]
            found += _of_rank_0("DCP", ranks, tensors, theirs)
            patient = median([each.seconds for each in theirs]) < PATIENCE_S / 8
    return found


def _dcp(ranks: int, tensors: int, folder: Path) -> planning.Outcome:
    return in_a_process(dcp_rank_0, ranks, tensors, folder)


def _of_rank_0(
    name: str, ranks: int, tensors: int, outcomes: Sequence[planning.Outcome]
) -> list[Measurement]:
    what = f"rank 0 of {ranks:,} ranks, {tensors:,} tensors"
    values = {
        "time": ([each.seconds for each in outcomes], "s"),
        "extra memory": ([each.peak_mib for each in outcomes], "MiB"),
        "record": ([outcomes[0].record_mib], "MiB"),
    }
    return [
        told(
            f"{what}, {name}: {of}",
            numbers,
            unit,
            place=Place(chart=f"{of} of rank 0, by ranks", series=name, at=ranks),
        )
        for of, (numbers, unit) in values.items()
    ]
