"""Activations kept, recomputed or moved, with gradients bit for bit the same. Knows no ranks.

``checkpoint`` runs a function so that backward recomputes what autograd would have kept;
``checkpoint_layers`` does it to layers of a model, and ``plan`` finds out which, so that a step
fits a budget. ``CheckpointManager`` and ``RecomputationEngine`` are what they work with, and can be
used by themselves.
"""

from holdfast.activation._events import ActivationEvent
from holdfast.activation._keeping.cache import CacheStats, RecomputationCache
from holdfast.activation._keeping.cache_policies import CachePolicy
from holdfast.activation._keeping.held import Held
from holdfast.activation._keeping.manager import CheckpointManager
from holdfast.activation._keeping.memory_stats import MemoryStats
from holdfast.activation._layers.checkpointed import CheckpointedLayers, checkpoint_layers
from holdfast.activation._layers.config import CheckpointConfig, CheckpointStrategy
from holdfast.activation._measuring.meter import PeakReport, measure_peak
from holdfast.activation._planning.applying import AppliedPlan, Fallback
from holdfast.activation._planning.plan import ActivationPlan
from holdfast.activation._planning.planning import plan
from holdfast.activation._recomputing.async_engine import AsyncRecomputationEngine
from holdfast.activation._recomputing.engine import RecomputationEngine
from holdfast.activation._recomputing.engine_stats import (
    LayerRecomputationStats,
    RecomputationStats,
)
from holdfast.activation._recomputing.graph import DependencyGraph
from holdfast.activation._recomputing.profile import RecomputationProfile
from holdfast.activation._regions.checkpoint import checkpoint
from holdfast.activation._regions.default import default_manager
from holdfast.activation._reporting.report import PlanReport

__all__ = [
    "ActivationEvent",
    "ActivationPlan",
    "AppliedPlan",
    "AsyncRecomputationEngine",
    "CachePolicy",
    "CacheStats",
    "CheckpointConfig",
    "CheckpointManager",
    "CheckpointStrategy",
    "CheckpointedLayers",
    "DependencyGraph",
    "Fallback",
    "Held",
    "LayerRecomputationStats",
    "MemoryStats",
    "PeakReport",
    "PlanReport",
    "RecomputationCache",
    "RecomputationEngine",
    "RecomputationProfile",
    "RecomputationStats",
    "checkpoint",
    "checkpoint_layers",
    "default_manager",
    "measure_peak",
    "plan",
]
