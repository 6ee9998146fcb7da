"""How far a save or a load has come. Knows bytes and phases, not what is done with them."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal, Self

from holdfast.contracts import Clock
from holdfast.resilience import SystemClock

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

Operation = Literal["save", "load"]

EVERY_S: Final = 0.1
"""A callback hears no more often than this while a phase lasts."""

_KIBI: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far one rank is in one phase of an operation.

    ``done_bytes`` never falls within a phase and is ``total_bytes`` exactly when the phase is
    complete, or has nothing to count.
    """

    operation: Operation
    phase: str
    done_bytes: int
    total_bytes: int
    rank: int


ProgressCallback = Callable[[Progress], None]


class ProgressMeter:
    """Counts the bytes of one operation on one rank, and tells a callback. Thread-safe.

    The callback hears of the beginning and the end of every phase, and at most every 0.1 s in
    between. It is never called twice at the same time; while it runs, other threads go on.
    What it raises is raised by the call that told it, and by every later one: no retry can go
    on after it.
    """

    def __init__(
        self,
        callback: ProgressCallback | None,
        *,
        operation: Operation,
        rank: int = 0,
        clock: Clock | None = None,
    ) -> None:
        self._callback = callback
        self._operation: Operation = operation
        self._rank = rank
        self._clock = clock or SystemClock()
        self._telling = threading.Lock()
        self._counting = threading.Lock()
        self._phase = ""
        self._done = self._total = 0
        self._told_s = 0.0
        self._error: BaseException | None = None

    @contextlib.contextmanager
    def phase(self, phase: str, total_bytes: int = 0) -> Iterator[None]:
        """Count from 0 to ``total_bytes`` in this block. One that ends without an error is
        complete, whatever was counted: compressed bytes are fewer, repeated ones more."""
        with self._counting:
            self._phase, self._done, self._total = phase, 0, total_bytes
        with self._telling:
            self._tell()
        yield
        with self._counting:
            self._done = self._total
        with self._telling:
            self._tell()

    def tick(self, nbytes: int) -> None:
        """That many more bytes are done. Cheap; for any thread."""
        with self._counting:
            self._done = min(self._done + nbytes, self._total)
            complete = self._done == self._total  # told by the end of the phase
        if self._error is not None:
            raise self._error
        if self._callback is None or complete or not self._telling.acquire(blocking=False):
            return
        try:
            if self._clock.now() - self._told_s >= EVERY_S:
                self._tell()
        finally:
            self._telling.release()

    def now(self) -> Progress | None:
        """How far it is, whether or not there is a callback; ``None`` before the first phase."""
        with self._counting:
            if not self._phase:
                return None
            return Progress(
                operation=self._operation,
                phase=self._phase,
                done_bytes=self._done,
                total_bytes=self._total,
                rank=self._rank,
            )

    def _tell(self) -> None:
        """Call the callback; the caller holds ``_telling``."""
        if self._error is not None:
            raise self._error
        now = self.now()
        if self._callback is None or now is None:
            return
        try:
            self._callback(now)
        except BaseException as error:
            self._error = error
            raise
        self._told_s = self._clock.now()


def bytes_in_words(count: int) -> str:
    """A number of bytes in few digits, such as ``512 MiB``."""
    size, units = float(count), iter(("B", "KiB", "MiB", "GiB", "TiB", "PiB"))
    unit = next(units)
    for larger in units:
        if round(size) < _KIBI:
            break
        size, unit = size / _KIBI, larger
    return f"{size:.0f} {unit}" if size >= _KIBI / 10 else f"{size:.3g} {unit}"


class RichProgress:
    """A bar in the terminal for every phase, drawn by rich: bytes, speed, time left.

    To be used as a context manager, and passed as ``progress`` inside its block. Rank 0 draws;
    the others may be given one, too, and show nothing. A phase with nothing to count has a line
    while it lasts, any other until the block ends or its operation comes again. ``ImportError``
    if rich is not installed. Thread-safe.
    """

    def __init__(self, console: "Console | None" = None) -> None:
        try:
            from rich import progress as bars  # noqa: PLC0415 -- an optional dependency
        except ImportError as error:
            raise ImportError(
                "RichProgress draws with rich, which is not installed: pip install rich, or give "
                "a function of your own as progress"
            ) from error
        self._bars = bars.Progress(
            bars.TextColumn("{task.description}"),
            bars.BarColumn(),
            bars.DownloadColumn(),
            bars.TransferSpeedColumn(),
            bars.TimeRemainingColumn(),
            console=console,
        )
        self._open = self._drawing = False
        self._lines: dict[tuple[Operation, str], _Line] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._remove(lambda _: True)
        self._open = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open = False
        if self._drawing:
            self._drawing = False
            self._remove(lambda line: not line.total_bytes)
            self._bars.stop()

    def __call__(self, progress: Progress) -> None:
        if not self._open:
            raise RuntimeError(
                "this RichProgress is not open: use it as `with RichProgress() as bar:` around "
                "the save or load that is given progress=bar"
            )
        if progress.rank == 0:
            with self._lock:
                self._draw(progress)

    def _draw(self, progress: Progress) -> None:
        if not self._drawing:  # not before, so that other ranks leave the terminal alone
            self._drawing = True
            self._bars.start()
        line = self._lines.get((progress.operation, progress.phase))
        if line is None or progress.done_bytes < line.done_bytes:
            line = self._new_line(progress)
        line.done_bytes = progress.done_bytes
        self._bars.update(line.task, completed=progress.done_bytes)

    def _new_line(self, progress: Progress) -> "_Line":
        operation, phase = key = (progress.operation, progress.phase)
        again = key in self._lines
        self._remove(
            lambda other: not other.total_bytes or (again and other.operation == operation)
        )
        total = progress.total_bytes or None  # without anything to count the bar swings
        line = _Line(
            operation=operation,
            total_bytes=progress.total_bytes,
            task=self._bars.add_task(f"{operation}: {phase}", total=total),
        )
        self._lines[key] = line
        return line

    def _remove(self, is_past: "Callable[[_Line], bool]") -> None:
        for key in [key for key, line in self._lines.items() if is_past(line)]:
            self._bars.remove_task(self._lines.pop(key).task)


@dataclass(slots=True, kw_only=True)
class _Line:
    operation: Operation
    total_bytes: int
    task: "TaskID"
    done_bytes: int = 0
