"""A 2 GiB state to disk and back: holdfast beside the bare disk, torch.save, safetensors and DCP.

Everything is timed until it is durable, and read into memory that is already there, from a cold
cache and from a warm one. The bare disk is read and written with direct I/O by 1, 2 and 4 threads,
and the best of the three is what the others are compared with: a disk's speed swings, so all of
them take turns. What is read is also copied to where it belongs and digested, with no more code
than that takes: so much a disk leaves to one who verifies. DCP is compared at its defaults, and at
the best of 1, 2 and 4 threads.
"""

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch
import xxhash

from _disk import RAW, cold, extra_memory, in_folder, raw_read, raw_write
from _measure import (
    FULL,
    MIB,
    Extent,
    Measurement,
    Place,
    at_least,
    at_most,
    fastest,
    in_a_process,
    interleaved,
    ratios,
    told,
)
from _peers import (
    DCP,
    DCP_DEFAULT,
    HOLDFAST,
    ORBAX,
    SAFETENSORS,
    TORCH,
    check,
    has_orbax,
    peer_names,
    way,
)
from holdfast.catalog import Catalog
from holdfast.cli._bench_disk import take_into_cache
from holdfast.format import CHUNK_BYTES

STATE_BYTES = 2048 * MIB
LEAF_BYTES = 64 * MIB
REPEATS = 5
EXTRA_MEMORY_MIB = 128
CHECKED = "bare disk, copied and digested"
CHECKED_THREADS = 2

Seconds = Mapping[str, list[float]]


def measure(extent: Extent = FULL) -> list[Measurement]:
    found = in_folder(partial(_measure, extent=extent))
    written, read = in_a_process(in_folder, partial(extra_of_one, extent=extent))
    return [
        *found,
        at_most("extra memory of the write", [written / MIB], "MiB", EXTRA_MEMORY_MIB),
        at_most("extra memory of the read", [read / MIB], "MiB", EXTRA_MEMORY_MIB),
    ]


def _measure(folder: Path, *, extent: Extent) -> list[Measurement]:
    state = random_state(extent.of(STATE_BYTES), extent.of(LEAF_BYTES))
    size = sum(array.nbytes for array in state.values())
    repeats = extent.repeats(REPEATS)
    tensors = {name: torch.from_numpy(array) for name, array in state.items()}
    into = {name: np.ones_like(array) for name, array in state.items()}
    tensors_into = {name: torch.from_numpy(array) for name, array in into.items()}
    catalog = Catalog(folder / HOLDFAST)
    peers = {name: way(name, folder, tensors, tensors_into) for name in peer_names()}
    raw = folder / "raw"

    writes: dict[str, Callable[[], object]] = {
        name: partial(raw_write, raw, size, threads) for name, threads in RAW.items()
    }
    writes[HOLDFAST] = lambda: catalog.write("state", state)
    writes |= {name: peer.save for name, peer in peers.items()}
    loads: dict[str, Callable[[], object]] = {
        HOLDFAST: lambda: catalog.open("state").read_into(into),
        **{name: peer.load for name, peer in peers.items()},
    }
    bare: dict[str, Callable[[], object]] = {
        name: partial(raw_read, raw, threads) for name, threads in RAW.items()
    }
    target = np.ones(size, np.uint8)
    bare[CHECKED] = lambda: raw_read(raw, CHECKED_THREADS, partial(copy_and_digest, target))

    def empty(name: str) -> None:
        if name == HOLDFAST:
            catalog.rollback("state")
        elif name in RAW:
            raw.unlink(missing_ok=True)
        else:
            peers[name].clear()
        os.sync()

    for name, call in writes.items():
        call()
        empty(name)
    written = interleaved(writes, repeats=repeats, prepare=empty)
    read = interleaved({**bare, **loads}, repeats=repeats, prepare=lambda _: cold(folder))
    for name, load in loads.items():
        check(name, load, tensors, tensors_into)
    again = interleaved(loads, repeats=repeats, prepare=lambda name: take_into_cache(folder / name))
    return [
        _of_the_disk("durable write", written),
        *_against("durable write", written, size, dcp_least=1),
        _of_the_disk("verified cold read", read),
        told(
            f"verified cold read, of the speed of the {CHECKED}",
            ratios(read[CHECKED], read[HOLDFAST]),
            "x",
        ),
        *_against("verified cold read", read, size, dcp_least=3),
        *_against("verified warm read", again, size, dcp_least=1),
    ]


def copy_and_digest(target: np.ndarray, at: int, piece: memoryview) -> None:
    copied = target[at : at + len(piece)]
    copied[:] = np.frombuffer(piece, np.uint8)
    for start in range(0, len(copied), CHUNK_BYTES):
        xxhash.xxh3_128_digest(copied.data[start : start + CHUNK_BYTES])


def extra_of_one(folder: Path, *, extent: Extent) -> tuple[int, int]:
    """What a first write and a first read take beyond the state, in a process of their own."""
    state = random_state(extent.of(STATE_BYTES), extent.of(LEAF_BYTES))
    into = {name: np.ones_like(array) for name, array in state.items()}
    catalog = Catalog(folder / HOLDFAST)
    written = extra_memory(lambda: catalog.write("state", state))
    return written, extra_memory(lambda: catalog.open("state").read_into(into))


def random_state(size_bytes: int, leaf_bytes: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        f"layer{n}": random.integers(-(2**30), 2**30, leaf_bytes // 4, dtype=np.int32)
        for n in range(size_bytes // leaf_bytes)
    }


def _of_the_disk(what: str, seconds: Seconds) -> Measurement:
    bare = fastest(seconds, tuple(RAW))
    pairs = ratios(seconds[bare], seconds[HOLDFAST])
    return at_least(f"{what}, of the bare disk's speed", pairs, "x", 0.85)


def _against(
    what: str, seconds: Seconds, size_bytes: int, *, dcp_least: float
) -> list[Measurement]:
    """How many times as fast as each peer holdfast is, and everybody's speed."""
    best = fastest(seconds, tuple(DCP))
    peers = {
        "torch.save + fsync" if "write" in what else "torch.load": TORCH,
        "safetensors + fsync" if "write" in what else "safetensors": SAFETENSORS,
        "DCP at its defaults": DCP_DEFAULT,
        "DCP at its best": best,
        **({ORBAX: ORBAX} if has_orbax() else {}),
    }
    found = [
        at_least(
            f"{what}, times as fast as {label}",
            ratios(seconds[name], seconds[HOLDFAST]),
            "x",
            dcp_least if name == best else 1,
            place=Place(chart=what, series=name if name in (TORCH, SAFETENSORS) else label),
        )
        for label, name in peers.items()
    ]
    shown = [HOLDFAST, *dict.fromkeys(peers.values())]
    if RAW.keys() <= seconds.keys():
        shown.append(fastest(seconds, tuple(RAW)))
    if CHECKED in seconds:
        shown.append(CHECKED)
    return [
        *found,
        *(
            told(f"{what}, {name}", [size_bytes / taken / 1e9 for taken in seconds[name]], "GB/s")
            for name in shown
        ),
    ]
