"""One operation over the c10d store: keys in, keys out, nothing left behind.

A value is set under one key. Receivers poll for it, because a store's own ``wait`` can
neither be cancelled nor time out without writing warnings to stderr. Who gathers deletes what
it took; the last receiver of a broadcast deletes it. A failed operation leaves one small
record until every rank has left it.

Known inefficiency: everything goes through one server, so with thousands of ranks a barrier
takes as long as that server needs for some five messages a rank.
"""

import contextlib
import functools
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar, final

from holdfast.coordination._beacon import LEFT
from holdfast.coordination._channel import Channel, Job, Quiet, Session, StoreFailedError, briefly
from holdfast.coordination._liveness import Liveness
from holdfast.coordination._outcome import decode, encode, late_error, lost_error, overdue_error
from holdfast.coordination._values import delete, join, put, rest, split, take
from holdfast.errors import (
    CheckpointError,
    ClosedError,
    CoordinationError,
    ErrorRecord,
    OperationTimeoutError,
    RankLostError,
    RankTimeoutError,
)

T = TypeVar("T")

VETO = bytes(4)  # in place of the number of parts, which is never 0
CHECK_BATCH = 64  # keys looked for in one message
EAGER_POLLS = 20  # without a pause: some two milliseconds
FIRST_PAUSE_S = 0.0001
MAX_PAUSE_S = 0.2
STUCK_S = 0.75
CONNECT_S = 10.0
NEWS_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Who takes part, where their keys are, how it is known that they live, and when this
    stops being asked."""

    home: str
    rank: int
    world_size: int
    liveness: Liveness | None
    silence_s: float
    is_closed: Callable[[], bool]

    def lost(self) -> dict[int, str]:
        """Who is lost, and how. ``ClosedError`` if it is this side that has left."""
        if self.is_closed():
            raise ClosedError("the coordinator was closed while ranks were waiting")
        return {} if self.liveness is None else self.liveness.lost()

    def joined(self) -> set[int]:
        return {self.rank} if self.liveness is None else self.liveness.joined()


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """One collective: its keys in the store, its words for people, its end."""

    base: str
    what: str
    timeout_s: float
    deadline: float
    last: bool

    def key(self, name: str) -> str:
        return f"{self.base}/{name}"


@final
class StoreExchange:
    """See `holdfast.coordination._group.Exchange`. Used by one thread at a time."""

    def __init__(
        self,
        channel: Channel,
        ranks: Ranks,
        *,
        reconnect: Callable[[], Channel],
        base: str,
        name: str,
        timeout_s: float,
        deadline: float,
    ) -> None:
        self._channel = channel
        self._reconnect = reconnect
        self._ranks = ranks
        self._base = base
        self._failed = f"{base}/failed"
        self._name = name
        self._timeout_s = timeout_s
        self._deadline = deadline
        self._count = 0
        self._meeting: Meeting | None = None
        self._mine: list[str] = []
        self._glance: Job[None] | None = None
        self._looked_first = math.inf
        self._look_at = 0.0

    def barrier(self, timeout_s: float | None, *, last: bool = False) -> None:
        self._meet(self._next("barrier", timeout_s, last=last), b"", lambda _: b"")

    def all_gather(self, data: bytes, timeout_s: float | None) -> list[bytes]:
        meeting = self._next("all_gather", timeout_s)
        return split(self._meet(meeting, data, join))

    def broadcast(self, data: bytes | None, source: int, timeout_s: float | None) -> bytes:
        meeting = self._next("broadcast", timeout_s, root=source)
        key = meeting.key("all")

        def work(session: Session) -> bytes:
            if data is None:
                late = functools.partial(self._holding_up, session, source)
                self._await(session, meeting, {source: key}, late=late)
                return self._take_word(session, key, session.get([key])[0])
            word = self._put(session, key, data)
            self._raise_if_failed(session)  # the others may have given up on this rank
            return self._take_word(session, key, word, own=data)

        return self._run(work, meeting)

    def gather(self, data: bytes, target: int, timeout_s: float | None) -> list[bytes] | None:
        meeting = self._next("gather", timeout_s, root=target)

        def work(session: Session) -> list[bytes] | None:
            try:
                gathered = self._gather(session, meeting, data, target)
            except (RankLostError, RankTimeoutError):
                # Who has given its part has gone on, and will not come to tidy up.
                keys = self._arrivals(meeting).values()
                session.later(lambda: take(session, [k for k in keys if session.check([k])]))
                raise
            if gathered is None and session.check([self._failed]):
                for key in self._mine:  # the target has given up, and reads none of it
                    if key.startswith(f"{meeting.base}/"):
                        session.delete(key)
                self._raise_if_failed(session)
            return gathered

        return self._run(work, meeting)

    def count(self, key: str, amount: int = 1) -> int:
        """Add to the number under ``key`` and return it."""
        return self._run(lambda session: session.add(key, amount))

    def await_arrival(self, key: str, count: int, rank: int) -> None:
        """Wait until ``rank`` has counted ``count`` arrivals under ``key``."""
        meeting = self._next(self._name, None)

        def work(session: Session) -> None:
            poll = self._poll(meeting)
            while True:
                lost = self._ranks.lost()
                if session.add(key, 0) >= count:
                    return
                if rank in lost:
                    raise lost_error({rank: lost[rank]}, meeting.what)
                poll(session, lambda: [rank])

        self._run(work)

    def await_value(
        self,
        key: str,
        rank: int,
        *,
        other_than: bytes | None = None,
        timeout_s: float | None = None,
    ) -> bytes:
        """The value that ``rank`` sets under ``key``."""
        meeting = self._next(self._name, timeout_s)

        def work(session: Session) -> bytes:
            poll = self._poll(meeting)
            while True:
                if session.check([key]):
                    (value,) = session.get([key])
                    if value != other_than:
                        return value
                poll(session, lambda: [rank])

        return self._run(work)

    def set_value(self, key: str, value: bytes) -> None:
        self._run(lambda session: session.set(key, value))

    def check(self) -> None:
        now = time.monotonic()
        job, self._glance = self._glance, None
        if job is None or (job.done.is_set() and job.error is None):
            # The other ranks' health is known here; only for their errors the store is asked.
            if now < self._look_at and now <= self._deadline and not self._ranks.lost():
                return
            self._looked_first = min(self._looked_first, now)
            self._look_at = now + _pause_s(now - self._looked_first)
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
        self._raise_if_failed(session)
        if lost:
            raise lost_error(lost, self._name)
        if time.monotonic() > self._deadline:
            raise overdue_error(self._name, self._timeout_s)

    def _judge_glance(self, quiet: Quiet) -> CheckpointError | None:
        if quiet.seconds > STUCK_S and time.monotonic() > self._deadline + STUCK_S:
            return overdue_error(self._name, self._timeout_s)
        return self._judge(None, quiet)

    def fail(self, record: ErrorRecord) -> ErrorRecord:
        if self._ranks.is_closed():
            self._depart()
            return record
        if not self._channel.usable:
            # The store is gone, or slow. If no rank is lost it may answer yet, and the others,
            # who are waiting for this rank, must then be told.
            if not self._ranks.lost():
                self._reconnect().post(lambda session: self._fail(session, record))
            return record
        try:
            return self._run(lambda session: self._fail(session, record))
        except CheckpointError:  # the failure at hand says more than this one
            return record

    def _depart(self) -> None:
        """This rank has left in the middle of things: to the others it is lost, also where it
        had arrived already."""
        gone = lost_error({self._ranks.rank: LEFT}, self._name)
        record = ErrorRecord.of(gone, rank=self._ranks.rank)
        if self._channel.usable:
            with contextlib.suppress(TimeoutError, StoreFailedError):  # liveness says it as well
                self._channel.run(lambda session: self._fail(session, record), briefly)

    def _fail(self, session: Session, record: ErrorRecord) -> ErrorRecord:
        if self._meeting is not None:
            key = self._meeting.key("all")
            word = session.set_if_absent(key, VETO + encode(record))
            self._mine.append(key)
            if self._meeting.last and not word.startswith(VETO):
                return record  # all have got through; only this rank fails, and by itself
        agreed = decode(session.set_if_absent(self._failed, encode(record)))
        session.later(lambda: self._leave(session))
        return agreed

    def _leave(self, session: Session) -> None:
        """The last rank to leave tidies up: until then somebody may be reading any key, and
        reading a key that has just gone would block."""
        litter, left = f"{self._base}/litter", f"{self._base}/left"
        session.set(f"{litter}/{self._ranks.rank}", json.dumps(self._mine).encode())
        if session.add(left, 1) < self._ranks.world_size:
            return
        for rank in range(self._ranks.world_size):
            for key in json.loads(session.get([f"{litter}/{rank}"])[0]):
                session.delete(key)
            session.delete(f"{litter}/{rank}")
        session.delete(self._failed)
        session.delete(left)

    def _next(
        self, what: str, timeout_s: float | None, *, root: int = 0, last: bool = False
    ) -> Meeting:
        self._count += 1
        until = self._deadline
        if timeout_s is not None:
            until = min(until, time.monotonic() + timeout_s)
        return Meeting(
            # With the kind and the root in the key, ranks that differ in them do not meet.
            base=f"{self._base}/{self._count}-{what}-{root}",
            what=what if self._name == what else f"{what} {self._count} of {self._name}",
            timeout_s=self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s),
            deadline=until,
            last=last,
        )

    def _meet(
        self, meeting: Meeting, data: bytes, combine: Callable[[list[bytes]], bytes]
    ) -> bytes:
        """Rank 0 gathers, combines, and tells everybody.

        Rank 0's word and the veto of a rank that gives up go to one key, and the first of them
        stands: either all ranks that live get through or none does.
        """
        key = meeting.key("all")

        def word(session: Session) -> tuple[bytes, bytes | None]:
            try:
                parts = self._gather(session, meeting, data, 0)
                if parts is not None:
                    own = combine(parts)
                    return self._put(session, key, own, if_absent=True), own
                late = functools.partial(self._absent, session, meeting)
                self._await(session, meeting, {0: key}, late=late)
                return session.get([key])[0], None
            except (RankLostError, RankTimeoutError) as error:
                record = ErrorRecord.of(error, rank=self._ranks.rank)
                self._mine.append(key)
                return session.set_if_absent(key, VETO + encode(record)), None

        def work(session: Session) -> bytes:
            said, own = word(session)
            return self._take_word(session, key, said, own=own)

        before = len(self._mine)
        self._meeting = meeting  # until it is over, a failure is a veto of it
        result = self._run(work, meeting)
        self._meeting = None
        del self._mine[:before]  # every rank has come this far, and so has read all of that
        return result

    def _take_word(
        self, session: Session, key: str, word: bytes, *, own: bytes | None = None
    ) -> bytes:
        """The value of a broadcast whose first part is ``word``; the last to take it deletes it.
        Who said it has it as its ``own``."""
        if word.startswith(VETO):
            raise decode(word[len(VETO) :]).rebuild()
        if own is not None:
            return own
        value = rest(session, key, word)
        self._mine.append(f"{key}/read")

        def acknowledge() -> None:
            if session.add(f"{key}/read", 1) == self._ranks.world_size - 1:
                delete(session, key, word)
                session.delete(f"{key}/read")

        session.later(acknowledge)
        return value

    def _arrivals(self, meeting: Meeting) -> dict[int, str]:
        return {rank: meeting.key(str(rank)) for rank in range(self._ranks.world_size)}

    def _gather(
        self, session: Session, meeting: Meeting, data: bytes, target: int
    ) -> list[bytes] | None:
        keys = self._arrivals(meeting)
        own = keys.pop(self._ranks.rank)
        if self._ranks.rank != target:
            self._put(session, own, data)
            return None
        self._await(session, meeting, keys)
        taken = take(session, list(keys.values()))
        taken.insert(target, data)
        return taken

    def _put(self, session: Session, key: str, data: bytes, *, if_absent: bool = False) -> bytes:
        head, written = put(session, key, data, if_absent=if_absent)
        self._mine += written
        return head

    def _await(
        self,
        session: Session,
        meeting: Meeting,
        keys: Mapping[int, str],
        *,
        late: Callable[[], list[int]] | None = None,
    ) -> None:
        """Poll until every rank of ``keys`` has set its key.

        A rank that is lost ends the wait, unless it had done its part: of the ranks waited for,
        that they set their key; of any other, that the word came through, which is looked at
        first. ``late`` tells who has not come, if that may be others than those waited for.
        """
        pending = list(keys.items())
        poll = self._poll(meeting)
        if late is None:
            late = functools.partial(self._missing, session, keys)
        while True:
            lost = self._ranks.lost()  # read before looking: what a lost rank set is visible
            while pending and session.check([key for _, key in pending[:CHECK_BATCH]]):
                del pending[:CHECK_BATCH]
            if not pending:
                return
            done = [rank for rank in lost if rank in keys and session.check([keys[rank]])]
            lost = {rank: state for rank, state in lost.items() if rank not in done}
            if lost:
                self._raise_if_failed(session)
                raise lost_error(lost, meeting.what)
            poll(session, lambda: late() or list(keys))

    def _missing(self, session: Session, keys: Mapping[int, str]) -> list[int]:
        return [rank for rank, key in keys.items() if not session.check([key])]

    def _absent(self, session: Session, meeting: Meeting) -> list[int]:
        """Who has not come to a meeting. Rank 0 leaves no key there, but says where it is."""
        keys = self._arrivals(meeting)
        del keys[0]
        here = self._place(session, 0).startswith(f"{meeting.base}\n")
        return ([] if here else [0]) + self._missing(session, keys)

    def _holding_up(self, session: Session, source: int) -> list[int]:
        """Who keeps a rank from giving its word: those it waits for in a gathering that this rank
        has come to already, or else itself."""
        base = self._place(session, source).partition("\n")[0]
        keys = {r: f"{base}/{r}" for r in range(self._ranks.world_size) if r != source}
        if not base.startswith(f"{self._base}/") or not session.check([keys[self._ranks.rank]]):
            return [source]  # it has taken what the others gave it, or waits for nobody
        return self._missing(session, keys) or [source]

    def _poll(self, meeting: Meeting) -> Callable[[Session, Callable[[], list[int]]], None]:
        """A pause between two looks that raises when there is no point in a further one."""
        looks = 0
        began = time.monotonic()
        pause_s = FIRST_PAUSE_S

        def poll(session: Session, missing: Callable[[], list[int]]) -> None:
            nonlocal looks, pause_s
            looks += 1
            now = time.monotonic()
            if now > meeting.deadline:
                late = {rank: self._whereabouts(session, rank) for rank in missing()}
                raise late_error(late, meeting.what, meeting.timeout_s)
            if looks <= EAGER_POLLS:
                return
            self._raise_if_failed(session)
            session.pause(min(pause_s, max(0.0, meeting.deadline - now)))
            pause_s = min(pause_s * 1.3, _pause_s(now - began))

        return poll

    def _whereabouts(self, session: Session, rank: int) -> str:
        """Where a rank that did not come was last: often it waits elsewhere, for the others."""
        if rank not in self._ranks.joined():
            return "never made a coordinator"
        place = self._place(session, rank)
        if not place:
            return "has not called a collective yet"
        return f"was last in {place.rpartition(chr(10))[2]}"

    def _place(self, session: Session, rank: int) -> str:
        """The meeting in which a rank was last: its keys' base, and its name on a line below."""
        key = f"{self._ranks.home}/at/{rank}"
        return session.get([key])[0].decode() if session.check([key]) else ""

    def _raise_if_failed(self, session: Session) -> None:
        if session.check([self._failed]):
            raise decode(session.get([self._failed])[0]).rebuild()

    def _run(self, work: Callable[[Session], T], meeting: Meeting | None = None) -> T:
        def placed(session: Session) -> T:
            if meeting is not None:
                place = f"{meeting.base}\n{meeting.what}".encode()
                session.set(f"{self._ranks.home}/at/{self._ranks.rank}", place)
            return work(session)

        try:
            return self._channel.run(placed, functools.partial(self._judge, meeting))
        except StoreFailedError as error:
            raise self._without_store(f"the store failed: {error}") from error

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


def _pause_s(waited_s: float) -> float:
    """Between two looks at the store: lively at first, then in proportion to the time already
    waited. A long wait costs the store little and ends at most 5 % late."""
    return min(max(0.005, waited_s / 20), MAX_PAUSE_S)
