"""Which moved payloads are read back before they are asked for, and which of those read stay in
memory. Knows the order of holding and a number of bytes; does not read.

Backward asks in about the reverse order of holding. So when one is asked for, those held just
before it are wanted next, as far as they fit into the window. What else is in memory, such as
bytes that several tensors share and not all of them have asked for, stays as long as there is
room.
"""

import bisect
import weakref
from collections.abc import Callable
from typing import Any, Final

from holdfast.activation._keeping.memory_stats import MemoryAccount
from holdfast.activation._keeping.payload import Payload, Record, State

_LOOK_BACK: Final = 256
"""How many that were held before are looked at. Among them are those that stayed in memory."""


class ReadingAhead:
    """Not thread-safe: the tier calls it under its lock."""

    def __init__(
        self, window_bytes: int, account: MemoryAccount, request: Callable[[Payload], None]
    ) -> None:
        self._window_bytes = window_bytes
        self._account = account
        self._request = request
        self._order: list[int] = []
        self._payloads: dict[int, weakref.ref[Payload]] = {}
        # By their first sequence, and the oldest first.
        self._ready: dict[int, weakref.ref[Payload]] = {}
        self._requested: dict[int, weakref.ref[Payload]] = {}

    def add(self, sequence: int, payload: Payload) -> None:
        """Something was held. Sequences grow."""
        self._order.append(sequence)
        self._payloads[sequence] = weakref.ref(payload)

    def forget(self, record: Record) -> None:
        """A payload is gone."""
        for sequence in record.sequences:
            if self._payloads.pop(sequence, None) is not None:  # an interrupt may have come first
                del self._order[bisect.bisect_left(self._order, sequence)]
            self._requested.pop(sequence, None)
            if self._ready.pop(sequence, None) is not None:
                self._account.add(-record.size_bytes)

    def living(self) -> list[Payload]:
        found = {id(each): each for ref in self._payloads.values() if (each := ref()) is not None}
        return list(found.values())

    def put(self, payload: Payload, found: Any) -> None:
        """Bytes were read back and stay in memory for now."""
        if payload.ready is None:
            self._account.add(payload.size_bytes)
        payload.ready = found
        payload.ready_version = found._version  # noqa: SLF001
        self._ready[payload.first_sequence] = weakref.ref(payload)

    def take(self, payload: Payload) -> Any:
        """What was put, or ``None``. Bytes that whoever got them has changed are dropped: those in
        the store are as they were."""
        if payload.ready is not None and payload.ready._version != payload.ready_version:  # noqa: SLF001
            self.drop(payload)
        return payload.ready

    def drop(self, payload: Payload) -> None:
        """Let the bytes in memory go; they are still in the store. Idempotent."""
        if payload.ready is not None:
            payload.ready = None
            self._ready.pop(payload.first_sequence, None)
            self._account.add(-payload.size_bytes)

    def asked(self, sequence: int, payload: Payload) -> None:
        """The tensor held as ``sequence`` is asked for: request what comes next, and make room."""
        wanted = self._before(sequence, payload)
        self._unrequest(wanted)
        room = self._window_bytes - sum(each.size_bytes for each in wanted.values())
        for other in self._others({*wanted, id(payload)}):
            room -= other.size_bytes
            if room < 0:
                self.drop(other)
        for each in wanted.values():
            if each.ready is None and not each.reading and not each.requested:
                each.requested = True
                self._requested[each.first_sequence] = weakref.ref(each)
                self._request(each)

    def started(self, payload: Payload) -> None:
        """Somebody reads it."""
        payload.requested = False
        self._requested.pop(payload.first_sequence, None)

    def _before(self, sequence: int, payload: Payload) -> dict[int, Payload]:
        """The payloads held before, nearest first: the nearest, and as many as fit with it."""
        wanted: dict[int, Payload] = {}
        room = self._window_bytes
        at = bisect.bisect_left(self._order, sequence)
        for earlier in reversed(self._order[max(0, at - _LOOK_BACK) : at]):
            each = self._payloads[earlier]()
            if each is None or each is payload or id(each) in wanted:
                continue
            if each.state is not State.MOVED:
                continue
            room -= each.size_bytes
            if wanted and room < 0:
                break
            wanted[id(each)] = each
            if room <= 0:
                break
        return wanted

    def _unrequest(self, wanted: dict[int, Payload]) -> None:
        for first, ref in [*self._requested.items()]:
            each = ref()
            if each is None or id(each) not in wanted:
                del self._requested[first]
                if each is not None:
                    each.requested = False

    def _others(self, excepted: set[int]) -> list[Payload]:
        """What is ready beside these, the newest first."""
        ready = [ref() for ref in reversed([*self._ready.values()])]
        return [each for each in ready if each is not None and id(each) not in excepted]
