"""A store of checkpoints, without torch: write and read as NumPy, list, verify, delete, gc."""

from holdfast.catalog._attempt import Attempt
from holdfast.catalog._catalog import Catalog
from holdfast.catalog._collect import GcReport
from holdfast.catalog._info import CheckpointInfo
from holdfast.catalog._opened import OpenCheckpoint, TensorInfo
from holdfast.catalog._verify import Damage, VerifyReport

__all__ = [
    "Attempt",
    "Catalog",
    "CheckpointInfo",
    "Damage",
    "GcReport",
    "OpenCheckpoint",
    "TensorInfo",
    "VerifyReport",
]
