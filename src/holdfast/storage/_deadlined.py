"""Ends every call of a storage in time. Knows threads, and what a call that goes on may touch.

Python cannot stop a thread, so a call that is late goes on in the background. Nothing of the
caller's is in its hands then: it reads into memory of its own and stores a copy, and what it
opens is closed behind it.
"""

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self, TypeVar

from holdfast import _checks
from holdfast.contracts import (
    SMALL_OBJECT_BYTES,
    Data,
    ObjectInfo,
    ObjectWriter,
    ReadRange,
    Storage,
)
from holdfast.errors import ClosedError, OperationTimeoutError
from holdfast.resilience import FaultToleranceHandler
from holdfast.storage._wrapped import Through, WrappedStorage

T = TypeVar("T")

_log = logging.getLogger("holdfast.storage")

_CHANGE_NOTHING = frozenset({"open_writer", "read", "read_into", "list", "stat", "free_bytes"})


class _LateReadError(OperationTimeoutError):
    """A late call that changes nothing, and so may be tried again at once."""

    transient = True


def deadlined(storage: Storage, timeout_s: float) -> Storage:
    """``storage``, whose every call returns within ``timeout_s`` or raises
    ``OperationTimeoutError`` saying what was waited for.

    A call that is late goes on in the background. Late reads are worth trying again
    (``transient``), since they change nothing. Late changes are not: they may still take
    effect, also after a second attempt has. Look what is stored first, or use another key.

    The bound holds for each method call, each ``write_at``, ``finish`` and ``abort`` of a
    writer, and each 1000 entries of a listing. After a late call a writer is closed: what it
    wrote is dropped as soon as that call comes back, and ``abort`` does not wait for it.

    Every call costs a thread. ``read_into`` reads into memory of its own, as large as the ranges
    together, and copies: a late read must not write into the caller's. So do ``create`` and
    ``replace`` with what they store. A late ``write_at`` may still read ``data``, which changes
    nothing that is ever seen, but keeps that memory in use.
    """
    return _DeadlinedStorage(storage, _checks.seconds("timeout_s", timeout_s))


class _DeadlinedStorage(WrappedStorage):
    def __init__(self, storage: Storage, timeout_s: float) -> None:
        super().__init__(storage)
        self._timeout_s = timeout_s
        self._handler = FaultToleranceHandler()

    def open_writer(self, key: str, *, size_bytes: int | None = None) -> ObjectWriter:
        turns = _Turns()
        opened: list[ObjectWriter] = []

        def open_in_turn() -> None:
            turns.take(lambda: opened.append(self._inner.open_writer(key, size_bytes=size_bytes)))

        try:
            self._through("open_writer", key, open_in_turn)
        except OperationTimeoutError:
            turns.end(lambda: _abort_all(opened))
            raise
        return _DeadlinedWriter(opened[0], key, self._through, turns)

    def create(self, key: str, data: Data) -> ObjectInfo:
        return super().create(key, _copied(data))

    def replace(self, key: str, data: Data, expected: str) -> ObjectInfo:
        return super().replace(key, _copied(data), expected)

    def read_into(self, key: str, ranges: Sequence[ReadRange]) -> None:
        private = [
            replace(wanted, into=memoryview(bytearray(wanted.into.nbytes))) for wanted in ranges
        ]
        super().read_into(key, private)
        for wanted, own in zip(ranges, private, strict=True):
            if own.into.nbytes:
                wanted.into.cast("B")[:] = own.into

    def _through(self, method: str, key: str | None, call: Callable[[], T], /) -> T:
        inner: list[OperationTimeoutError] = []
        try:
            return self._handler.execute_with_timeout(
                lambda: _noting_timeouts(call, inner), self._timeout_s
            )
        except OperationTimeoutError as error:
            if any(error is other for other in inner):
                raise
            raise self._late(method, key) from None

    def _late(self, method: str, key: str | None) -> OperationTimeoutError:
        harmless = method in _CHANGE_NOTHING
        what = method if key is None else f"{method} of {key!r}"
        then = (
            "nothing was changed"
            if harmless
            else "it goes on in the background and may still take effect: look what is stored "
            "before doing it again"
        )
        cls = _LateReadError if harmless else OperationTimeoutError
        return cls(
            f"{what} did not finish in {self._timeout_s:g} s on {self.url}; {then}",
            path=key,
            timeout_s=self._timeout_s,
        )


class _DeadlinedWriter:
    def __init__(self, writer: ObjectWriter, key: str, through: Through, turns: "_Turns") -> None:
        self._writer = writer
        self._key = key
        self._through = through
        self._turns = turns

    def write_at(self, offset: int, data: Data) -> None:
        self._in_time("write_at", functools.partial(self._writer.write_at, offset, data))

    def finish(self) -> ObjectInfo:
        return self._in_time("finish", self._writer.finish)

    def abort(self) -> None:
        if not self._turns.over:
            self._in_time("abort", self._writer.abort)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()

    def _in_time(self, method: str, call: Callable[[], T]) -> T:
        try:
            return self._through(method, self._key, lambda: self._turns.take(call))
        except _OverError:
            raise ClosedError(
                "the writer was given up when a call of it did not finish in time", path=self._key
            ) from None
        except OperationTimeoutError:
            self._turns.end(self._writer.abort)
            raise


class _Turns:
    """Calls of several threads, one at a time. ``end`` lets no other begin, and has one last
    thing done when the call that is under way has come back."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self.over = False

    def take(self, call: Callable[[], T]) -> T:
        if self.over:
            raise _OverError
        with self._turn:
            if self.over:
                raise _OverError
            return call()

    def end(self, tidy: Callable[[], object]) -> None:
        self.over = True
        threading.Thread(target=self._tidy, args=(tidy,), name="holdfast:tidy", daemon=True).start()

    def _tidy(self, tidy: Callable[[], object]) -> None:
        with self._turn:
            try:
                tidy()
            except Exception as error:  # noqa: BLE001 -- the thread ends here; nobody waits for it
                _log.debug("what a late call left could not be dropped", exc_info=error)


class _OverError(Exception):
    """The turns have ended."""


def _noting_timeouts(call: Callable[[], T], noted: list[OperationTimeoutError]) -> T:
    """The call's result; timeouts of its own are noted, to be told from ours."""
    try:
        return call()
    except OperationTimeoutError as error:
        noted.append(error)
        raise


def _abort_all(writers: list[ObjectWriter]) -> None:
    for writer in writers:
        writer.abort()


def _copied(data: Data) -> Data:
    """``data`` as bytes that nobody can change; what is too large is left to be refused."""
    view = memoryview(_checks.data("data", data))
    return data if isinstance(data, bytes) or view.nbytes > SMALL_OBJECT_BYTES else view.tobytes()
