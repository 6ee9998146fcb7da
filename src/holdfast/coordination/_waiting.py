"""Waiting for keys that other ranks set: when to look again, when there is no point in it, and who
is to blame. Knows no values.

A store's own ``wait`` can neither be cancelled nor time out without writing warnings to stderr, so
keys are polled for.
"""

import functools
import json
import time
from collections.abc import Callable, Mapping
from typing import final

from holdfast.coordination._channel import Session
from holdfast.coordination._meeting import GIVEN_UP, Meeting, Ranks
from holdfast.coordination._outcome import decode, late_error, lost_error

CHECK_BATCH = 64  # keys looked for in one message
EAGER_POLLS = 20  # without a pause: some two milliseconds
FIRST_PAUSE_S = 0.0001
MAX_PAUSE_S = 0.2


@final
class Waiting:
    """The waits of one operation. Its keys are under ``base``, its failure is under ``failed``."""

    def __init__(self, ranks: Ranks, *, base: str, failed: str) -> None:
        self._ranks = ranks
        self._base = base
        self._failed = failed

    def until_set(
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
        poll = self.poll(meeting)
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
                self.raise_if_failed(session)
                raise lost_error(lost, meeting.what)
            poll(session, lambda: late() or list(keys))

    def poll(self, meeting: Meeting) -> Callable[[Session, Callable[[], list[int]]], None]:
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
            self.raise_if_failed(session)
            session.pause(min(pause_s, max(0.0, meeting.deadline - now)))
            pause_s = min(pause_s * 1.3, pause_after(now - began))

        return poll

    def raise_if_failed(self, session: Session) -> None:
        if session.check([self._failed]):
            raise decode(session.get([self._failed])[0]).rebuild()

    def absent(self, session: Session, meeting: Meeting) -> list[int]:
        """Who has not come to a meeting. Rank 0 leaves no key there, but says where it is."""
        keys = meeting.arrivals(self._ranks.world_size)
        del keys[0]
        here = self._place(session, 0).startswith(f"{meeting.base}\n")
        return ([] if here else [0]) + self._missing(session, keys)

    def holding_up(self, session: Session, source: int) -> list[int]:
        """Who keeps a rank from giving its word: those it waits for, or has just waited for in
        vain, in a gathering that this rank has come to already, or else itself."""
        base = self._place(session, source).partition("\n")[0]
        if not base.startswith(f"{self._base}/"):
            return [source]  # it waits for nobody, or in another operation
        keys = {r: f"{base}/{r}" for r in range(self._ranks.world_size) if r != source}
        missing = self._missing(session, keys)
        given_up = f"{base}/{GIVEN_UP}"
        if session.check([given_up]):  # said before the keys are taken, so looked at after them
            missing = json.loads(session.get([given_up])[0])
        if self._ranks.rank in missing:
            return [source]  # it has taken what the others gave it
        return missing or [source]

    def enter(self, session: Session, meeting: Meeting) -> None:
        """Say where this rank is, for those who will miss it elsewhere."""
        place = f"{meeting.base}\n{meeting.what}".encode()
        session.set(f"{self._ranks.home}/at/{self._ranks.rank}", place)

    def _place(self, session: Session, rank: int) -> str:
        """The meeting in which a rank was last: its keys' base, and its name on a line below."""
        key = f"{self._ranks.home}/at/{rank}"
        return session.get([key])[0].decode() if session.check([key]) else ""

    def _whereabouts(self, session: Session, rank: int) -> str:
        """Where a rank that did not come was last: often it waits elsewhere, for the others."""
        if rank not in self._ranks.joined():
            return "never made a coordinator"
        place = self._place(session, rank)
        if not place:
            return "has not called a collective yet"
        return f"was last in {place.rpartition(chr(10))[2]}"

    def _missing(self, session: Session, keys: Mapping[int, str]) -> list[int]:
        return [rank for rank, key in keys.items() if not session.check([key])]


def pause_after(waited_s: float) -> float:
    """Between two looks at the store: lively at first, then in proportion to the time already
    waited. A long wait costs the store little and ends at most 5 % late."""
    return min(max(0.005, waited_s / 20), MAX_PAUSE_S)
