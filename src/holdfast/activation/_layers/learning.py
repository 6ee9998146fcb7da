"""Learns what layers drop and what their replays cost. Knows events, not what is decided on them.

It lasts from one forward until the next one after a backward. Until then every activation that is
counted is held at the same time, also by a pipeline that runs several forwards before a backward.
A forward in training whose result is thrown away is counted as well: that errs towards recomputing.
"""

import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

from holdfast.activation._events import ActivationEvent
from holdfast.activation._keeping.manager import CheckpointManager
from holdfast.activation._layers.strategies import LayerCost
from holdfast.activation._recomputing.engine import RecomputationEngine

T = TypeVar("T")


class Learning:
    """What was counted so far, and whether that is all. Thread-safe.

    It refers to no manager, no engine and no model: what listens to it is freed when it is dropped.
    """

    __slots__ = ("_counts", "_lock", "_replayed")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, _Count] = {}
        self._replayed = False

    def listen(self, engine: RecomputationEngine) -> Callable[[], None]:
        """Count the replays of ``engine`` until the function that is returned is called."""
        return engine.on_event(self._note_replay)

    @property
    def is_over(self) -> bool:
        """Whether a backward has begun: the next forward is another one."""
        return self._replayed

    def watch(self, manager: CheckpointManager, name: str, call: Callable[[], T]) -> T:
        """What ``call`` returns; the region called ``name`` that it makes is counted."""
        with self._lock:
            count = self._counts.setdefault(name, _Count())
        thread = threading.get_ident()

        def note(event: ActivationEvent) -> None:
            # The manager may serve other models, and those other threads.
            mine = event.layer_id == name and threading.get_ident() == thread
            if event.kind == "region" and mine:
                with self._lock:
                    count.regions += 1
                    count.dropped_bytes += event.size_bytes
                    count.forward_ms += event.elapsed_ms

        unsubscribe = manager.on_event(note)
        try:
            return call()
        finally:
            unsubscribe()

    def costs(self, devices: Mapping[str, str]) -> list[LayerCost]:
        """Of those layers in ``devices`` that were called. One that drops nothing, as a frozen one
        does, has 0 bytes."""
        with self._lock:
            return [
                LayerCost(
                    name=name,
                    dropped_bytes=count.dropped_bytes,
                    replay_ms=count.replay_ms(),
                    device=device,
                )
                for name, device in devices.items()
                if (count := self._counts.get(name)) is not None
            ]

    def _note_replay(self, event: ActivationEvent) -> None:
        count = self._counts.get(event.layer_id)
        if count is None or event.kind != "recomputed":
            return
        with self._lock:
            count.replays += 1
            count.replays_ms += event.elapsed_ms
        self._replayed = True


class _Count:
    __slots__ = ("dropped_bytes", "forward_ms", "regions", "replays", "replays_ms")

    def __init__(self) -> None:
        self.regions = 0
        self.dropped_bytes = 0
        self.forward_ms = 0.0
        self.replays = 0
        self.replays_ms = 0.0

    def replay_ms(self) -> float:
        # The first forward of a process warms up its libraries, and tells less than a replay.
        if not self.replays:
            return self.forward_ms
        return self.replays_ms / self.replays * self.regions
