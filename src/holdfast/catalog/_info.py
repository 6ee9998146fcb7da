"""What a listing says of a checkpoint."""

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.format import CommitRecord
from holdfast.format._record import RECORD_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """A committed checkpoint, from its record alone.

    ``ordinal`` tells newer from older, whatever clocks say. ``size_bytes`` counts the files it
    names, also those of other checkpoints it refers to. ``version`` is that of the format.
    """

    prefix: str
    ordinal: int
    version: str
    timestamp: dt.datetime
    world_size: int
    size_bytes: int
    format: str
    step: int | None
    metrics: Mapping[str, float]
    tensors: int


def info_of(prefix: str, record: CommitRecord) -> CheckpointInfo:
    return CheckpointInfo(
        prefix=prefix,
        ordinal=record.ordinal,
        version=str(RECORD_VERSION),
        timestamp=dt.datetime.fromisoformat(record.created),
        world_size=record.world_size,
        size_bytes=sum(file.size_bytes for file in record.files),
        format=record.shard_format,
        step=record.step,
        metrics=dict(record.metrics),
        tensors=len(record.tensors),
    )
