"""How long a store that does not answer is borne, and what is raised then. Knows no keys.

A store often falls silent because a rank is lost, which is then the error to raise.
"""

import functools
import math
import time
from collections.abc import Callable
from typing import TypeVar, final

from holdfast.coordination._beacon import LEFT
from holdfast.coordination._channel import Channel, Job, Quiet, Session, StoreFailedError
from holdfast.coordination._meeting import Meeting, Ranks
from holdfast.coordination._outcome import lost_error, overdue_error
from holdfast.coordination._waiting import Waiting, pause_after
from holdfast.errors import CheckpointError, CoordinationError, OperationTimeoutError

T = TypeVar("T")

STUCK_S = 0.75
CONNECT_S = 10.0
NEWS_S = 0.5


@final
class Patience:
    """Work of one operation on the channel, abandoned when there is reason to. Used by one thread
    at a time. ``timeout_s`` and ``deadline`` are the operation's."""

    def __init__(
        self,
        channel: Channel,
        ranks: Ranks,
        waiting: Waiting,
        *,
        name: str,
        timeout_s: float,
        deadline: float,
    ) -> None:
        self._channel = channel
        self._ranks = ranks
        self._waiting = waiting
        self._name = name
        self._timeout_s = timeout_s
        self._deadline = deadline
        self._glance: Job[None] | None = None
        self._looked_first = math.inf
        self._look_at = 0.0

    def run(self, work: Callable[[Session], T], meeting: Meeting | None = None) -> T:
        def placed(session: Session) -> T:
            if meeting is not None:
                self._waiting.enter(session, meeting)
            return work(session)

        try:
            return self._channel.run(placed, functools.partial(self._judge, meeting))
        except StoreFailedError as error:
            raise self._without_store(f"the store failed: {error}") from error

    def check(self) -> None:
        """See `holdfast.coordination._group.Exchange`."""
        now = time.monotonic()
        job, self._glance = self._glance, None
        if job is None or (job.done.is_set() and job.error is None):
            # The other ranks' health is known here; only for their errors the store is asked.
            if now < self._look_at and now <= self._deadline and not self._ranks.lost():
                return
            self._looked_first = min(self._looked_first, now)
            self._look_at = now + pause_after(now - self._looked_first)
            job = self._channel.begin(self._look)
        try:
            if not self._channel.glance(job, self._judge_glance):
                self._glance = job  # for the next time
        except StoreFailedError as error:
            raise self._without_store(f"the store failed: {error}") from error
        finally:
            del job  # see Channel.run

    def _look(self, session: Session) -> None:
        lost = self._ranks.lost()  # read before looking: a rank that failed may have left since
        self._waiting.raise_if_failed(session)
        if lost:
            raise lost_error(lost, self._name)
        if time.monotonic() > self._deadline:
            raise overdue_error(self._name, self._timeout_s)

    def _judge_glance(self, quiet: Quiet) -> CheckpointError | None:
        if quiet.seconds > STUCK_S and time.monotonic() > self._deadline + STUCK_S:
            return overdue_error(self._name, self._timeout_s)
        return self._judge(None, quiet)

    def _judge(self, meeting: Meeting | None, quiet: Quiet) -> CheckpointError | None:
        # A rank that left had done its part, for all that can be known without the store.
        lost = {rank: state for rank, state in self._ranks.lost().items() if state != LEFT}
        if quiet.seconds < STUCK_S:
            return None
        if lost:
            return lost_error(lost, self._name)
        if meeting is not None and time.monotonic() > meeting.deadline + STUCK_S:
            return OperationTimeoutError(
                f"{meeting.what} did not end within {meeting.timeout_s:g} s: "
                f"the store has not answered for {quiet.seconds:.1f} s",
                timeout_s=meeting.timeout_s,
            )
        patience_s = self._ranks.silence_s
        if quiet.connecting:  # a busy server, or a slow look-up of its name
            patience_s = max(patience_s, CONNECT_S)
        if quiet.seconds > patience_s + STUCK_S:
            return self._without_store(f"the store has not answered for {quiet.seconds:.1f} s")
        return None

    def _without_store(self, reason: str) -> CheckpointError:
        """The store often dies with a rank; give that news a moment to arrive."""
        until = time.monotonic() + NEWS_S
        while not self._ranks.lost() and time.monotonic() < until:
            time.sleep(0.02)
        lost = self._ranks.lost()
        if lost:
            return lost_error(lost, self._name)
        return CoordinationError(
            f"ranks cannot reach each other in {self._name}: {reason}. "
            "Is the process that hosts the torch.distributed store still running?"
        )
