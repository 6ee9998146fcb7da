"""What rank 0 does to plan and record a save of 8,192 ranks x 1,000 tensors, with no ranks.

Simulated are the payloads the ranks would send: the digest of their leaf list, one list, and the
name, size and digest of the file each wrote. Timed is what rank 0 does with them: decode all,
group, plan, and encode the commit record of all tensors and files, which reads it back as a check.
Every layout runs in processes of its own, so that the peak of their memory is that of one plan.
``uneven`` is hard on purpose: every tensor has another size, none a multiple of the ranks.
"""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from _disk import status
from _measure import FULL, MIB, Extent, Measurement, at_most, in_a_process
from holdfast.catalog._placing import placement_of_grid
from holdfast.format import CommitRecord, StoredFile, StoredTensor, encode_record
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


class Payload(msgspec.Struct):
    leaves: bytes
    files: list[StoredFile]


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
    payloads, leaf_list = _sent_by_ranks(JOBS[name], ranks, tensors)
    before = status("VmRSS")
    start = time.perf_counter()
    record = _of_rank_0(payloads, leaf_list)
    seconds = time.perf_counter() - start
    extra = status("VmHWM") - before
    return Outcome(seconds=seconds, peak_mib=extra / MIB, record_mib=len(record) / MIB)


def _sent_by_ranks(job: Job, ranks: int, tensors: int) -> tuple[list[bytes], bytes]:
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
    digest = listed.digest()
    payloads = [
        msgspec.msgpack.encode(
            Payload(
                leaves=digest,
                files=[
                    StoredFile(
                        name=f"shard-{rank}-{ATTEMPT}.safetensors",
                        size_bytes=10**9 + rank,
                        digest=hashlib.blake2b(rank.to_bytes(8), digest_size=16).hexdigest(),
                    )
                ],
            )
        )
        for rank in range(ranks)
    ]
    return payloads, listed.encode()


def _of_rank_0(payloads: list[bytes], leaf_list: bytes) -> bytes:
    decoder = msgspec.msgpack.Decoder(Payload)
    received = [decoder.decode(payload) for payload in payloads]
    groups = [
        RankGroup(ranks=ranks, leaves=LeafList.decode(leaf_list))
        for ranks in group_ranks([payload.leaves for payload in received])
    ]
    plan = plan_save(groups)
    plan.writes_of(0)
    return encode_record(
        CommitRecord(
            state="committed",
            ordinal=1,
            attempt=ATTEMPT,
            created="2026-01-31T12:00:00Z",
            world_size=len(payloads),
            writer="holdfast benchmarks",
            files=tuple(file for payload in received for file in payload.files),
            tensors={
                tensor.leaf.name: StoredTensor(
                    dtype=tensor.leaf.dtype,
                    shape=tensor.leaf.shape,
                    placement=placement_of_grid(tensor.grid, tensor.writers),
                )
                for tensor in plan.tensors
            },
        )
    )
