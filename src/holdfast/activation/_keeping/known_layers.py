"""The layers a manager has met: what is kept for them and how often they were asked for. Knows ids
and numbers, not tensors."""

import itertools
import threading
from collections.abc import Callable

from holdfast.activation._keeping.held import Held


class KnownLayer:
    """``held`` is what is registered for it, if anything is. ``next(accesses)`` counts one access:
    a single step of the interpreter, so threads lose none and need no lock."""

    __slots__ = ("_looks", "accesses", "held", "size_bytes")

    def __init__(self) -> None:
        self.held: Held | None = None
        self.size_bytes = 0
        self.accesses = itertools.count()
        self._looks = 0

    def access_count(self) -> int:
        """Not thread-safe: looking takes a step too, which is taken off again."""
        count = next(self.accesses) - self._looks
        self._looks += 1
        return count


class KnownLayers:
    """Thread-safe. ``get`` takes no lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._layers: dict[str, KnownLayer] = {}
        self.get = self._layers.get

    def held(self, layer_id: str) -> Held | None:
        """What is registered for a layer."""
        layer = self._layers.get(layer_id)
        return None if layer is None else layer.held

    def registered(self) -> dict[str, Held]:
        with self._lock:
            return {
                layer_id: layer.held
                for layer_id, layer in self._layers.items()
                if layer.held is not None
            }

    def register(self, layer_id: str, held: Held) -> bool:
        """Keep something for a layer; ``False`` if there is something already, which stays."""
        with self._lock:
            layer = self._layers.setdefault(layer_id, KnownLayer())
            if layer.held is not None:
                return False
            layer.size_bytes = held.size_bytes
            layer.held = held
            return True

    def lose(self, layer_id: str, held: Held) -> None:
        """No longer keep this, if it is still what is kept."""
        with self._lock:
            layer = self._layers.get(layer_id)
            if layer is not None and layer.held is held:
                layer.held = None

    def meet(self, layer_id: str, size_bytes: int) -> None:
        """A layer was computed that nothing is registered for."""
        with self._lock:
            self._layers.setdefault(layer_id, KnownLayer()).size_bytes = size_bytes

    def count_access(self, layer_id: str) -> None:
        """To a layer that may not be registered."""
        layer = self._layers.get(layer_id)
        if layer is None:
            with self._lock:
                layer = self._layers.setdefault(layer_id, KnownLayer())
        next(layer.accesses)

    def unkept_bytes(self, is_kept: Callable[[str], bool]) -> int:
        """The bytes of layers that are neither registered nor kept by others."""
        with self._lock:
            unregistered = [
                (layer_id, layer.size_bytes)
                for layer_id, layer in self._layers.items()
                if layer.held is None
            ]
        return sum(size_bytes for layer_id, size_bytes in unregistered if not is_kept(layer_id))

    def by_accesses(self) -> list[tuple[str, int]]:
        """Every layer and how often it was asked for, the most often first."""
        with self._lock:
            counts = [(layer_id, layer.access_count()) for layer_id, layer in self._layers.items()]
        return sorted(counts, key=lambda each: -each[1])
