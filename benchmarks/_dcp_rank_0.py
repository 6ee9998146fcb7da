"""What DCP's rank 0 does for a save of many ranks, with no ranks: the peer of ``planning.py``.

Simulated is what the ranks would send, pickled as ``gather_object`` does: their plans, one item for
each of their parts of a tensor, and then what they wrote. Timed is what rank 0 does with them:
decode the plans, make the global one with DCP's own planner, decode the results, and have DCP's own
writer write the metadata. The parts are even, as of FSDP2.
"""

import pickle
import time
from pathlib import Path

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, SavePlan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from _disk import status
from _measure import MIB
from planning import Outcome

ROWS = 16384


def dcp_rank_0(ranks: int, tensors: int, folder: Path) -> Outcome:
    """In a process of its own; the metadata goes to ``folder``."""
    names = {_name(number): (_name(number),) for number in range(tensors)}
    sent = [
        pickle.dumps(SavePlan(_items(rank, ranks, tensors), planner_data=names))
        for rank in range(ranks)
    ]
    wrote = [pickle.dumps(_results(rank, ranks, tensors)) for rank in range(ranks)]
    planner, writer = DefaultSavePlanner(), FileSystemWriter(folder)
    planner.set_up_planner({}, is_coordinator=True)
    writer.set_up_storage_writer(is_coordinator=True)
    before = status("VmRSS")
    start = time.perf_counter()
    plans, metadata = planner.create_global_plan([pickle.loads(each) for each in sent])
    writer.prepare_global_plan(plans)
    writer.finish(metadata, [pickle.loads(each) for each in wrote])
    seconds = time.perf_counter() - start
    extra = status("VmHWM") - before
    (file,) = (path for path in folder.iterdir() if path.name == ".metadata")
    return Outcome(seconds=seconds, peak_mib=extra / MIB, record_mib=file.stat().st_size / MIB)


def _items(rank: int, ranks: int, tensors: int) -> list[WriteItem]:
    own = ChunkStorageMetadata(
        offsets=torch.Size((ROWS // ranks * rank, 0)), sizes=torch.Size((ROWS // ranks, ROWS))
    )
    return [
        WriteItem(
            index=_index(rank, ranks, number),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=own,
                properties=TensorProperties(dtype=torch.bfloat16),
                size=torch.Size((ROWS, ROWS)),
            ),
        )
        for number in range(tensors)
    ]


def _results(rank: int, ranks: int, tensors: int) -> list[WriteResult]:
    size = ROWS // ranks * ROWS * 2
    return [
        WriteResult(
            index=_index(rank, ranks, number),
            size_in_bytes=size,
            storage_data=_StorageInfo(f"__{rank}_0.distcp", number * size, size),
        )
        for number in range(tensors)
    ]


def _index(rank: int, ranks: int, number: int) -> MetadataIndex:
    return MetadataIndex(_name(number), torch.Size((ROWS // ranks * rank, 0)))


def _name(number: int) -> str:
    return f"model.layers.{number // 12}.block.{number % 12}.weight"
