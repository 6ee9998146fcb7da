"""How something in the background ended, for all who wait for it. Knows errors, threads and
callbacks, not what it was."""

import concurrent.futures
import logging
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from holdfast.distributed._progress import Progress
from holdfast.distributed._save_record import SaveRecord, is_cancellation
from holdfast.resilience._operation import name_of

_log = logging.getLogger("holdfast.distributed")


@dataclass(slots=True, kw_only=True, eq=False)
class Ending:
    """What a handle and its promise share. Thread-safe; attributes are for reading."""

    step: int | None
    now: Callable[[], Progress | None]
    on_cancel: Callable[[], bool] | None
    prefix: str | None = None
    record: SaveRecord | None = None
    error: BaseException | None = None
    stopping: bool = False
    is_over: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _callbacks: list[Callable[[], object]] = field(default_factory=list)
    _context: BaseException | None = None
    _was_seen: bool = False

    def is_cancelled(self) -> bool:
        return isinstance(self.error, concurrent.futures.CancelledError)

    def cancel(self) -> bool:
        on_cancel = self.on_cancel
        agreed = on_cancel is not None and on_cancel()  # without the lock: it may end the save
        with self._lock:
            if self.is_over.is_set():
                return self.is_cancelled()
            self.stopping = self.stopping or agreed
            return agreed

    def as_told(self, error: BaseException) -> BaseException:
        return _as_cancelled(error) if self.stopping or is_cancellation(error) else error

    def end(self, error: BaseException | None, record: SaveRecord) -> None:
        last = self.now()
        with self._lock:
            if self.is_over.is_set():
                raise RuntimeError("a save ends once, and this one has ended before")
            if error is not None:
                self._keep(error)
            self.record = record
            self.now = lambda: last
            self.on_cancel = None
            self.is_over.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            _call(callback, BaseException)  # one must not keep this thread from telling the others

    def _keep(self, error: BaseException) -> None:
        told = traceback.TracebackException.from_exception(error)
        told.__notes__ = None  # which it has anyway
        for each in _chain(error):
            each.__traceback__ = None
        error.add_note(f"In the background:\n{''.join(told.format()).rstrip()}")
        self.error, self._context = error, error.__context__

    def add_callback(self, callback: Callable[[], object]) -> None:
        with self._lock:
            if not self.is_over.is_set():
                self._callbacks.append(callback)
                return
        _call(callback, Exception)

    def drop_callback(self, callback: Callable[[], object]) -> None:
        with self._lock:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

    def outcome(self) -> str:
        """The prefix, if it is over, or raise. However often an error is raised, and in the midst
        of whatever other errors, it tells what it did at first."""
        error = self.seen_error()
        if error is None:
            assert self.prefix is not None  # noqa: S101 -- set before the end
            return self.prefix
        error.__context__ = self._context
        try:
            raise error.with_traceback(None)
        finally:
            del error, self  # or the error would keep this frame, and the frame the error

    def seen_error(self) -> BaseException | None:
        with self._lock:
            self._was_seen = self._was_seen or self.error is not None
            return self.error

    def take_unseen(self) -> BaseException | None:
        with self._lock:
            if self._was_seen or self.is_cancelled():
                return None
            self._was_seen = self.error is not None
            return self.error


def _call(callback: Callable[[], object], logged: type[BaseException]) -> None:
    try:
        callback()
    except logged:
        _log.exception("the callback %s of a save failed", name_of(callback))


def _as_cancelled(error: BaseException) -> BaseException:
    if isinstance(error, concurrent.futures.CancelledError):
        return error
    cancelled = concurrent.futures.CancelledError("the save was cancelled")
    cancelled.__cause__ = error
    return cancelled


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error, and all that led to it."""
    known: set[int] = set()
    found: list[BaseException | None] = [error]
    while found:
        each = found.pop()
        if each is None or id(each) in known:
            continue
        known.add(id(each))
        yield each
        found += (each.__cause__, each.__context__)
        if isinstance(each, BaseExceptionGroup):
            found += each.exceptions
