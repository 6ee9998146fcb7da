"""Keeps a storage's traffic below a rate. Knows payload bytes and time, not who sends them."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from holdfast import _checks
from holdfast.contracts import (
    SMALL_OBJECT_BYTES,
    Clock,
    Data,
    ObjectInfo,
    ObjectWriter,
    ReadRange,
    Storage,
)
from holdfast.errors import TransientStorageError
from holdfast.resilience import SystemClock
from holdfast.storage._wrapped import Through, WrappedStorage, WrappedWriter

_PIECE_S: Final = 0.25
_LEAST_PIECE: Final = 64 * 1024
_MOST_PIECE: Final = 64 * 1024 * 1024


def limited(
    storage: Storage,
    *,
    read_bytes_per_s: float | None = None,
    write_bytes_per_s: float | None = None,
    clock: Clock | None = None,
) -> Storage:
    """``storage``, with its payload bytes kept below a rate; ``None`` means no limit.

    All threads share the rate, and wait without holding up one another's calls. In any t
    seconds at most ``rate * t`` bytes and one piece more are let through: a piece is a quarter of
    a second's worth, at least 64 KiB and at most 64 MiB. ``read_into`` and ``write_at`` go
    piece by piece; ``create`` and ``replace`` wait first; ``read`` waits afterwards, when the
    size is known.

    An object that is replaced while ``read_into`` is between two of its pieces is a
    ``TransientStorageError``, not a mixture, unless its version is what it was once all are read:
    an object store gives equal bytes the same one. Names, sizes and listings are not counted.
    """
    clock = SystemClock() if clock is None else _checks.clock("clock", clock)
    reads = _bucket("read_bytes_per_s", read_bytes_per_s, clock)
    writes = _bucket("write_bytes_per_s", write_bytes_per_s, clock)
    return _LimitedStorage(storage, reads, writes)


class _Bucket:
    """Tokens for bytes, one piece of them at most. May be overdrawn by whoever then waits."""

    def __init__(self, bytes_per_s: float, clock: Clock) -> None:
        self.piece_bytes = int(min(_MOST_PIECE, max(_LEAST_PIECE, bytes_per_s * _PIECE_S)))
        self._rate = bytes_per_s
        self._clock = clock
        self._lock = threading.Lock()
        self._tokens = float(self.piece_bytes)
        self._counted_s = clock.now()

    def pay(self, size_bytes: int) -> None:
        """Return when ``size_bytes`` may pass."""
        with self._lock:
            now = self._clock.now()
            earned = (now - self._counted_s) * self._rate
            self._counted_s = now
            self._tokens = min(self.piece_bytes, self._tokens + earned) - size_bytes
            wait_s = -self._tokens / self._rate
        if wait_s > 0:
            self._clock.sleep(wait_s)


class _LimitedStorage(WrappedStorage):
    def __init__(self, storage: Storage, reads: _Bucket | None, writes: _Bucket | None) -> None:
        super().__init__(storage)
        self._reads = reads
        self._writes = writes

    def open_writer(self, key: str, *, size_bytes: int | None = None) -> ObjectWriter:
        writer = self._inner.open_writer(key, size_bytes=size_bytes)
        if self._writes is None:
            return writer
        return _LimitedWriter(writer, key, self._through, self._writes)

    def create(self, key: str, data: Data) -> ObjectInfo:
        self._pay_for(data)
        return self._inner.create(key, data)

    def replace(self, key: str, data: Data, expected: str) -> ObjectInfo:
        self._pay_for(data)
        return self._inner.replace(key, data, expected)

    def read(self, key: str) -> bytes:
        data = self._inner.read(key)
        if self._reads is not None:
            self._reads.pay(len(data))
        return data

    def read_into(self, key: str, ranges: Sequence[ReadRange]) -> None:
        if self._reads is None:
            self._inner.read_into(key, ranges)
        elif sum(wanted.into.nbytes for wanted in ranges) <= self._reads.piece_bytes:
            self._reads.pay(sum(wanted.into.nbytes for wanted in ranges))
            self._inner.read_into(key, ranges)
        else:
            self._read_in_pieces(key, ranges, self._reads)

    def _read_in_pieces(self, key: str, ranges: Sequence[ReadRange], reads: _Bucket) -> None:
        version = self._inner.stat(key).version
        for piece in _pieces(ranges, reads.piece_bytes):
            reads.pay(sum(wanted.into.nbytes for wanted in piece))
            self._inner.read_into(key, piece)
        if self._inner.stat(key).version != version:
            raise TransientStorageError(
                "the object was replaced while it was being read; read it again", path=key
            )

    def _pay_for(self, data: Data) -> None:
        size_bytes = memoryview(_checks.data("data", data)).nbytes
        if self._writes is not None and size_bytes <= SMALL_OBJECT_BYTES:
            self._writes.pay(size_bytes)


class _LimitedWriter(WrappedWriter):
    def __init__(self, writer: ObjectWriter, key: str, through: Through, writes: _Bucket) -> None:
        super().__init__(writer, key, through)
        self._writes = writes

    def write_at(self, offset: int, data: Data) -> None:
        _checks.count("offset", offset, least=0)
        view = memoryview(_checks.data("data", data))
        if view.nbytes <= self._writes.piece_bytes:
            self._writes.pay(view.nbytes)
            self._writer.write_at(offset, data)
            return
        for start, piece in _cut(view, self._writes.piece_bytes):
            self._writes.pay(len(piece))
            self._writer.write_at(offset + start, piece)


def _pieces(ranges: Sequence[ReadRange], most: int) -> Iterator[list[ReadRange]]:
    """The ranges, those that are too large in parts, in groups of at most ``most`` bytes."""
    group: list[ReadRange] = []
    room = most
    for wanted in ranges:
        for start, part in _cut(wanted.into, most):
            if len(part) > room:
                yield group
                group, room = [], most
            group.append(replace(wanted, start=wanted.start + start, into=part))
            room -= len(part)
    if group:
        yield group


def _cut(view: memoryview, most: int) -> Iterator[tuple[int, memoryview]]:
    if not view.nbytes:
        yield 0, memoryview(bytearray())
        return
    flat = view.cast("B")
    for start in range(0, len(flat), most):
        yield start, flat[start : start + most]


def _bucket(name: str, bytes_per_s: float | None, clock: Clock) -> _Bucket | None:
    if bytes_per_s is None:
        return None
    return _Bucket(_checks.between(name, bytes_per_s, 1), clock)
