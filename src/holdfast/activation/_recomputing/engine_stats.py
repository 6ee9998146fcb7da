"""Counts recomputations and how long they took. Knows layers by name, not what they compute.

A recomputation may take a few microseconds on many threads at once, so counting one is a single
append to a log, without a lock. The log is added up when somebody asks, or when it is long.
"""

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

_NS_PER_MS: Final = 1_000_000
_LOG_LENGTH: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRecomputationStats:
    """How often a layer was recomputed, and how long that took.

    Only recomputations that gave a result are in ``call_count`` and the times; those that raised
    or returned ``None`` are in ``failure_count``.
    """

    layer_id: str
    call_count: int = 0
    failure_count: int = 0
    total_computation_time_ms: float = 0.0
    last_called_at: datetime | None = None
    """When the last one ended, in UTC; ``None`` if there was none."""

    @property
    def average_computation_time_ms(self) -> float:
        return self.total_computation_time_ms / self.call_count if self.call_count else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputationStats:
    """The recomputations of an engine up to one moment, by layer and in total.

    The totals are the sums over the layers, so they always agree with them.
    """

    layers: tuple[LayerRecomputationStats, ...]
    """The registered layers in the order of registration, then the others that were run."""

    registered_layer_count: int
    timestamp: datetime

    @property
    def layer_stats(self) -> dict[str, LayerRecomputationStats]:
        """The layers by their ids, in a new dict."""
        return {layer.layer_id: layer for layer in self.layers}

    @property
    def total_recomputations(self) -> int:
        return sum(layer.call_count for layer in self.layers)

    @property
    def total_failures(self) -> int:
        return sum(layer.failure_count for layer in self.layers)

    @property
    def total_recomputation_time_ms(self) -> float:
        return sum(layer.total_computation_time_ms for layer in self.layers)

    @property
    def average_recomputation_time_ms(self) -> float:
        count = self.total_recomputations
        return self.total_recomputation_time_ms / count if count else 0.0


class Ledger:
    """Recomputations as they end, and their sums by layer. Thread-safe.

    Those that ended before ``snapshot`` was called are in it, and no later one without all that
    ended before it.
    """

    __slots__ = ("_lock", "_log", "_sums")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._log: deque[tuple[str, int | None, float]] = deque()
        self._sums: dict[str, _Sum] = {}

    def add(self, layer_id: str, elapsed_ns: int | None, ended_s: float) -> None:
        """Count one. ``elapsed_ns`` is ``None`` if it failed, ``ended_s`` is seconds of UTC."""
        log = self._log
        log.append((layer_id, elapsed_ns, ended_s))
        # Whoever finds it being added up already goes on: waiting here would queue the threads.
        if len(log) >= _LOG_LENGTH and self._lock.acquire(blocking=False):
            try:
                self._add_up()
            finally:
                self._lock.release()

    def snapshot(self, registered: Iterable[str], now_s: float) -> RecomputationStats:
        """The sums of now. Layers that are ``registered`` are in it also if they never ran."""
        registered = list(registered)
        with self._lock:
            self._add_up()
            layers = dict.fromkeys(registered) | dict.fromkeys(self._sums)
            return RecomputationStats(
                layers=tuple(self._sums.get(each, _NOTHING).of(each) for each in layers),
                registered_layer_count=len(registered),
                timestamp=_utc(now_s),
            )

    def _add_up(self) -> None:
        # Not until it is empty: others go on appending, and this would never end.
        for _ in range(len(self._log)):
            layer_id, elapsed_ns, ended_s = self._log.popleft()
            found = self._sums.get(layer_id)
            if found is None:
                found = self._sums[layer_id] = _Sum()
            if elapsed_ns is None:
                found.failures += 1
            else:
                found.calls += 1
                found.elapsed_ns += elapsed_ns
                found.ended_s = ended_s


class _Sum:
    __slots__ = ("calls", "elapsed_ns", "ended_s", "failures")

    def __init__(self) -> None:
        self.calls = 0
        self.failures = 0
        self.elapsed_ns = 0
        self.ended_s: float | None = None

    def of(self, layer_id: str) -> LayerRecomputationStats:
        return LayerRecomputationStats(
            layer_id=layer_id,
            call_count=self.calls,
            failure_count=self.failures,
            total_computation_time_ms=self.elapsed_ns / _NS_PER_MS,
            last_called_at=None if self.ended_s is None else _utc(self.ended_s),
        )


_NOTHING: Final = _Sum()


def _utc(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
