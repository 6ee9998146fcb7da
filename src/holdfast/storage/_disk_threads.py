"""Threads that do nothing but ask a disk: as soon as it has answered it is asked again, while who
wanted the answer copies and verifies it on a thread of his own. Knows no files.

Requests that were begun together tend to be answered together. Threads that ask, and then work on
what they got, all work at once, and the disk has nothing to do meanwhile: a verified read was a
fifth slower so.
"""

import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar, final

from holdfast._lanes import Lane, join_all, uninterrupted

T = TypeVar("T")
R = TypeVar("R")

_AHEAD: Final = 2
"""Answers that may wait to be used while all threads ask."""

_STUCK_S: Final = 10.0
_POLL_S: Final = 0.001


@final
class DiskThreads:
    """``count`` threads that are shared by all who ask at the same time, and end with the last of
    them. Thread-safe. Threads that have not answered for long, as from a mount that is gone, are
    left to those who wait for them: who comes later gets others."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._process = os.getpid()
        self._lock = threading.RLock()  # a signal handler or a finalizer may read, too
        self._crew: _Crew | None = None

    def run_all(
        self, items: Sequence[T], ask: Callable[[T], R], use: Callable[[T, R], None]
    ) -> None:
        """``ask`` for every item on these threads, and ``use`` what it returned on the caller's,
        in order, no more than a few ahead. When it is the turn of one that failed, or after an
        interrupt, no further item is begun, and the error is raised when none of the caller's is
        asked for any more."""
        user = _User()
        begun: deque[_Request[T, R]] = deque()
        try:
            # Python 3.11 starts threads while it exits, and never runs them. And a thread of the
            # disk's, if what reads is garbage collected there, may be the only one to be had.
            crew = None if sys.is_finalizing() else self._join(user, len(items))
            if crew is None or not crew.started or threading.current_thread() in crew.threads:
                for item in items:
                    use(item, ask(item))
                return
            for item in items:
                if len(begun) == self._count + _AHEAD:
                    use(begun[0].item, begun[0].answer())
                    begun.popleft()  # only now: until it has ended it must be known
                begun.append(_Request(user, ask, item))
                crew.work.put(begun[-1])
            while begun:
                use(begun[0].item, begun[0].answer())
                begun.popleft()
        finally:
            user.is_over = True  # not in a call, which an interrupt may keep from being made
            try:
                uninterrupted(lambda: _end(begun))
            finally:
                try:
                    uninterrupted(lambda: _end(begun))  # if the first was kept from being made
                finally:
                    try:
                        uninterrupted(lambda: self._leave(user))
                    finally:
                        uninterrupted(lambda: self._leave(user))  # likewise

    def _join(self, user: "_User", items: int) -> "_Crew":
        if self._process != os.getpid():  # a fork has no threads, and perhaps a lock nobody frees
            self._lock, self._crew, self._process = threading.RLock(), None, os.getpid()
        with self._lock:
            # What interrupts this thread may itself read, and end the threads if it is their last
            # user: before others see a crew, and after this has seen one, this is a user of it.
            while True:
                crew = self._crew
                is_new = crew is None or crew.is_stuck()
                if crew is None or is_new:
                    crew = _Crew()
                user.crew = crew
                crew.users.add(user)
                if is_new:
                    self._crew = crew
                if crew is self._crew:
                    break
        # Not under the lock: garbage may be collected in a thread that starts, and read.
        crew.grow(min(self._count, len(crew.threads) + items))
        return crew

    def _leave(self, user: "_User") -> None:
        crew = user.crew
        if crew is None:
            return
        with self._lock:
            crew.users.discard(user)
            is_last = not crew.users
            if is_last and self._crew is crew:
                self._crew = None
        if is_last:
            crew.end()
        user.crew = None


@final
class _User:
    """One call of ``run_all``. Once it ``is_over`` nothing of it is begun."""

    def __init__(self) -> None:
        self.is_over = False
        self.crew: _Crew | None = None


@final
class _Request(Generic[T, R]):
    """What is to be asked. Of ``is_begun`` and a user's ``is_over`` each is set by one thread
    before it looks at the other's, so at least one of them sees both."""

    __slots__ = ("_answer", "_ask", "_bell", "_error", "_user", "is_begun", "is_ended", "item")

    def __init__(self, user: _User, ask: Callable[[T], R], item: T) -> None:
        self._user = user
        self._ask: Any = ask
        self._answer: Any = None
        self._error: BaseException | None = None
        self._bell = threading.Lock()
        self._bell.acquire()
        self.item: Any = item
        self.is_begun = False
        self.is_ended = False

    def run(self) -> None:
        """On a thread of the disk's."""
        self.is_begun = True
        if not self._user.is_over:
            try:
                self._answer = self._ask(self.item)
            except BaseException as error:  # noqa: BLE001 -- raised by who asked
                self._error = error
        self.is_ended = True
        self._bell.release()

    def answer(self) -> R:
        """To be called once: waits for it, and raises what it raised."""
        self._bell.acquire()
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # or it and the frames that it knows keep each other alive
        answer: R = self._answer
        self._answer = None
        return answer

    def forget(self) -> None:
        """Let go of all memory. It has ended, or will not begin."""
        self._ask = self._answer = self._error = self.item = None


@final
class _Crew:
    """The threads are daemons, or those of a caller who was interrupted before he could let go of
    them would keep the interpreter from ending."""

    def __init__(self) -> None:
        self.users: set[_User] = set()
        self.threads: list[Lane] = []
        self.started = 0
        self.work: queue.SimpleQueue[_Request[Any, Any] | None] = queue.SimpleQueue()
        self._answered_s = time.monotonic()

    def is_stuck(self) -> bool:
        return time.monotonic() - self._answered_s > _STUCK_S

    def grow(self, count: int) -> None:
        """Start as many threads as are to be had: there are none while the interpreter exits."""
        while len(self.threads) < count:
            thread = Lane(self._run, name="holdfast-disk", daemon=True)
            self.threads.append(thread)  # first: it may begin although its start is interrupted
            try:
                thread.start()
            except (RuntimeError, MemoryError):
                return
            self.started += 1

    def end(self) -> None:
        self.work.put(None)
        this = threading.current_thread()  # one of them, if what reads is garbage collected there
        join_all([thread for thread in self.threads if thread is not this])

    def _run(self) -> None:
        while (request := self.work.get()) is not None:
            request.run()
            self._answered_s = time.monotonic()
            del request  # or what it was answered is kept until the next
        self.work.put(None)  # for the others, however many have started


def _end(begun: "deque[_Request[T, R]]") -> None:
    """Wait for those of these that were begun, now that their user is over: they use memory and
    descriptors that their caller will use for something else."""
    while any(request.is_begun and not request.is_ended for request in begun):
        time.sleep(_POLL_S)
    for request in begun:
        request.forget()
    begun.clear()
