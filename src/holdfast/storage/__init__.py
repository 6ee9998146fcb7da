"""Bytes by key. Knows nothing of tensors, ranks or checkpoints."""

from typing import TYPE_CHECKING

from holdfast.storage._breaking import breaking
from holdfast.storage._deadlined import deadlined
from holdfast.storage._limited import limited
from holdfast.storage._local import LocalStorage
from holdfast.storage._memory import MemoryStorage
from holdfast.storage._open import StorageOptions, open_storage
from holdfast.storage._retrying import retrying

if TYPE_CHECKING:
    from holdfast.storage._object import ObjectStorage

__all__ = [
    "LocalStorage",
    "MemoryStorage",
    "ObjectStorage",
    "StorageOptions",
    "breaking",
    "deadlined",
    "limited",
    "open_storage",
    "retrying",
]


def __getattr__(name: str) -> object:
    # obstore takes a while to load, and most who import this room open no object store.
    if name == "ObjectStorage":
        from holdfast.storage._object import ObjectStorage  # noqa: PLC0415

        return ObjectStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
