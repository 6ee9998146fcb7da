"""The manager of regions that were given none. One a process, made when first needed."""

import threading

from holdfast.activation._keeping.manager import CheckpointManager

_lock = threading.Lock()
_made: list[CheckpointManager] = []


def default_manager() -> CheckpointManager:
    """The manager ``checkpoint()`` uses unless it is given another: it keeps nothing itself; its
    ``get_memory_stats()`` and its engine's ``get_stats()`` tell what checkpointing does. If it was
    closed, there is a new one. Thread-safe."""
    if _made and not _made[0].closed:
        return _made[0]
    with _lock:
        if not _made or _made[0].closed:
            _made[:] = [CheckpointManager()]
        return _made[0]
