"""What rank 0 does to plan and record a save of 8,192 ranks x 1,000 tensors, with no ranks.

Simulated is what the ranks would send: the digest of their leaf list, one list, and the summary of
the file each wrote. Timed is what rank 0 does with it, by the product's own code: group and plan,
decode all summaries, encode the commit record of all tensors and files, which reads it back as a
check, and store it durably. How long the sending takes is not in it.
Every layout runs in processes of its own, so that the peak of their memory is that of one plan.
``uneven`` is hard on purpose: every tensor has another size, none a multiple of the ranks.
"""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from _disk import in_folder, status
from _measure import FULL, MIB, Extent, Measurement, at_most, in_a_process
from holdfast.distributed._borrowing import Borrowed
from holdfast.distributed._summary import Summary, files_of, tensors_of
from holdfast.format import CommitRecord, StoredFile, encode_record
from holdfast.reshard import (
    IndexRuns,
    Layout,
    Leaf,
    LeafList,
    Placement,
    RankGroup,
    Replicate,
    Shard,
    StridedShard,
    group_ranks,
    plan_save,
)
from holdfast.storage import LocalStorage

RANKS = 8192
TENSORS = 1000
REPEATS = 3
SECONDS = 10.0
MEBIBYTES = 64.0
ATTEMPT = "0123456789abcdef"

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    mesh_of: Callable[[int], Shape]
    placements: tuple[Placement, ...]
    shape_of: Callable[[int], Shape]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """By all ranks: the digests of their leaf lists, the list that all share, and summaries."""

    digests: list[bytes]
    leaves: bytes
    summaries: list[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    seconds: float
    peak_mib: float
    record_mib: float


def transformer(index: int) -> Shape:
    kinds = ((16384, 16384), (53248, 16384), (16384, 53248), (16384,), (2048, 16384))
    return kinds[index % len(kinds)]


def all_different(index: int) -> Shape:
    return (16411 + 37 * index, 1021)


def flat(ranks: int) -> Shape:
    return (ranks,)


def by_eight(ranks: int) -> Shape:
    return (ranks // 8, 8)


STRIDED = (StridedShard(0, 8), Shard(0))

JOBS = {
    "FSDP2": Job(mesh_of=flat, placements=(Shard(0),), shape_of=transformer),
    "HSDP, 8 replicas": Job(
        mesh_of=lambda ranks: (8, ranks // 8),
        placements=(Replicate(), Shard(0)),
        shape_of=transformer,
    ),
    "FSDP2+TP of 8": Job(mesh_of=by_eight, placements=STRIDED, shape_of=transformer),
    "uneven FSDP2": Job(mesh_of=flat, placements=(Shard(0),), shape_of=all_different),
    "uneven FSDP2+TP of 8": Job(mesh_of=by_eight, placements=STRIDED, shape_of=all_different),
}


def measure(extent: Extent = FULL) -> list[Measurement]:
    ranks, tensors = extent.of(RANKS, least=16), extent.of(TENSORS)
    found = []
    for name in JOBS:
        outcomes = [
            in_a_process(as_rank_0, name, ranks, tensors) for _ in range(extent.repeats(REPEATS))
        ]
        seconds = [outcome.seconds for outcome in outcomes]
        peaks = [outcome.peak_mib for outcome in outcomes]
        record = outcomes[0].record_mib
        what = f"plan and record of {ranks} ranks x {tensors} tensors, {name}"
        found += [
            at_most(f"{what}: time", seconds, "s", SECONDS),
            at_most(f"{what}: extra memory", peaks, "MiB", MEBIBYTES),
            at_most(f"{what}: size of the record", [record], "MiB", MEBIBYTES),
        ]
    return found


def as_rank_0(name: str, ranks: int, tensors: int) -> Outcome:
    """What rank 0 does, in a process of its own."""
    sent = _sent_by_ranks(JOBS[name], ranks, tensors)
    return in_folder(partial(_timed, sent))


def _timed(sent: Sent, folder: Path) -> Outcome:
    storage = LocalStorage(folder)
    before = status("VmRSS")
    start = time.perf_counter()
    stored = storage.create("a/metadata.json", _of_rank_0(sent))
    seconds = time.perf_counter() - start
    extra = status("VmHWM") - before
    return Outcome(seconds=seconds, peak_mib=extra / MIB, record_mib=stored.size_bytes / MIB)


def _sent_by_ranks(job: Job, ranks: int, tensors: int) -> Sent:
    layout = Layout(
        mesh_shape=job.mesh_of(ranks),
        ranks=IndexRuns(runs=((0, 1, ranks),)),
        placements=job.placements,
    )
    leaves = tuple(
        Leaf(
            name=f"model.layers.{index // 12}.block.{index % 12}.weight",
            dtype="BF16",
            itemsize=2,
            shape=job.shape_of(index),
            layout=0,
        )
        for index in range(tensors)
    )
    listed = LeafList(leaves=leaves, layouts=(layout,))
    summaries = [
        Summary(
            files=(
                StoredFile(
                    name=f"shard-{rank}-{ATTEMPT}.safetensors",
                    size_bytes=10**9 + rank,
                    digest=hashlib.blake2b(rank.to_bytes(8), digest_size=16).hexdigest(),
                ),
            )
        ).encode()
        for rank in range(ranks)
    ]
    return Sent(digests=[listed.digest()] * ranks, leaves=listed.encode(), summaries=summaries)


def _of_rank_0(sent: Sent) -> bytes:
    groups = [
        RankGroup(ranks=ranks, leaves=LeafList.decode(sent.leaves))
        for ranks in group_ranks(sent.digests)
    ]
    plan = plan_save(groups)
    plan.writes_of(0)
    summaries = [Summary.decode(each) for each in sent.summaries]
    files = files_of(summaries)
    borrowed = Borrowed(None, prefix="a", first=len(files))
    return encode_record(
        CommitRecord(
            state="committed",
            ordinal=1,
            attempt=ATTEMPT,
            created="2026-01-31T12:00:00Z",
            world_size=len(summaries),
            writer="holdfast benchmarks",
            files=files,
            tensors=tensors_of(plan, summaries, borrowed),
        )
    )
