"""Keeps tensors where they are, and counts the memory they stand on. Moves nothing."""

import collections
import threading
import weakref
from typing import Any

from holdfast.activation._keeping.geometry import version_of
from holdfast.activation._keeping.held import changed, closed
from holdfast.activation._keeping.memory_stats import MemoryAccount
from holdfast.activation._storages import storages


class InPlaceTier:
    """References to tensors. Thread-safe; reading one takes no lock.

    A storage counts once, however many tensors lie in it, and until the last of them is dropped.
    """

    moves = False

    def __init__(self, lock: threading.Lock, account: MemoryAccount) -> None:
        self._lock = lock
        self._account = account
        self._footprints: dict[int, _FootprintRef] = {}
        self._living: set[_FootprintRef] = set()
        self._gone: collections.deque[_FootprintRef] = collections.deque()
        self.closed = False

    def hold(self, tensor: Any, layer_id: str, *, lasting: bool) -> "KeptTensor":  # noqa: ARG002
        alias = tensor.detach()
        found = storages(alias)
        with self._lock:
            if self.closed:
                raise closed()
            self.tidy()
            parts = tuple(map(self._footprint, found))
        return KeptTensor(self, alias, layer_id, parts)

    def tidy(self) -> None:
        """Count what was dropped. The caller holds the lock."""
        while self._gone:
            gone = self._gone.popleft()
            self._living.remove(gone)
            self._account.add(-gone.size_bytes)
            if self._footprints.get(gone.key) is gone:  # else the address is another storage's now
                del self._footprints[gone.key]

    def trim(self) -> None:
        """Nothing is kept that nobody holds."""

    def close(self) -> None:
        self.closed = True

    def _footprint(self, storage: Any) -> "_Footprint":
        key = storage._cdata  # noqa: SLF001
        known = self._footprints.get(key)
        shared = None if known is None else known()
        # Compared, for the address of a storage that is gone is soon another's.
        if shared is not None and shared.storage() is storage:
            return shared
        footprint = _Footprint(storage)
        # Told in any thread, at any point of its work: that must not wait for a lock.
        reference = _FootprintRef(footprint, self._gone.append)
        reference.key, reference.size_bytes = key, footprint.size_bytes
        self._living.add(reference)
        self._footprints[key] = reference
        self._account.add(footprint.size_bytes)
        return footprint


class KeptTensor:
    """A ``Held`` whose tensor is in memory. ``get`` gives the same object each time."""

    __slots__ = ("_alias", "_tier", "_version", "layer_id", "parts")

    def __init__(
        self, tier: InPlaceTier, alias: Any, layer_id: str, parts: "tuple[_Footprint, ...]"
    ) -> None:
        self._tier = tier
        self._alias = alias
        self._version = version_of(alias)
        self.layer_id = layer_id
        self.parts = parts

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)

    def get(self) -> Any:
        alias = self._alias
        if self._tier.closed:
            raise closed()
        if self._version >= 0 and alias._version != self._version:  # noqa: SLF001
            raise changed(self.layer_id)
        return alias


class _Footprint:
    """One storage, on account as long as a tensor that lies in it is kept."""

    __slots__ = ("__weakref__", "size_bytes", "storage")

    def __init__(self, storage: Any) -> None:
        self.storage = weakref.ref(storage)
        self.size_bytes: int = storage.nbytes()


class _FootprintRef(weakref.ref[_Footprint]):
    """Knows what is to be taken off the account when the footprint is gone."""

    __slots__ = ("key", "size_bytes")

    key: int
    size_bytes: int
