"""A client of the c10d store on a thread of its own. Knows keys and bytes, no ranks.

A store call can block for ever when the process that hosts the store is stopped: the client's
own timeouts do not fire. So nobody calls the store from a thread that matters. Work is handed
to the channel's thread; the caller waits, looks up twenty times a second, and walks away when
the store has been quiet for too long. An abandoned thread ends when its call returns.
"""

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, final

T = TypeVar("T")

LOOK_S = 0.05
GLANCE_S = 0.001
CANCEL_S = 0.25
STARVED_S = 0.5
BRIEF_S = 1.0


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that is used."""

    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str) -> bytes: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes: ...
    def delete_key(self, key: str) -> bool: ...


class StoreFailedError(Exception):
    """The store answered with an error, or its connection broke."""


class _CancelledError(Exception):
    """The caller has gone; the work must stop."""


@final
class Session:
    """The store as one piece of work sees it: cancellable, and leaving a trace of answers."""

    def __init__(self, store: Store, is_cancelled: Callable[[], bool]) -> None:
        self._store = store
        self._is_cancelled = is_cancelled
        self.answered_at = time.monotonic()
        self.chores: deque[Callable[[], object]] = deque()

    def later(self, chore: Callable[[], object]) -> None:
        """Do ``chore`` once the caller has its result: tidying that nobody should wait for."""
        self.chores.append(chore)

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)
        self.answered_at = time.monotonic()

    def set(self, key: str, value: bytes) -> None:
        self._call(self._store.set, key, value)

    def get(self, keys: Sequence[str]) -> list[bytes]:
        if len(keys) == 1:
            return [self._call(self._store.get, keys[0])]
        return self._call(self._store.multi_get, list(keys))

    def add(self, key: str, amount: int) -> int:
        return self._call(self._store.add, key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self._call(self._store.check, list(keys))

    def set_if_absent(self, key: str, value: bytes) -> bytes:
        """Set it unless somebody has; either way what it is now."""
        return self._call(self._store.compare_set, key, b"", value)

    def delete(self, key: str) -> None:
        self._call(self._store.delete_key, key)

    def _call(self, function: Callable[..., T], *args: Any) -> T:
        if self._is_cancelled():
            raise _CancelledError
        try:
            return function(*args)
        except RuntimeError as error:  # every error of a torch store is one
            raise StoreFailedError(str(error).partition("\n")[0]) from error
        finally:
            self.answered_at = time.monotonic()


class Job(Generic[T]):
    """A piece of work that a channel's thread does or has done."""

    def __init__(self, work: Callable[[Session], T]) -> None:
        self.work = work
        self.done = threading.Event()
        self.cancelled = threading.Event()
        self.session: Session | None = None
        self.excused_at = time.monotonic()
        self.value: T
        self.error: BaseException | None = None

    def quiet(self) -> "Quiet":
        answered_at = self.excused_at if self.session is None else self.session.answered_at
        return Quiet(
            seconds=time.monotonic() - max(self.excused_at, answered_at),
            connecting=self.session is None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Quiet:
    """For how long nothing has come from the store, and whether it ever has."""

    seconds: float
    connecting: bool


Judge = Callable[[Quiet], BaseException | None]


def briefly(quiet: Quiet) -> TimeoutError | None:
    """A judge for what is worth a try and no more."""
    return TimeoutError() if quiet.seconds > BRIEF_S else None


def _wait(job: Job[T], judge: Judge) -> T:
    verdict = None
    looked_at = time.monotonic()
    while verdict is None and not job.done.wait(LOOK_S):
        now = time.monotonic()
        if now - looked_at > STARVED_S:
            # No thread of this process could run, so that the store was not heard is not the
            # store's fault: a C call may have held the interpreter.
            job.excused_at = now
        looked_at = now
        verdict = judge(job.quiet())
    try:
        if verdict is not None:
            raise verdict
        return _result(job)
    finally:
        del job, verdict  # see Channel.run


def _result(job: Job[T]) -> T:
    try:
        if job.error is not None:
            raise job.error.with_traceback(None)  # the channel's own frames help nobody
        return job.value
    finally:
        del job  # see Channel.run


@final
class Channel:
    """One client and its thread. Used by one caller at a time; ``usable`` until it failed once."""

    def __init__(self, connect: Callable[[], Store]) -> None:
        self.usable = True
        self._jobs: queue.SimpleQueue[Job[Any] | None] = queue.SimpleQueue()
        # Started before connecting: connecting blocks too when the store's host is stopped.
        self._thread = threading.Thread(
            target=self._serve, args=(connect,), name="holdfast-store", daemon=True
        )
        self._thread.start()

    def run(self, work: Callable[[Session], T], judge: Judge) -> T:
        """Do ``work`` on the channel's thread and return what it returns.

        While it runs, ``judge`` is told for how long the store has been quiet and may return an
        error: then the work is abandoned and the error raised.
        """
        job = self.begin(work)
        try:
            return _wait(job, judge)
        except BaseException:
            self._cancel(job)
            raise
        finally:
            # An error refers to this frame; if the frame referred to the error, both, and the
            # coordinator with its helper process, would live until the next garbage collection.
            del job

    def begin(self, work: Callable[[Session], T]) -> Job[T]:
        """Have ``work`` done in its turn, and wait for nothing. See ``glance``."""
        job = Job(work)
        self._jobs.put(job)
        return job

    def glance(self, job: Job[Any], judge: Judge) -> bool:
        """Whether a job is done, now or in a moment; if it failed, raises its error. ``judge`` is
        as in ``run``, and asked once."""
        verdict = None
        try:
            if not job.done.wait(GLANCE_S):
                verdict = judge(job.quiet())
                if verdict is None:
                    return False
                # Nobody may have looked for long, and no thread of this process have run: then
                # the answer is about to be heard.
                if not job.done.wait(CANCEL_S):
                    self._cancel(job)
                    raise verdict
            _result(job)
            return True
        finally:
            del job, verdict  # see Channel.run

    def _cancel(self, job: Job[Any]) -> None:
        if not job.done.is_set():  # else only its chores are left, and those shall be done
            job.cancelled.set()
        self.usable = job.done.wait(CANCEL_S) and self.usable

    def post(self, work: Callable[[Session], object]) -> None:
        """Do ``work`` when the store can be reached, wait for nothing, and end the channel."""
        self.usable = False
        self._jobs.put(Job(work))
        self._jobs.put(None)

    def close(self) -> None:
        """End the thread. Waits a moment for it: a thread that is inside the store while the
        interpreter ends would abort the process."""
        self.usable = False
        self._jobs.put(None)
        if self._thread is not threading.current_thread():  # which collects garbage, too
            self._thread.join(CANCEL_S)

    def _serve(self, connect: Callable[[], Store]) -> None:
        store: Store | None = None
        while (job := self._jobs.get()) is not None:
            try:
                if store is None:
                    store = _connected(connect)
                job.session = Session(store, job.cancelled.is_set)
                job.value = job.work(job.session)
            except BaseException as error:  # noqa: BLE001 -- the caller raises it
                job.error = error
                self.usable = self.usable and not isinstance(error, StoreFailedError)
            job.done.set()
            chores = deque() if job.session is None else job.session.chores
            # What is still referred to here would live as long as this thread waits for work.
            job = None
            with contextlib.suppress(StoreFailedError, _CancelledError):
                # Untidied keys are only clutter; if the store is gone the next call will say so.
                while chores:
                    chores.popleft()()
            chores.clear()


def _connected(connect: Callable[[], Store]) -> Store:
    try:
        return connect()
    except RuntimeError as error:
        raise StoreFailedError(str(error).partition("\n")[0]) from error
