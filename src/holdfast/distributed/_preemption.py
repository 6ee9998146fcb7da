"""One last save before a job is ended: when to make it, agreed by all ranks, and until when.

Knows signals by their notices and ranks by the coordinator. How to save, the checkpointer knows.
"""

import dataclasses
import logging
import math
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self, final

import msgspec

from holdfast import _checks
from holdfast.contracts import Clock
from holdfast.distributed._checkpoint import DistributedCheckpoint
from holdfast.distributed._options import SaveOptions
from holdfast.distributed._signals import Signals
from holdfast.distributed._watch import finish_within
from holdfast.errors import CheckpointError, OperationTimeoutError
from holdfast.resilience import SystemClock

_NAMED: Final = 5
_LOOK_S: Final = 1.0
"""How long a last save that came too late may look for the newest checkpoint, to name it."""

_log = logging.getLogger("holdfast.distributed")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """That this rank was told to end: by what, and the moment by which it must have."""

    by: str
    until_s: float


class _Word(msgspec.Struct, frozen=True):
    """What a rank says when asked: by what it was told to end, and how often it is asked."""

    told_by: str | None
    every: int


@final
class Preemption:
    """Tells all ranks at the same step that the job is to end, and makes one last save in time.

    A context manager, entered once, in the main thread; every rank makes one with the same
    ``every``. Used by one thread at a time.

    ``deadline_s``: how long after a signal this process has. ``signals``: those that mean the end.
    ``also``: asked by ``requested`` as well; ``True`` means the end, ``deadline_s`` from now, and a
    number of seconds means the end in that time. What it raises is raised on every rank.
    ``every``: only each so-many-th call of ``requested`` asks the other ranks, from the first on.

    Handlers that were there before are called, too, if they are Python functions, and are put back
    on leaving the block. A signal that comes after the last ``requested`` of the block is not
    raised again then, only logged: what follows, such as the save at the end of a training, is
    the best use of the time that is left.
    """

    def __init__(
        self,
        checkpoint: DistributedCheckpoint,
        *,
        deadline_s: float = 30.0,
        signals: Iterable[int] = (signal.SIGTERM,),
        also: Callable[[], bool | float | None] | None = None,
        every: int = 1,
        clock: Clock | None = None,
    ) -> None:
        self._checkpoint = _checks.instance("checkpoint", checkpoint, DistributedCheckpoint)
        self._deadline_s = _checks.seconds("deadline_s", deadline_s)
        if also is not None and not callable(also):
            raise ValueError(f"also must be a function or None, not {also!r}")
        self._also = also
        self._every = _checks.count("every", every, least=1)
        self._clock = SystemClock() if clock is None else _checks.clock("clock", clock)
        self._signals = Signals(signals, self._clock)
        self._entered = self._inside = False
        self._calls = 0
        self._logged = 0
        self._told: _Told | None = None
        self._until_s: float | None = None
        self._had_s = 0.0

    @property
    def remaining_s(self) -> float | None:
        """Seconds left until the deadline that all ranks go by, 0 once it has passed; ``None``
        while ``requested`` has not been true."""
        if self._until_s is None:
            return None
        return max(0.0, self._until_s - self._clock.now())

    def requested(self) -> bool:
        """Whether the job is to end. Every rank calls this at every step, and all get the same
        answer at the same call: true as soon as any of them was told, and from then on.

        A collective, until it is true. ``RankLostError`` and ``RankTimeoutError`` as from any
        other; ``ValueError`` if ranks differ in ``every``.
        """
        if not self._inside:
            raise ValueError("a Preemption catches signals inside its with block only: ask there")
        self._log_signals()
        if self._until_s is None:
            self._calls += 1
            if (self._calls - 1) % self._every == 0:
                self._ask()
        return self._until_s is not None

    def save(
        self,
        model: object,
        optimizer: object = None,
        options: SaveOptions | None = None,
        *,
        extra: Mapping[str, object] | None = None,
    ) -> str:
        """``DistributedCheckpoint.save``, in the time that is left. Every rank calls this, once
        ``requested`` is true.

        A save in the background is waited for first; if it failed, that is logged, and the last
        save is made all the same. ``OperationTimeoutError`` if the time is over, or was not
        enough: nothing is committed then, and what was saved before is intact.
        """
        chosen = SaveOptions() if options is None else options
        _checks.instance("options", chosen, SaveOptions)
        self._finish_earlier()
        left_s = self._time_left()
        limited = chosen.timeout_s is None or left_s < chosen.timeout_s
        if limited:
            chosen = dataclasses.replace(chosen, timeout_s=left_s)
        try:
            prefix = self._checkpoint.save(model, optimizer, chosen, extra=extra)
        except OperationTimeoutError as error:
            if limited:
                error.add_note(f"The {left_s:.1f} s it had were all that was left to the job.")
            raise
        _log.info(
            "saved %s before the end of the job, with %.1f s of %.1f s left",
            prefix,
            self.remaining_s,
            self._had_s,
        )
        return prefix

    def __enter__(self) -> Self:
        if self._entered:
            raise ValueError("a Preemption is entered once: make another")
        self._signals.install()
        self._entered = self._inside = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._inside = False
        self._signals.restore()
        self._log_signals()
        if self._signals.notices and self._until_s is None:
            first = self._signals.notices[0]
            left_s = first.at_s + self._deadline_s - self._clock.now()
            _log.warning(
                "%s came and nothing was saved for it: requested() was not asked again, or failed. "
                "This process may be killed in %.1f s",
                first.name,
                max(0.0, left_s),
            )

    def _ask(self) -> None:
        """Tell the others what this rank was told, and hear what they were."""
        with self._checkpoint.coordinator.operation("preemption") as operation:
            with operation.phase("also"):
                told = self._told = self._look()
            word = _Word(told_by=None if told is None else told.by, every=self._every)
            given = operation.all_gather(msgspec.json.encode(word))
            words = [msgspec.json.decode(each, type=_Word) for each in given]
            told_by = {r: word.told_by for r, word in enumerate(words) if word.told_by is not None}
            if told_by:
                # Only now: a rank may have waited long for the others, and its time went by.
                now_s = self._clock.now()
                left_s = None if told is None else told.until_s - now_s
                given = operation.all_gather(msgspec.json.encode(left_s))
                lefts = [msgspec.json.decode(each, type=float | None) for each in given]
                self._had_s = max(0.0, min(left for left in lefts if left is not None))
                self._until_s = now_s + self._had_s
        if len({word.every for word in words}) > 1:
            raise ValueError(
                "every must be the same on all ranks, not "
                + ", ".join(f"{word.every} on rank {rank}" for rank, word in enumerate(words))
            )
        if told_by:
            _log.info("the job is to end in %.1f s: %s", self._had_s, _in_words(told_by))

    def _look(self) -> _Told | None:
        """What this rank was told so far, by whatever ends it first."""
        told = [] if self._told is None else [self._told]
        told += [
            _Told(by=notice.name, until_s=notice.at_s + self._deadline_s)
            for notice in self._signals.notices[:1]
        ]
        if self._also is not None:
            left_s = self._seconds_of(self._also())
            if left_s is not None:
                told.append(_Told(by="also()", until_s=self._clock.now() + left_s))
        return min(told, key=lambda each: each.until_s, default=None)

    def _seconds_of(self, answer: object) -> float | None:
        """An answer of ``also`` as seconds that are left."""
        if answer is None or answer is False:
            return None
        if answer is True:
            return self._deadline_s
        if isinstance(answer, int | float) and math.isfinite(answer):
            return max(0.0, float(answer))
        raise ValueError(
            f"also must return True, False, None or how many seconds are left, not {answer!r}"
        )

    def _finish_earlier(self) -> None:
        left_s = self._time_left()
        try:
            self._checkpoint.wait(left_s)
        except CheckpointError as error:
            self._checkpoint.wait(self._time_left(error))  # again, if it is that which is not done
            _log.warning("the save in the background failed, now the last one is made: %s", error)

    def _time_left(self, because: BaseException | None = None) -> float:
        left_s = self.remaining_s
        if left_s is None:
            raise ValueError(
                "save is for when requested() has returned True; the checkpoint's own save is for "
                "any time"
            )
        if left_s <= 0:
            raise OperationTimeoutError(
                f"there is no time for a last save: {self._had_s:.1f} s were left when all ranks "
                f"knew that the job is to end, and they are over. {self._newest()}",
                timeout_s=self._had_s,
            ) from because
        return left_s

    def _newest(self) -> str:
        """What there is to go on from, if the storage says so in a moment."""
        found = ["What was saved before is intact"]

        def look() -> None:
            for info in self._checkpoint.catalog.list()[:1]:
                step = "" if info.step is None else f" of step {info.step}"
                found.append(f"The newest checkpoint is {info.prefix}{step}, and intact")

        try:
            finish_within(_LOOK_S, look)
        except CheckpointError as error:
            _log.warning("which checkpoint is the newest, the storage does not say: %s", error)
        return found[-1]

    def _log_signals(self) -> None:
        """Those that came since; the handler itself must not log."""
        notices = self._signals.notices
        for number, notice in enumerate(notices[self._logged :], self._logged):
            _log.info("%s came%s", notice.name, " again, which changes nothing" if number else "")
            self._logged = number + 1


def _in_words(told_by: Mapping[int, str]) -> str:
    """``rank 1 was told by SIGTERM``."""
    named = [f"rank {rank} was told by {by}" for rank, by in list(told_by.items())[:_NAMED]]
    more = [f"and {len(told_by) - _NAMED} more"] if len(told_by) > _NAMED else []
    return ", ".join(named + more)
