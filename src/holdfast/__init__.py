"""Keeps PyTorch training runs safe and small.

``import holdfast`` loads the errors and nothing else: torch and everything that needs it are
imported when first used.
"""

import importlib
import logging
from typing import TYPE_CHECKING, Any

from holdfast.errors import *  # noqa: F403 -- the errors are public here, all of them
from holdfast.errors import __all__ as _errors

if TYPE_CHECKING:  # the same names as in _names below, for those who read types
    from holdfast._shortcuts import load as load
    from holdfast._shortcuts import save as save
    from holdfast.activation import ActivationPlan as ActivationPlan
    from holdfast.activation import checkpoint as checkpoint
    from holdfast.activation import checkpoint_layers as checkpoint_layers
    from holdfast.activation import plan as plan
    from holdfast.catalog import CheckpointInfo as CheckpointInfo
    from holdfast.catalog import keep_best as keep_best
    from holdfast.catalog import keep_every as keep_every
    from holdfast.catalog import keep_last as keep_last
    from holdfast.catalog import keep_within as keep_within
    from holdfast.distributed import CheckpointFormat as CheckpointFormat
    from holdfast.distributed import CheckpointLoadResult as CheckpointLoadResult
    from holdfast.distributed import CheckpointOptions as CheckpointOptions
    from holdfast.distributed import DistributedCheckpoint as DistributedCheckpoint
    from holdfast.distributed import LoadOptions as LoadOptions
    from holdfast.distributed import Preemption as Preemption
    from holdfast.distributed import ResumeResult as ResumeResult
    from holdfast.distributed import SaveHandle as SaveHandle
    from holdfast.distributed import SaveOptions as SaveOptions
    from holdfast.distributed import SaveRecord as SaveRecord
    from holdfast.distributed import per_rank as per_rank
    from holdfast.format import CompressionLevel as CompressionLevel
    from holdfast.precision import MixedPrecisionOptimizer as MixedPrecisionOptimizer

__version__ = "0.1.0"

logging.getLogger(__name__).addHandler(logging.NullHandler())  # silent unless asked to speak

_rooms = (
    *("activation", "catalog", "cli", "contracts", "coordination", "distributed", "errors"),
    *("format", "integrations", "precision", "reshard", "resilience", "storage", "testing"),
)

_names = {
    "ActivationPlan": "activation",
    "CheckpointFormat": "distributed",
    "CheckpointInfo": "catalog",
    "CheckpointLoadResult": "distributed",
    "CheckpointOptions": "distributed",
    "CompressionLevel": "format",
    "DistributedCheckpoint": "distributed",
    "LoadOptions": "distributed",
    "MixedPrecisionOptimizer": "precision",
    "Preemption": "distributed",
    "ResumeResult": "distributed",
    "SaveHandle": "distributed",
    "SaveOptions": "distributed",
    "SaveRecord": "distributed",
    "checkpoint": "activation",
    "checkpoint_layers": "activation",
    "keep_best": "catalog",
    "keep_every": "catalog",
    "keep_last": "catalog",
    "keep_within": "catalog",
    "load": "_shortcuts",
    "per_rank": "distributed",
    "plan": "activation",
    "save": "_shortcuts",
}

__all__ = [*_errors, *_names, *_rooms, "__version__"]  # noqa: PLE0604 -- strings, though ruff cannot see it


def __getattr__(name: str) -> Any:
    if name in _rooms:
        return importlib.import_module(f"holdfast.{name}")
    if name in _names:
        return getattr(importlib.import_module(f"holdfast.{_names[name]}"), name)
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
