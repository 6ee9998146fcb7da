"""A storage in this process's memory. Knows no files; everything is gone when it is."""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self

from holdfast import _checks
from holdfast.contracts import SMALL_OBJECT_BYTES, Data, ObjectInfo, ReadRange
from holdfast.errors import (
    ClosedError,
    ObjectChangedError,
    ObjectExistsError,
    ObjectNotFoundError,
    StorageError,
)


class MemoryStorage:
    """``contracts.Storage`` in a dictionary, for tests and for trying things out.

    Every write gets a new version, also one of the same bytes. Durable means as long as this
    object lives.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: dict[str, tuple[bytes, ObjectInfo]] = {}
        self._versions = itertools.count(1)

    @property
    def url(self) -> str:
        return f"memory://{id(self):x}"

    def open_writer(self, key: str) -> "MemoryWriter":
        return MemoryWriter(_checks.key("key", key), publish=self._publish)

    def create(self, key: str, data: Data) -> ObjectInfo:
        stored = _small(_checks.key("key", key), data)
        with self._lock:
            if key in self._objects:
                raise ObjectExistsError("the key is taken", path=key)
            return self._put(key, stored)

    def replace(self, key: str, data: Data, expected: str) -> ObjectInfo:
        stored = _small(_checks.key("key", key), data)
        with self._lock:
            _, info = self._get(key)
            if info.version != expected:
                raise ObjectChangedError(
                    f"expected version {expected}, found {info.version}", path=key
                )
            return self._put(key, stored)

    def read(self, key: str) -> bytes:
        _checks.key("key", key)
        with self._lock:
            return self._get(key)[0]

    def read_into(self, key: str, ranges: Sequence[ReadRange]) -> None:
        stored = memoryview(self.read(key))
        for wanted in ranges:
            end = wanted.start + wanted.into.nbytes
            if wanted.start < 0 or end > len(stored):
                raise StorageError(
                    f"bytes {wanted.start} to {end} are not inside the object of {len(stored)}",
                    path=key,
                )
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

    def delete(self, key: str) -> None:
        _checks.key("key", key)
        with self._lock:
            self._objects.pop(key, None)

    def free_bytes(self) -> int | None:
        return None

    def _publish(self, key: str, data: bytes) -> ObjectInfo:
        with self._lock:
            return self._put(key, data)

    def _get(self, key: str) -> tuple[bytes, ObjectInfo]:
        try:
            return self._objects[key]
        except KeyError:
            raise ObjectNotFoundError("there is no such object", path=key) from None

    def _put(self, key: str, data: bytes) -> ObjectInfo:
        info = ObjectInfo(key=key, size_bytes=len(data), version=str(next(self._versions)))
        self._objects[key] = (data, info)
        return info


class MemoryWriter:
    """``contracts.ObjectWriter`` that collects pieces and joins them in ``finish``."""

    def __init__(self, key: str, *, publish: Callable[[str, bytes], ObjectInfo]) -> None:
        self._key = key
        self._publish = publish
        self._pieces: dict[int, bytes] | None = {}

    def write_at(self, offset: int, data: Data) -> None:
        pieces = self._open_pieces()
        piece = memoryview(_checks.data("data", data)).tobytes()
        if offset < 0:
            raise ValueError(f"offset must be 0 or more, not {offset!r}")
        if offset in pieces:
            raise StorageError(f"byte {offset} was already written", path=self._key)
        if piece:
            pieces[offset] = piece

    def finish(self) -> ObjectInfo:
        end = 0
        pieces = sorted(self._open_pieces().items())
        for offset, piece in pieces:
            if offset > end:
                raise StorageError(f"bytes {end} to {offset} were never written", path=self._key)
            if offset < end:
                raise StorageError(f"bytes {offset} to {end} were written twice", path=self._key)
            end += len(piece)
        self._pieces = None
        return self._publish(self._key, b"".join(piece for _, piece in pieces))

    def abort(self) -> None:
        self._pieces = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()

    def _open_pieces(self) -> dict[int, bytes]:
        if self._pieces is None:
            raise ClosedError("the writer was already finished or aborted", path=self._key)
        return self._pieces


def _small(key: str, data: Data) -> bytes:
    view = memoryview(_checks.data("data", data))
    if view.nbytes > SMALL_OBJECT_BYTES:
        raise StorageError(
            f"{view.nbytes} bytes are more than the {SMALL_OBJECT_BYTES} that one request "
            "stores; use open_writer",
            path=key,
        )
    return view.tobytes()
