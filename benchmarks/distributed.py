"""Checkpoints of a model and its Adam state: holdfast beside the bare disk and torch's DCP.

Saving and cold loading on 1 and 2 ranks, loading on another number of ranks, ten thousand small
tensors, and memory. A time begins when every rank waits for its next call, and ends when the
slowest is done; process group, coordinator and tensors are there before, old files are gone. What
is saved is durable, what is loaded was dropped from the page cache, as in ``storage.py``.

The bare disk is given the same bytes by the same number of processes, by 1, 2 or 4 threads in each
with direct I/O. DCP writes with 1, 2 or 4 threads. The best of the three, by its median in this
run, is compared with. Of DCP's other settings the defaults are kept, ``single_file_per_rank`` and
``sync_files``: a small trial (256 MiB, one rank, a busy machine) found nothing that saved faster
and was durable, and none that clearly loaded faster. It is handed its dict of tensors
ready-made and fills the model's own tensors, so ``get_state_dict`` and ``set_state_dict`` cost it
nothing.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch

import holdfast
from _measure import Measurement, at_most, interleaved, median, spread, told
from _ranks import DCP, RAW, bytes_read, check, dcp_load, dcp_save, peak_of, read, set_up, write
from holdfast.catalog import Catalog
from holdfast.testing import RankGang
from storage import drop_from_cache, safetensors_save

T = TypeVar("T")

MIB = 2**20
STATE_BYTES = 2048 * MIB
RESHARDED_BYTES = 1024 * MIB
SMALL_TENSORS = 10_000
REPEATS = 7
CALL_S = 600.0
EXTRA_MEMORY_BYTES = 128 * MIB


def measure() -> list[Measurement]:
    found: list[Measurement] = []
    for ranks in (1, 2):
        found += in_folder(partial(end_to_end, ranks=ranks))
    for before, after in ((4, 2), (2, 4)):
        found += in_folder(partial(resharding, before=before, after=after))
    found += in_folder(small_tensors)
    for ranks in (1, 2):
        found += in_folder(partial(memory, ranks=ranks))
    return found


def in_folder(work: Callable[[Path], list[Measurement]]) -> list[Measurement]:
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=".") as folder:
        return work(Path(folder).resolve())


def end_to_end(folder: Path, *, ranks: int) -> list[Measurement]:
    names = [*RAW, "holdfast", *DCP]
    with RankGang(ranks) as gang:
        size = sum(on_ranks(gang, set_up, folder, STATE_BYTES))
        for name in names:
            on_ranks(gang, write, name)
        written = interleaved(
            {name: partial(on_ranks, gang, write, name) for name in names},
            repeats=REPEATS,
            prepare=partial(empty, folder),
        )
        read_back = interleaved(
            {name: partial(on_ranks, gang, read, name) for name in names},
            repeats=REPEATS,
            prepare=lambda _: cold(folder),
        )
        for name in ("holdfast", *DCP):
            on_ranks(gang, check, name)
    where = f"on {ranks} rank{'s' * (ranks > 1)}"
    return [
        _times(f"save {where}, of the bare disk's speed", written, RAW, 0.8),
        _times(f"save {where}, times as fast as DCP", written, DCP, 1),
        *_speeds(f"save {where}", written, size),
        _times(f"cold load {where}, of the bare disk's speed", read_back, RAW, 0.8),
        _times(f"cold load {where}, times as fast as DCP", read_back, DCP, 3),
        *_speeds(f"cold load {where}", read_back, size),
        # What a loader that is as fast as the disk would reach: the target may lie beyond it.
        told(
            f"cold load {where}, bare disk, times as fast as DCP",
            _over(read_back[_best(read_back, DCP)], read_back[_best(read_back, RAW)]),
            "x",
        ),
    ]


def resharding(folder: Path, *, before: int, after: int) -> list[Measurement]:
    names = ["holdfast", *DCP]
    with RankGang(before) as gang:
        on_ranks(gang, set_up, folder, RESHARDED_BYTES)
        for name in names:
            on_ranks(gang, write, name)
    with RankGang(after) as gang:
        needed = sum(on_ranks(gang, set_up, folder, RESHARDED_BYTES))
        for name in names:
            on_ranks(gang, check, name)
        read_back = interleaved(
            {name: partial(on_ranks, gang, read, name) for name in names},
            repeats=REPEATS,
            prepare=lambda _: cold(folder),
        )
        share = sum(on_ranks(gang, bytes_read, folder)) / needed
    if share < 0.99:
        raise AssertionError(f"only {share:.0%} of the bytes were counted: reads went another way")
    where = f"cold load on {after} ranks of what {before} saved"
    return [
        at_most(f"{where}, bytes read for each needed", [share], "x", 1.05),
        _times(f"{where}, times as fast as DCP", read_back, DCP, 2),
        *_speeds(where, read_back, needed),
    ]


def small_tensors(folder: Path) -> list[Measurement]:
    """In this process, without a process group."""
    random = torch.Generator().manual_seed(0)
    state = {f"leaf{n}": torch.rand(256, generator=random) for n in range(SMALL_TENSORS)}
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    file = folder / "state.safetensors"
    ours = folder / "holdfast"
    writes: dict[str, Callable[[], object]] = {
        "holdfast": lambda: holdfast.save(state, ours),
        "safetensors": lambda: safetensors_save(state, file),
    }
    reads: dict[str, Callable[[], object]] = {
        "holdfast": lambda: holdfast.load(ours, into=into),
        "safetensors": lambda: safetensors.torch.load_file(file),
    }
    for name, threads in DCP.items():
        writes[name] = partial(dcp_save, state, folder / name, threads=threads, alone=True)
        reads[name] = partial(dcp_load, into, folder / name, alone=True)

    def free(name: str) -> None:
        file.unlink() if name == "safetensors" else shutil.rmtree(folder / name)
        os.sync()

    for call in writes.values():
        call()
    written = interleaved(writes, repeats=REPEATS, prepare=free)
    read_back = interleaved(reads, repeats=REPEATS, prepare=lambda _: cold(folder))
    for name in ("holdfast", *DCP):
        for tensor in into.values():
            tensor.zero_()
        reads[name]()
        if not all(torch.equal(into[leaf], tensor) for leaf, tensor in state.items()):
            raise AssertionError(f"{name} did not load what it saved")
    found = []
    for verb, seconds, most in (("save", written, 0.25), ("cold load", read_back, 0.15)):
        what = f"{verb} of {SMALL_TENSORS:,} tensors of 1 KiB"
        peer = _best(seconds, DCP)
        pairs = _over(seconds["holdfast"], seconds[peer])
        found.append(at_most(f"{what}, of DCP's time", pairs, "x", most))
        shown = ("holdfast", peer, "safetensors")
        found += [told(f"{what}, {name}", seconds[name], "s") for name in shown]
    return found


def memory(folder: Path, *, ranks: int) -> list[Measurement]:
    """The worst rank's peak over what it held before, saving and loading in processes of their
    own. A load may stage one copy of what it loads, so that is taken off."""
    found = []
    for verb, work, staged in (("save", write, 0), ("load", read, 1)):
        with RankGang(ranks) as gang:
            parts = on_ranks(gang, set_up, folder, STATE_BYTES)
            peaks = on_ranks(gang, peak_of, work)
        extra = [(peak - staged * part) / MIB for peak, part in zip(peaks, parts, strict=True)]
        beyond = " beyond one staged copy" * staged
        name = f"extra memory of a {verb}{beyond}, {ranks} rank{'s' * (ranks > 1)}"
        found.append(at_most(name, [max(extra)], "MiB", EXTRA_MEMORY_BYTES // MIB))
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
    if name == "holdfast":
        Catalog(folder / name).rollback("a")
    else:
        shutil.rmtree(folder / name)
        (folder / name).mkdir()
    os.sync()


def cold(folder: Path) -> None:
    os.sync()
    for path in folder.rglob("*"):
        drop_from_cache(path)


def _best(seconds: dict[str, list[float]], names: Mapping[str, int]) -> str:
    return min(names, key=lambda name: median(seconds[name]))


def _over(those: Sequence[float], these: Sequence[float]) -> list[float]:
    """Pairs of the same repeat, so that a slow second is on both sides."""
    return [a / b for a, b in zip(those, these, strict=True)]


def _times(
    name: str, seconds: dict[str, list[float]], peers: Mapping[str, int], least: float
) -> Measurement:
    peer = _best(seconds, peers)
    pairs = _over(seconds[peer], seconds["holdfast"])
    value = median(pairs)
    return Measurement(
        name=name,
        value=value,
        unit="x",
        target=f"\N{GREATER-THAN OR EQUAL TO} {least:g}" if least != 1 else "> 1",
        met=value >= least,
        spread=spread(pairs),
    )


def _speeds(what: str, seconds: dict[str, list[float]], size_bytes: int) -> list[Measurement]:
    groups = [group for group in (RAW, DCP) if group.keys() <= seconds.keys()]
    return [
        told(f"{what}, {name}", [size_bytes / taken / 1e9 for taken in seconds[name]], "GB/s")
        for name in ("holdfast", *(_best(seconds, group) for group in groups))
    ]
