"""Collects the recomputations of a block of code. Knows events, not the engine they are from."""

import contextlib
from collections.abc import Iterator

from holdfast.activation._events import ActivationEvent, Subscribers

_HEAD = ("layer", "calls", "failed", "total ms", "mean ms", "bytes")


class RecomputationProfile:
    """Every recomputation that ended while the block ran, on any thread. Thread-safe."""

    __slots__ = ("_events",)

    def __init__(self) -> None:
        self._events: list[ActivationEvent] = []

    @property
    def events(self) -> tuple[ActivationEvent, ...]:
        """``recomputed`` and ``failed``, with layer, time and size, in the order they ended."""
        return tuple(self._events)

    def add(self, event: ActivationEvent) -> None:
        """Take one more event."""
        self._events.append(event)

    def report(self) -> str:
        """A table of the layers, the one that took longest first. Times and bytes are those of
        all recomputations of the layer that gave a result; ``-`` where nothing is known of it."""
        by_layer: dict[str, list[ActivationEvent]] = {}
        for event in self.events:
            by_layer.setdefault(event.layer_id, []).append(event)
        rows = sorted(map(_row, by_layer.values()), reverse=True)
        table = [_HEAD, *(cells for _, cells in rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        return "\n".join(_line(cells, widths) for cells in table)


@contextlib.contextmanager
def profiling(subscribers: Subscribers) -> Iterator[RecomputationProfile]:
    """A profile that takes every event until the block ends."""
    profile = RecomputationProfile()
    unsubscribe = subscribers.add(profile.add)
    try:
        yield profile
    finally:
        unsubscribe()


def _row(events: list[ActivationEvent]) -> tuple[float, tuple[str, ...]]:
    done = [event for event in events if event.kind == "recomputed"]
    total_ms = sum(event.elapsed_ms for event in done)
    return total_ms, (
        events[0].layer_id,
        f"{len(done)}",
        f"{len(events) - len(done)}",
        f"{total_ms:.3f}",
        f"{total_ms / len(done):.3f}" if done else "-",
        f"{sum(event.size_bytes for event in done) or '-'}",
    )


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    (layer, *numbers), (first, *others) = cells, widths
    aligned = (number.rjust(width) for number, width in zip(numbers, others, strict=True))
    return "  ".join([layer.ljust(first), *aligned])
