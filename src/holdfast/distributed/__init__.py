"""Checkpoints of a training on any number of ranks: save on N, load on M."""

from holdfast.catalog import (
    CheckpointInfo,
    PruneReport,
    Retention,
    keep_best,
    keep_every,
    keep_last,
    keep_within,
)
from holdfast.distributed._capture import per_rank
from holdfast.distributed._checkpoint import DistributedCheckpoint
from holdfast.distributed._handle import SaveHandle
from holdfast.distributed._options import (
    CheckpointFormat,
    CheckpointOptions,
    LoadOptions,
    ReshardingStrategy,
    SaveOptions,
)
from holdfast.distributed._preemption import Preemption
from holdfast.distributed._progress import Progress, RichProgress
from holdfast.distributed._result import (
    CheckpointLoadResult,
    CheckpointMetadata,
    Difference,
    LoadReport,
)
from holdfast.distributed._resuming import PassedOver, ResumeResult
from holdfast.distributed._save_record import SaveRecord
from holdfast.distributed._validation import (
    CheckpointValidator,
    CompatibilityChecker,
    Finding,
    FullReadChecker,
    IntegrityChecker,
    RequiredMetadata,
    SameWorldSize,
    ValidationResult,
)
from holdfast.format import CompressionLevel

__all__ = [
    "CheckpointFormat",
    "CheckpointInfo",
    "CheckpointLoadResult",
    "CheckpointMetadata",
    "CheckpointOptions",
    "CheckpointValidator",
    "CompatibilityChecker",
    "CompressionLevel",
    "Difference",
    "DistributedCheckpoint",
    "Finding",
    "FullReadChecker",
    "IntegrityChecker",
    "LoadOptions",
    "LoadReport",
    "PassedOver",
    "Preemption",
    "Progress",
    "PruneReport",
    "RequiredMetadata",
    "ReshardingStrategy",
    "ResumeResult",
    "Retention",
    "RichProgress",
    "SameWorldSize",
    "SaveHandle",
    "SaveOptions",
    "SaveRecord",
    "ValidationResult",
    "keep_best",
    "keep_every",
    "keep_last",
    "keep_within",
    "per_rank",
]
