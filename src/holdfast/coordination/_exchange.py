"""One operation over the c10d store: keys in, keys out, nothing left behind.

A value is set under one key. Receivers poll for it (`_waiting.py`). Who gathers deletes what
it took; the last receiver of a broadcast deletes it. A failed operation leaves one small
record until every rank has left it.

Known inefficiency: everything goes through one server, so with thousands of ranks a barrier
takes as long as that server needs for some five messages a rank.
"""

import contextlib
import functools
import json
import time
from collections.abc import Callable
from typing import final

from holdfast.coordination._beacon import LEFT
from holdfast.coordination._channel import Channel, Session, StoreFailedError, briefly
from holdfast.coordination._meeting import GivenUp, Meeting, Ranks
from holdfast.coordination._outcome import decode, encode, lost_error
from holdfast.coordination._patience import Patience
from holdfast.coordination._values import delete, join, put, rest, split, take
from holdfast.coordination._waiting import Waiting
from holdfast.errors import CheckpointError, ErrorRecord, RankLostError, RankTimeoutError

VETO = bytes(4)  # in place of the number of parts, which is never 0


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
        self._waiting = Waiting(ranks, base=base, failed=self._failed)
        self._patience = Patience(
            channel, ranks, self._waiting, name=name, timeout_s=timeout_s, deadline=deadline
        )
        self._count = 0
        self._meeting: Meeting | None = None
        self._mine: list[str] = []

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
                late = functools.partial(self._waiting.holding_up, session, source)
                self._waiting.until_set(session, meeting, {source: key}, late=late)
                return self._take_word(session, key, session.get([key])[0])
            word = self._put(session, key, data)
            self._waiting.raise_if_failed(session)  # the others may have given up on this rank
            return self._take_word(session, key, word, own=data)

        return self._patience.run(work, meeting)

    def gather(self, data: bytes, target: int, timeout_s: float | None) -> list[bytes] | None:
        meeting = self._next("gather", timeout_s, root=target)
        given_up = meeting.given_up

        def work(session: Session) -> list[bytes] | None:
            try:
                gathered = self._gather(session, meeting, data, target)
            except (RankLostError, RankTimeoutError) as error:
                # Who has given its part has gone on, and will not come to tidy up.
                keys = meeting.arrivals(self._ranks.world_size)
                came = [rank for rank, key in keys.items() if session.check([key])]
                said = GivenUp(missing=list(error.ranks or ()), came=came)
                session.set(given_up, said.encode())
                self._mine.append(given_up)
                session.later(lambda: take(session, [keys[rank] for rank in came]))
                raise
            if gathered is None and session.check([self._failed]):
                self._take_back(session, meeting)
                self._waiting.raise_if_failed(session)
            return gathered

        return self._patience.run(work, meeting)

    def _take_back(self, session: Session, meeting: Meeting) -> None:
        """Delete what this rank gave, unless the target has read it or is about to."""
        if not session.check([meeting.given_up]):
            return
        if self._ranks.rank in GivenUp.of(session.get([meeting.given_up])[0]).came:
            return
        for key in self._mine:
            if key.startswith(f"{meeting.base}/"):
                session.delete(key)

    def count(self, key: str, amount: int = 1) -> int:
        """Add to the number under ``key`` and return it."""
        return self._patience.run(lambda session: session.add(key, amount))

    def await_arrival(self, key: str, count: int, rank: int) -> None:
        """Wait until ``rank`` has counted ``count`` arrivals under ``key``."""
        meeting = self._next(self._name, None)

        def work(session: Session) -> None:
            poll = self._waiting.poll(meeting)
            while True:
                lost = self._ranks.lost()
                if session.add(key, 0) >= count:
                    return
                if rank in lost:
                    raise lost_error({rank: lost[rank]}, meeting.what)
                poll(session, lambda: [rank])

        self._patience.run(work)

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
            poll = self._waiting.poll(meeting)
            while True:
                if session.check([key]):
                    (value,) = session.get([key])
                    if value != other_than:
                        return value
                poll(session, lambda: [rank])

        return self._patience.run(work)

    def set_value(self, key: str, value: bytes) -> None:
        self._patience.run(lambda session: session.set(key, value))

    def check(self) -> None:
        self._patience.check()

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
            return self._patience.run(lambda session: self._fail(session, record))
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
                late = functools.partial(self._waiting.absent, session, meeting)
                self._waiting.until_set(session, meeting, {0: key}, late=late)
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
        result = self._patience.run(work, meeting)
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

    def _gather(
        self, session: Session, meeting: Meeting, data: bytes, target: int
    ) -> list[bytes] | None:
        keys = meeting.arrivals(self._ranks.world_size)
        own = keys.pop(self._ranks.rank)
        if self._ranks.rank != target:
            self._put(session, own, data)
            return None
        self._waiting.until_set(session, meeting, keys)
        session.later(lambda: self._waiting.has_all(session, meeting))
        taken = take(session, list(keys.values()))
        taken.insert(target, data)
        return taken

    def _put(self, session: Session, key: str, data: bytes, *, if_absent: bool = False) -> bytes:
        head, written = put(session, key, data, if_absent=if_absent)
        self._mine += written
        return head
