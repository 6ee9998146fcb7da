"""Puts the pieces of an object in order. Knows the writer's contract, not where the bytes go."""

from types import TracebackType
from typing import Protocol, Self

from holdfast import _checks
from holdfast.contracts import EARLY_BYTES, Data, ObjectInfo
from holdfast.errors import ClosedError, StorageError


class Sink(Protocol):
    """Where one object's bytes go, first to last. Used by one thread at a time."""

    def append(self, data: memoryview) -> None:
        """Take the next bytes. They may change once this returns."""

    def publish(self) -> ObjectInfo:
        """Make what was appended the object: whole, durable, at one instant."""

    def discard(self) -> None:
        """Drop everything and release what is held. Called at most once, instead of a
        ``publish`` or after one that failed."""


def announced(size_bytes: int | None) -> int | None:
    """``size_bytes``, or ``ValueError`` unless it can be the size of an object. For backends that
    use it before there is a writer, which checks it too."""
    return None if size_bytes is None else _checks.count("size_bytes", size_bytes, least=0)


class OrderedWriter:
    """``contracts.ObjectWriter`` over a ``Sink``.

    Everything that can be wrong with a sequence of pieces is found here, so that a backend only
    appends. A failure of the sink discards it, and every later call raises ``ClosedError``.
    """

    def __init__(self, key: str, sink: Sink, *, size_bytes: int | None = None) -> None:
        self._key = key
        self._sink: Sink | None = sink
        self._size = announced(size_bytes)
        self._end = 0
        self._early: dict[int, bytes] = {}
        self._early_bytes = 0

    def write_at(self, offset: int, data: Data) -> None:
        sink = self._open_sink()
        _checks.count("offset", offset, least=0)
        piece = memoryview(_checks.data("data", data))
        if not piece.nbytes:
            return
        piece = piece.cast("B")
        if offset < self._end:
            stop = min(self._end, offset + len(piece))
            raise StorageError(f"bytes {offset} to {stop} were written twice", path=self._key)
        if self._size is not None and offset + len(piece) > self._size:
            raise StorageError(
                f"bytes up to {offset + len(piece)} were written, but {self._size} were announced",
                path=self._key,
            )
        if offset > self._end:
            self._hold(offset, piece)
            return
        self._append(sink, piece)
        while self._early and (held := self._early.pop(self._end, None)) is not None:
            self._early_bytes -= len(held)
            self._append(sink, memoryview(held))

    def finish(self) -> ObjectInfo:
        sink = self._open_sink()
        try:
            self._check_complete()
            info = sink.publish()
        except BaseException:
            self.abort()
            raise
        self._sink = None
        return info

    def abort(self) -> None:
        sink, self._sink = self._sink, None
        self._early.clear()
        if sink is not None:
            sink.discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()

    def _open_sink(self) -> Sink:
        if self._sink is None:
            raise ClosedError("the writer was already finished or aborted", path=self._key)
        return self._sink

    def _append(self, sink: Sink, piece: memoryview) -> None:
        try:
            sink.append(piece)
        except BaseException:
            self.abort()
            raise
        self._end += len(piece)

    def _hold(self, offset: int, piece: memoryview) -> None:
        if offset in self._early:
            raise StorageError(f"byte {offset} was written twice", path=self._key)
        if self._early_bytes + len(piece) > EARLY_BYTES:
            raise StorageError(
                f"bytes {self._end} to {offset} are still missing and {self._early_bytes} bytes "
                f"behind them are already held; write an object's bytes in order, or at most "
                f"{EARLY_BYTES} ahead",
                path=self._key,
            )
        self._early[offset] = piece.tobytes()
        self._early_bytes += len(piece)

    def _check_complete(self) -> None:
        if self._early:
            first = min(self._early)
            problem = "were never written" if first > self._end else "were written twice"
            start, stop = sorted((self._end, first))
            raise StorageError(f"bytes {start} to {stop} {problem}", path=self._key)
        if self._size is not None and self._end != self._size:
            raise StorageError(
                f"{self._end} bytes were written, but {self._size} were announced",
                path=self._key,
            )
