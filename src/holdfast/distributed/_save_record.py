"""What a save took, of one rank: bytes and seconds. Knows numbers, not how a save goes."""

import concurrent.futures
import contextlib
import logging
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from holdfast.contracts import Clock
from holdfast.distributed._progress import bytes_in_words
from holdfast.errors import RankFailedError
from holdfast.resilience import SystemClock
from holdfast.resilience._operation import name_of

_log = logging.getLogger("holdfast.distributed")

_GIB: Final = 2**30

Timed = Literal["stall", "copy", "agree", "begin", "write", "fsync", "commit"]
"""What seconds are counted for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRecord:
    """What one save took on one rank. ``str`` of it is a line for a log.

    ``prefix``: ``None`` if the save failed before it had one. ``step``: as in ``SaveOptions``.
    ``state_bytes``: what is this rank's to save. Of that, ``written_bytes`` were written and
    ``referred_bytes`` are in an earlier checkpoint already.
    ``stall_s``: how long the training was held up: the call itself and, if ``is_async``, the waits
    before optimizer steps. ``predicted_stall_s``: what was expected when the save began, if it
    could be told.
    ``copy_s``: copying to staging memory, of all threads together. ``agree_s``, ``begin_s``,
    ``write_s`` and ``commit_s``: the phases. ``fsync_s``: of ``write_s``, making files durable.
    ``total_s``: from the call until the checkpoint was durable, or the save had failed.
    ``error``: ``None``, or why there is no checkpoint; ``was_cancelled`` if somebody wanted that.
    """

    prefix: str | None
    step: int | None
    rank: int
    world_size: int
    is_async: bool
    state_bytes: int
    written_bytes: int
    referred_bytes: int
    stall_s: float
    predicted_stall_s: float | None
    copy_s: float
    agree_s: float
    begin_s: float
    write_s: float
    fsync_s: float
    commit_s: float
    total_s: float
    error: str | None = None
    was_cancelled: bool = False

    @property
    def bytes_per_s(self) -> float:
        """Bytes written in a second, over the whole save."""
        return self.written_bytes / self.total_s if self.total_s > 0 else 0.0

    def __str__(self) -> str:
        return f"{self._outcome()}; training waited {self._waited()}"

    def _outcome(self) -> str:
        if self.was_cancelled:
            return f"the save{self._of_what()} was cancelled after {self.total_s:.2f} s"
        if self.error is not None:
            return f"the save{self._of_what()} failed after {self.total_s:.2f} s: {self.error}"
        unchanged = bytes_in_words(self.referred_bytes)
        beside = f" beside {unchanged} unchanged" if self.referred_bytes else ""
        return (
            f"saved{self._of_what(of='')}: {bytes_in_words(self.written_bytes)}{beside} in "
            f"{self.total_s:.2f} s, {self.bytes_per_s / _GIB:.2f} GiB/s"
        )

    def _of_what(self, of: str = " of") -> str:
        step = "" if self.step is None else f"step {self.step}"
        ranks = "" if self.world_size == 1 else f"rank {self.rank} of {self.world_size}"
        facts = ", ".join(filter(None, (step, ranks)))
        if self.prefix is None:
            return f"{of} {facts}" if facts else ""
        return f"{of} {self.prefix} ({facts})" if facts else f"{of} {self.prefix}"

    def _waited(self) -> str:
        if self.predicted_stall_s is None:
            return f"{self.stall_s:.3f} s"
        return f"{self.stall_s:.3f} s, {self.predicted_stall_s:.3f} s were predicted"


class Timings:
    """Adds up the seconds of one save, whose beginning is when this is made. Thread-safe."""

    def __init__(self, *, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._began_s = self._clock.now()
        self._lock = threading.Lock()
        self._seconds: dict[Timed, float] = {}

    @contextlib.contextmanager
    def measure(self, what: Timed) -> Iterator[None]:
        """Add the time of this block, also if it fails. Blocks at the same time count each."""
        start_s = self._clock.now()
        try:
            yield
        finally:
            self.add(what, self._clock.now() - start_s)

    def add(self, what: Timed, seconds: float) -> None:
        with self._lock:
            self._seconds[what] = self._seconds.get(what, 0.0) + seconds

    def seconds(self, what: Timed) -> float:
        """What was added so far."""
        with self._lock:
            return self._seconds.get(what, 0.0)

    def elapsed_s(self) -> float:
        """Since the beginning."""
        return self._clock.now() - self._began_s

    def record(
        self,
        *,
        prefix: str | None,
        step: int | None,
        rank: int,
        world_size: int,
        is_async: bool,
        state_bytes: int,
        written_bytes: int,
        referred_bytes: int = 0,
        predicted_stall_s: float | None = None,
        error: BaseException | None = None,
    ) -> SaveRecord:
        """A save that ends now. One that is not ``is_async`` holds the training up all the time."""
        total_s = self.elapsed_s()
        return SaveRecord(
            prefix=prefix,
            step=step,
            rank=rank,
            world_size=world_size,
            is_async=is_async,
            state_bytes=state_bytes,
            written_bytes=written_bytes,
            referred_bytes=referred_bytes,
            stall_s=self.seconds("stall") if is_async else total_s,
            predicted_stall_s=predicted_stall_s,
            copy_s=self.seconds("copy"),
            agree_s=self.seconds("agree"),
            begin_s=self.seconds("begin"),
            write_s=self.seconds("write"),
            fsync_s=self.seconds("fsync"),
            commit_s=self.seconds("commit"),
            total_s=total_s,
            error=None if error is None else _in_one_line(error),
            was_cancelled=error is not None and is_cancellation(error),
        )


OnSave = Callable[[SaveRecord], None]


def log_record(record: SaveRecord) -> None:
    """Say how a save went. A failed one in the background is an error; any other was raised."""
    failed = record.error is not None and not record.was_cancelled
    _log.log(logging.ERROR if failed and record.is_async else logging.INFO, "%s", record)


def tell_of_save(on_save: OnSave | None, record: SaveRecord) -> None:
    """Hand the record to a user's function. What that raises is logged: the save has ended."""
    if on_save is None:
        return
    # A thread in the background has yet to tell those who wait, so nothing may end it.
    logged = BaseException if record.is_async else Exception
    try:
        on_save(record)
    except logged:
        _log.exception("on_save=%s failed on the record: %s", name_of(on_save), record)


def is_cancellation(error: BaseException) -> bool:
    """Whether the save was cancelled, on this rank or, as is told of it, on another."""
    kind = concurrent.futures.CancelledError
    if isinstance(error, RankFailedError):
        return error.error_type == kind.__name__
    return isinstance(error, kind)


def _in_one_line(error: BaseException) -> str:
    """Without notes, which may be whole tracebacks. Never fails, also if the error's own methods
    do."""
    told = str(traceback.TracebackException(type(error), error, None))
    return " ".join(f"{type(error).__name__}: {told}".split()).removesuffix(":")
