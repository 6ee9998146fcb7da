"""A storage in this process's memory. Knows no files; everything is gone when it is."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from holdfast import _checks
from holdfast.contracts import Data, ObjectInfo, ReadRange
from holdfast.errors import ObjectChangedError, ObjectExistsError, ObjectNotFoundError
from holdfast.storage._ordered import OrderedWriter
from holdfast.storage._ranges import check_ranges, small


class MemoryStorage:
    """``contracts.Storage`` in a dictionary, for tests and for trying things out.

    Every write gets a new version, also one of the same bytes. Durable means as long as this
    object lives.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: dict[str, tuple[bytes, ObjectInfo]] = {}
        self._versions = itertools.count(1)

    def __repr__(self) -> str:
        return f"MemoryStorage({self.url!r})"

    @property
    def url(self) -> str:
        return f"memory://{id(self):x}"

    def open_writer(self, key: str, *, size_bytes: int | None = None) -> OrderedWriter:
        sink = _MemorySink(_checks.key("key", key), self._publish)
        return OrderedWriter(key, sink, size_bytes=size_bytes)

    def create(self, key: str, data: Data) -> ObjectInfo:
        stored = small(_checks.data("data", data), _checks.key("key", key)).tobytes()
        with self._lock:
            if key in self._objects:
                raise ObjectExistsError("the key is taken", path=key)
            return self._put(key, stored)

    def replace(self, key: str, data: Data, expected: str) -> ObjectInfo:
        stored = small(_checks.data("data", data), _checks.key("key", key)).tobytes()
        with self._lock:
            self._check_version(key, expected)
            return self._put(key, stored)

    def read(self, key: str) -> bytes:
        _checks.key("key", key)
        with self._lock:
            return self._get(key)[0]

    def read_into(self, key: str, ranges: Sequence[ReadRange]) -> None:
        stored = memoryview(self.read(key))
        check_ranges(ranges, len(stored), key)
        for wanted in ranges:
            end = wanted.start + wanted.into.nbytes
            if wanted.into.nbytes:  # an empty view of several dimensions cannot be cast
                wanted.into.cast("B")[:] = stored[wanted.start : end]

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        with self._lock:
            infos = [info for key, (_, info) in self._objects.items() if key.startswith(prefix)]
        return iter(sorted(infos, key=lambda info: info.key))

    def stat(self, key: str) -> ObjectInfo:
        _checks.key("key", key)
        with self._lock:
            return self._get(key)[1]

    def delete(self, key: str, *, expected: str | None = None) -> None:
        _checks.key("key", key)
        with self._lock:
            if expected is not None and key in self._objects:
                self._check_version(key, expected)
            self._objects.pop(key, None)

    def free_bytes(self) -> int | None:
        return None

    def sweep(self, older_than_s: float) -> int:
        _checks.seconds("older_than_s", older_than_s, zero=True)
        return 0

    def _publish(self, key: str, data: bytes) -> ObjectInfo:
        with self._lock:
            return self._put(key, data)

    def _get(self, key: str) -> tuple[bytes, ObjectInfo]:
        try:
            return self._objects[key]
        except KeyError:
            raise ObjectNotFoundError("there is no such object", path=key) from None

    def _check_version(self, key: str, expected: str) -> None:
        found = self._get(key)[1].version
        if found != expected:
            raise ObjectChangedError(f"expected version {expected}, found {found}", path=key)

    def _put(self, key: str, data: bytes) -> ObjectInfo:
        info = ObjectInfo(
            key=key, size_bytes=len(data), version=str(next(self._versions)), modified_s=time.time()
        )
        self._objects[key] = (data, info)
        return info


class _MemorySink:
    def __init__(self, key: str, publish: Callable[[str, bytes], ObjectInfo]) -> None:
        self._key = key
        self._publish = publish
        self._data = bytearray()

    def append(self, data: memoryview) -> None:
        self._data += data

    def publish(self) -> ObjectInfo:
        return self._publish(self._key, bytes(self._data))

    def discard(self) -> None:
        self._data.clear()
