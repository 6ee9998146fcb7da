"""Bytes by key. Knows nothing of tensors, ranks or checkpoints."""

from holdfast.storage._memory import MemoryStorage

__all__ = ["MemoryStorage"]
