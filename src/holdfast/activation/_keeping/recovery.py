"""Gets back activations that are not registered: from a cache, from whoever is computing them, or
by computing them. Knows functions and results; not where results are kept if there is no cache.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.activation._keeping.cache import RecomputationCache
from holdfast.activation._keeping.single_flight import Flights
from holdfast.activation._recomputing.engine import RecomputationEngine
from holdfast.errors import ClosedError, RecomputationError

Recompute = Callable[[], Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """An activation, and how long it took to compute; ``None`` if it did not have to be."""

    tensor: Any
    elapsed_ms: float | None = None


class Recovery:
    """An engine, perhaps a cache, and the computations under way. Thread-safe."""

    def __init__(self, engine: RecomputationEngine, cache: RecomputationCache | None) -> None:
        self._engine = engine
        self._cache = cache
        self._flights: Flights[Found] = Flights()

    def can_compute(self, layer_id: str, recompute: Recompute) -> bool:
        return recompute is not None or self._engine.has_recompute_function(layer_id)

    def is_cached(self, layer_id: str) -> bool:
        """A cache that was closed has nothing."""
        try:
            return self._cache is not None and layer_id in self._cache
        except ClosedError:
            return False

    def find(
        self,
        layer_id: str,
        recompute: Recompute,
        *,
        kept: Callable[[], Any],
        keep: Callable[[Any, RecomputationCache | None], None],
    ) -> Found | None:
        """The activation, detached; ``None`` if there is no way to get it.

        ``kept()`` looks once more whether it is kept by now, and ``keep`` is given what was
        computed, and the cache. Raises as the engine does, and ``RecomputationError`` for a
        result that is no tensor.
        """
        cached = None if self._cache is None else self._cache.get(layer_id)
        if cached is not None:
            return Found(tensor=cached)

        def compute() -> Found:
            # Another thread may have been done just before this one began.
            there = self._cached(layer_id) if (found := kept()) is None else found
            if there is not None:
                return Found(tensor=there)
            began_ns = time.perf_counter_ns()
            tensor = self._compute(layer_id, recompute)
            elapsed_ms = (time.perf_counter_ns() - began_ns) / 1e6
            keep(tensor, self._cache)
            return Found(tensor=tensor, elapsed_ms=elapsed_ms)

        possible = self.can_compute(layer_id, recompute)
        outcome = self._flights.run(layer_id, compute if possible else None)
        if outcome is None:
            return None
        found, own = outcome
        return found if own else Found(tensor=found.tensor)

    def clear(self) -> None:
        """Empty the cache. One that was closed is empty."""
        if self._cache is not None:
            with contextlib.suppress(ClosedError):
                self._cache.clear()

    def _cached(self, layer_id: str) -> Any:
        # Looked for first, for a miss was counted already.
        if self._cache is None or layer_id not in self._cache:
            return None
        return self._cache.get(layer_id)

    def _compute(self, layer_id: str, recompute: Recompute) -> Any:
        if recompute is None:
            result = self._engine.recompute(layer_id)
        else:
            result = self._engine.run(layer_id, recompute)
        if not isinstance(result, torch.Tensor):
            raise RecomputationError(
                f"recomputing layer {layer_id!r} gave {type(result).__name__} instead of a tensor; "
                "nothing was kept",
                layer_id=layer_id,
            )
        return result.detach()
