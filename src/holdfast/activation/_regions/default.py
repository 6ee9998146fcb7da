"""The manager of regions that were given none. One a process, made when first needed."""

import functools

from holdfast.activation._keeping.manager import CheckpointManager


@functools.cache
def default_manager() -> CheckpointManager:
    """The manager ``checkpoint()`` uses unless it is given another: it keeps nothing itself; its
    ``get_memory_stats()`` and its engine's ``get_stats()`` tell what checkpointing does."""
    return CheckpointManager()
