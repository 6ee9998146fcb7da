"""Waiting for keys that other ranks set: when to look again, when there is no point in it, and who
is to blame. Knows no values.

A store's own ``wait`` can neither be cancelled nor time out without writing warnings to stderr, so
keys are polled for.
"""

import time
from collections.abc import Callable, Mapping
from typing import final

from holdfast.coordination._channel import Session
from holdfast.coordination._meeting import GIVEN_UP, GivenUp, Meeting, Ranks
from holdfast.coordination._outcome import decode, late_error, lost_error

CHECK_BATCH = 64  # keys looked for in one message
EAGER_POLLS = 20  # without a pause: some two milliseconds
FIRST_PAUSE_S = 0.0001
MAX_PAUSE_S = 0.2


@final
class Waiting:
    """The waits of one operation. Its keys are under ``base``, home, name and turn; its failure is
    under ``failed``."""

    def __init__(self, ranks: Ranks, *, base: str, failed: str) -> None:
        self._ranks = ranks
        self._base = base
        self._name = base.removeprefix(f"{ranks.home}/").rpartition("/")[0]
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

        def missing() -> list[int]:
            return self._missing(session, keys) if late is None else late() or list(keys)

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
            poll(session, missing)

    def poll(self, meeting: Meeting) -> Callable[[Session, Callable[[], list[int]]], None]:
        """A pause between two looks that raises when there is no point in a further one. If nobody
        is ``missing``, there is: they have come since the last."""
        looks = 0
        began = time.monotonic()
        pause_s = FIRST_PAUSE_S

        def poll(session: Session, missing: Callable[[], list[int]]) -> None:
            nonlocal looks, pause_s
            looks += 1
            now = time.monotonic()
            if now > meeting.deadline:
                late = {rank: self._whereabouts(session, rank) for rank in missing()}
                if not late:
                    return
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
        here = self._read(session, self._here(0)).startswith(f"{meeting.base}\n")
        return ([] if here else [0]) + self._missing(session, keys)

    def holding_up(self, session: Session, source: int) -> list[int]:
        """Who keeps a rank from giving its word: those it waits for in a gathering that this rank
        has come to already, those it has just waited for in vain, or else itself."""
        place = self._read(session, self._here(source))
        base = place.partition("\n")[0]
        if not (base.startswith(f"{self._base}/") and base.endswith(f"-{source}")):
            return [source]  # it gathers nothing here, so it waits for nobody
        keys = {r: f"{base}/{r}" for r in range(self._ranks.world_size) if r != source}
        missing = self._missing(session, keys)
        given_up = f"{base}/{GIVEN_UP}"
        if session.check([given_up]):  # said before the keys are taken, so looked at after them
            return GivenUp.of(session.get([given_up])[0]).missing or [source]
        if self._ranks.rank in missing or self._read(session, self._here(source)) != place:
            return [source]  # it has taken what the others gave it
        return missing or [source]

    def enter(self, session: Session, meeting: Meeting) -> None:
        """Say where this rank is, for those who will miss it elsewhere."""
        place = f"{meeting.base}\n{meeting.what}".encode()
        session.set(self._ranks.at(self._ranks.rank), place)
        session.set(self._here(self._ranks.rank), place)

    def has_all(self, session: Session, meeting: Meeting) -> None:
        """Say that all have come to a meeting, before what they set there is deleted."""
        session.set(self._here(self._ranks.rank), f"{meeting.base}/\n{meeting.what}".encode())

    def _here(self, rank: int) -> str:
        """Where in operations of this name a rank was last. Others may be under way."""
        return self._ranks.at(rank, self._name)

    def _read(self, session: Session, key: str) -> str:
        """A meeting that ``enter`` has set there: its keys' base, and its name on a line below."""
        return session.get([key])[0].decode() if session.check([key]) else ""

    def _whereabouts(self, session: Session, rank: int) -> str:
        """Where a rank that did not come was last: often it waits elsewhere, for the others."""
        if rank not in self._ranks.joined():
            return "never made a coordinator"
        place = self._read(session, self._ranks.at(rank))
        if not place:
            return "has not called a collective yet"
        return f"was last in {place.rpartition(chr(10))[2]}"

    def _missing(self, session: Session, keys: Mapping[int, str]) -> list[int]:
        return [rank for rank, key in keys.items() if not session.check([key])]


def pause_after(waited_s: float) -> float:
    """Between two looks at the store: lively at first, then in proportion to the time already
    waited. A long wait costs the store little and ends at most 5 % late."""
    return min(max(0.005, waited_s / 20), MAX_PAUSE_S)
