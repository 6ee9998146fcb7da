"""Notes which signal has come to this process, and when. Knows no ranks and no checkpoints.

A handler runs between any two bytecodes of the main thread, in the midst of whatever that was
doing. So it takes no lock and logs nothing: the main thread may hold that very lock.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any, final

from holdfast.contracts import Clock

_Handler = Callable[[int, FrameType | None], Any] | int


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A signal that has come. ``at_s`` is a moment of the clock."""

    name: str
    at_s: float


@final
class Signals:
    """Catches signals between ``install`` and ``restore``, both called by the main thread.

    A Python function that handled a signal before is called, too; the default action is not taken.
    In a process forked from this one, and after ``restore``, a signal means what it meant before.
    """

    def __init__(self, numbers: Iterable[int], clock: Clock) -> None:
        self._numbers = checked_signals(numbers)
        self._clock = clock
        self._before: dict[int, _Handler] = {}
        self._pid: int | None = None
        self.notices: list[Notice] = []
        """Those that came, in their order."""

    def install(self) -> None:
        """All of them or none. ``ValueError`` if this is not the main thread, or if there is a
        handler that could not be put back."""
        if not self._numbers:
            return
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "only the main thread can catch signals, and this is "
                f"{threading.current_thread().name!r}: enter the block there, or catch none "
                "(signals=()) and say by also= when to stop"
            )
        for number in self._numbers:
            before = signal.getsignal(number)
            if before is None:
                raise ValueError(
                    f"{_name(number)} has a handler that was not installed from Python and could "
                    "not be put back: choose another signal"
                )
            self._before[number] = before
        self._pid = os.getpid()
        try:
            for number in self._numbers:
                signal.signal(number, self._handle)
        except BaseException:  # also what an earlier handler raises, of a signal that has just come
            self.restore()
            raise

    def restore(self) -> None:
        """Put back what was there, but for what another has replaced since. Idempotent."""
        self._pid = None
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before = self._before[number]
        if os.getpid() != self._pid:
            # A fork, or whoever replaced this handler has put it back after the end.
            if callable(before):
                before(number, frame)
            elif before == signal.SIG_DFL:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return
        self.notices.append(Notice(name=_name(number), at_s=self._clock.now()))
        # Python's own handler of Ctrl-C is what others call the default action.
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)


def checked_signals(numbers: Iterable[int]) -> tuple[int, ...]:
    """``numbers`` without repeats, or ``ValueError`` unless all are signals that can be caught."""
    if isinstance(numbers, str | bytes) or not isinstance(numbers, Iterable):
        raise ValueError(  # noqa: TRY004 -- as every refusal of an argument
            f"signals must be several, as (signal.SIGTERM,), not {numbers!r}"
        )
    found = tuple(dict.fromkeys(numbers))
    for number in found:
        if isinstance(number, bool) or number not in signal.valid_signals():
            raise ValueError(f"signals must be signals such as signal.SIGTERM, not {number!r}")
        if number in (signal.SIGKILL, signal.SIGSTOP):
            raise ValueError(f"{_name(number)} ends or stops a process and cannot be caught")
    return found


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
