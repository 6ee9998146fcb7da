"""How much memory kept activations take. Knows numbers, not tensors."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStats:
    """What a ``CheckpointManager`` keeps, as of one moment. Views of one storage count once.

    ``current_memory_used`` and ``peak_memory_used``
        bytes in memory on the manager's account, registered or held for regions: now, and at most
        since it was made or ``reset_peak()``.
    ``checkpoint_count`` and ``average_memory_per_checkpoint``
        registered layers, and the bytes of one, wherever they are.
    ``memory_savings``
        bytes that storing everything would have in memory and that are not: moved by the tier,
        dropped by regions, replayed or not, until their graph is freed, and of layers the cache
        did not keep.
    ``moved_bytes``
        what of these the tier has moved.
    ``most_accessed`` and ``least_accessed``
        up to five layers each, with how often they were retrieved.
    """

    current_memory_used: int
    peak_memory_used: int
    checkpoint_count: int
    average_memory_per_checkpoint: int
    memory_savings: int
    moved_bytes: int
    most_accessed: tuple[tuple[str, int], ...]
    least_accessed: tuple[tuple[str, int], ...]


class MemoryAccount:
    """Bytes in memory and bytes moved. Not thread-safe: whoever counts holds a lock."""

    __slots__ = ("current", "moved", "peak")

    def __init__(self) -> None:
        self.current = 0
        self.peak = 0
        self.moved = 0

    def add(self, size_bytes: int) -> None:
        """Count bytes that came into memory; a negative number, that left it."""
        self.current += size_bytes
        self.peak = max(self.peak, self.current)

    def reset_peak(self) -> None:
        self.peak = self.current
