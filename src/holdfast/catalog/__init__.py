"""A store of checkpoints, without torch: write, read as NumPy, list, verify, delete, prune, gc."""

from holdfast.catalog._attempt import Attempt
from holdfast.catalog._catalog import Catalog
from holdfast.catalog._collect import GcReport
from holdfast.catalog._info import CheckpointInfo
from holdfast.catalog._listing import Scan, Unreadable
from holdfast.catalog._opened import OpenCheckpoint, TensorInfo
from holdfast.catalog._prune import PruneReport
from holdfast.catalog._retention import Retention, keep_best, keep_every, keep_last, keep_within
from holdfast.catalog._verify import Damage, VerifyReport

__all__ = [
    "Attempt",
    "Catalog",
    "CheckpointInfo",
    "Damage",
    "GcReport",
    "OpenCheckpoint",
    "PruneReport",
    "Retention",
    "Scan",
    "TensorInfo",
    "Unreadable",
    "VerifyReport",
    "keep_best",
    "keep_every",
    "keep_last",
    "keep_within",
]
