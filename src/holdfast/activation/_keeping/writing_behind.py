"""Writes payloads into a store and lets go of their memory. Knows what waits, what is safe and
what the store refused; not who holds what.
"""

import logging
import threading
import time
import weakref
from typing import Any

from holdfast.activation._events import ActivationEvent, Subscribers
from holdfast.activation._keeping.geometry import stretch_bytes
from holdfast.activation._keeping.memory_stats import MemoryAccount
from holdfast.activation._keeping.payload import Payload, State

_log = logging.getLogger("holdfast.activation")


class WritingBehind:
    """What is to be written, and the writing. All but ``write`` and ``trim`` is called under the
    tier's lock, which ``changed`` has.

    While ``busy``, somebody writes or trims, and nobody else may.
    """

    def __init__(
        self,
        store: Any,
        account: MemoryAccount,
        changed: threading.Condition,
        subscribers: Subscribers,
        backlog_bytes: int,
    ) -> None:
        self._store = store
        self._account = account
        self._changed = changed
        self._subscribers = subscribers
        self._limit = backlog_bytes
        self._backlog = 0
        self._places = 0
        self._refused = False
        self._told: set[str] = set()
        self._unsettled: dict[int, list[weakref.ref[Payload]]] = {}
        self.busy = False

    def has_room(self, size_bytes: int) -> bool:
        """Whether so much may be added. Anything may when nothing waits."""
        return not self._backlog or self._backlog + size_bytes <= self._limit

    def add(self, payload: Payload) -> None:
        """It waits to be written."""
        self._backlog += payload.size_bytes

    def cancel(self, payload: Payload) -> None:
        """It stays in memory, unless it is in the store already."""
        if payload.state in {State.WAITING, State.WRITING}:
            payload.state = State.KEPT
            self.unwait(payload.size_bytes)

    def unwait(self, size_bytes: int) -> None:
        """So much no longer waits."""
        self._backlog -= size_bytes
        self._changed.notify_all()

    def free(self, place: Any, size_bytes: int) -> None:
        """Nobody needs what was written."""
        self._store.free(place)
        self._account.moved -= size_bytes
        self._places -= 1
        self._refused = False

    def settle(self) -> list[Payload]:
        """Look at what this thread held: it is in none of torch's operations now. Returns what was
        changed while it was copied, and is therefore lost."""
        torn = []
        for ref in self._unsettled.pop(threading.get_ident(), ()) if self._unsettled else ():
            payload = ref()
            if payload is None or payload.state is not State.MOVED:
                continue
            payload.settled = not payload.is_changed()
            if not payload.settled:
                self.free(payload.place, payload.size_bytes)
                payload.state, payload.place = State.CHANGED, None
                torn.append(payload)
        return torn

    def write(self, payload: Payload) -> None:
        """Write it, unless it is no longer wanted. Called by one thread, without the lock.

        If that fails, the tensor stays in memory, and subscribers and the log are told. What comes
        later is tried again as soon as there may be room.
        """
        began_ns = time.perf_counter_ns()
        with self._changed:
            while self.busy:
                self._changed.wait()
            if payload.state is not State.WAITING:
                return
            payload.state = State.WRITING
            self.busy = True
            problem = "it is full, and nothing was freed since" if self._is_full() else ""
        place = None
        try:
            if not problem:
                place = self._copy(payload)
        except Exception as error:  # noqa: BLE001 -- told below; the tensor stays in memory
            problem = f"{type(error).__name__}: {error}"
        finally:
            moved = self._finish(payload, place, refused=bool(problem))
        if moved:
            self._tell("moved", payload, began_ns)
        elif problem:
            self._warn_once(
                "the %s tier did not take the %d bytes of %r (%s): they stay in memory, and so may "
                "others; nothing is lost",
                self._store.word,
                payload.size_bytes,
                payload.layer_id,
                problem,
            )
            self._tell("fell_back", payload, began_ns)

    def trim(self) -> None:
        """Give back room that nobody uses. Called without the lock, by whoever set ``busy``."""
        try:
            self._store.trim()
        except OSError as error:
            self._warn_once(
                "the %s tier could not give back room that it no longer uses (%s): it is used "
                "again for what is written next; nothing is lost",
                self._store.word,
                error,
            )
        finally:
            with self._changed:
                self.busy = False
                self._changed.notify_all()

    def _is_full(self) -> bool:
        # With nothing of ours in the store, only trying can tell.
        return self._refused and self._places > 0

    def _copy(self, payload: Payload) -> Any:
        storage = payload.storage()
        source = None if storage is None else stretch_bytes(storage, payload.start, payload.stop)
        if source is None:
            return None
        return self._store.write(source, payload.mark, lambda: payload.state is State.WRITING)

    def _finish(self, payload: Payload, place: Any, *, refused: bool) -> bool:
        """Whether the payload is in the store now."""
        released: list[Any] = []
        with self._changed:
            self.busy = refused
            self._refused |= refused
            wanted = payload.state is State.WRITING
            torn = wanted and place is not None and payload.is_changed()
            moved = wanted and place is not None and not torn
            if wanted:
                self.unwait(payload.size_bytes)
            if moved:
                released = payload.put_away(place)
                self._places += 1
                self._account.moved += payload.size_bytes
            elif place is not None:
                self._store.free(place)
            if torn:
                released, payload.aliases, payload.versions = payload.aliases, [], []
                payload.state = State.CHANGED
            elif wanted and not moved:
                payload.state = State.KEPT
            if released:
                self._account.add(-payload.size_bytes)
            self._changed.notify_all()
        released.clear()  # memory is given back here, outside the lock
        if refused:
            self.trim()  # what was written of it is of no use
        if moved:
            self._begin_settling(payload)
        return moved

    def _begin_settling(self, payload: Payload) -> None:
        with self._changed:
            payload.settled = payload.storage() is None
            if not payload.settled and payload.holder is not None:
                self._unsettled.setdefault(payload.holder, []).append(weakref.ref(payload))

    def _warn_once(self, message: str, *facts: object) -> None:
        if message not in self._told:
            self._told.add(message)
            _log.warning(message, *facts)

    def _tell(self, kind: str, payload: Payload, began_ns: int) -> None:
        if self._subscribers:
            self._subscribers.tell(
                ActivationEvent(
                    kind=kind,
                    layer_id=payload.layer_id,
                    size_bytes=payload.size_bytes,
                    elapsed_ms=(time.perf_counter_ns() - began_ns) / 1e6,
                )
            )
