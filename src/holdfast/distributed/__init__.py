"""Checkpoints of a training on any number of ranks: save on N, load on M."""

from holdfast.catalog import CheckpointInfo
from holdfast.distributed._capture import per_rank
from holdfast.distributed._checkpoint import DistributedCheckpoint
from holdfast.distributed._options import (
    CheckpointFormat,
    CheckpointOptions,
    LoadOptions,
    ReshardingStrategy,
    SaveOptions,
)
from holdfast.distributed._progress import Progress, RichProgress
from holdfast.distributed._result import (
    CheckpointLoadResult,
    CheckpointMetadata,
    Difference,
    LoadReport,
)
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
    "Progress",
    "RequiredMetadata",
    "ReshardingStrategy",
    "RichProgress",
    "SameWorldSize",
    "SaveOptions",
    "ValidationResult",
    "per_rank",
]
