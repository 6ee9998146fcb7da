"""Reads what is stored, not what this machine remembers of it. Knows nothing of how."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from holdfast.contracts import ReadRange
from holdfast.errors import StorageError, TransientStorageError
from holdfast.storage._wrapped import WrappedStorage

_TRIES: Final = 10


class UncachedStorage(WrappedStorage):
    """A storage whose every read is ``uncached``, for who verifies."""

    def read(self, key: str) -> bytes:
        for _ in range(_TRIES):
            before = self.stat(key)
            data = bytearray(before.size_bytes)
            try:
                self.read_into(key, [ReadRange(start=0, into=memoryview(data))])
            except StorageError:
                if self.stat(key).version == before.version:
                    raise
                continue  # it was replaced, perhaps by a shorter one
            if self.stat(key).version == before.version:
                return bytes(data)
            # Else this may be the beginning of a longer one.
        raise TransientStorageError(
            f"the object was replaced each of the {_TRIES} times that it was read", path=key
        )

    def read_into(self, key: str, ranges: Sequence[ReadRange]) -> None:
        super().read_into(key, [replace(wanted, uncached=True) for wanted in ranges])
