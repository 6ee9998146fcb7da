"""The regions a manager watches. Knows them weakly, and what they have dropped."""

import collections
import threading
import weakref
from typing import Protocol


class Watched(Protocol):
    """A checkpointed region, as far as a manager knows one."""

    name: str
    forward_ms: float

    def dropped_bytes(self) -> int: ...


class WatchedRegions:
    """Regions for as long as they live. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._regions: dict[int, weakref.ref[Watched]] = {}
        self._gone: collections.deque[weakref.ref[Watched]] = collections.deque()

    def add(self, region: Watched) -> None:
        # Regions die in any thread, at any point of its work: their end must not wait for a lock.
        ref = weakref.ref(region, self._gone.append)
        with self._lock:
            self._forget()
            self._regions[id(ref)] = ref

    def dropped_bytes(self) -> int:
        """What the living ones have dropped."""
        with self._lock:
            self._forget()
            regions = list(self._regions.values())
        return sum(region.dropped_bytes() for ref in regions if (region := ref()) is not None)

    def _forget(self) -> None:
        while self._gone:
            del self._regions[id(self._gone.popleft())]
