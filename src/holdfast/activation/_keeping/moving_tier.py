"""Moves tensors into a store behind the caller's back, and reads them back before they are asked
for. Knows who holds what and in which order; the store knows how bytes are kept.

Two threads, one that writes and one that reads ahead. All state is under one lock, which is never
held over a copy or a request.
"""

import collections
import itertools
import logging
import threading
from typing import Any, Final

from holdfast.activation._events import Subscribers
from holdfast.activation._keeping.geometry import plain_storage, stretch, stretch_bytes
from holdfast.activation._keeping.held import Held, changed, closed, lost
from holdfast.activation._keeping.in_place_tier import InPlaceTier
from holdfast.activation._keeping.memory_stats import MemoryAccount
from holdfast.activation._keeping.payload import MovingTensor, Payload, PayloadRef, State
from holdfast.activation._keeping.reading_ahead import ReadingAhead
from holdfast.activation._keeping.workers import Workers
from holdfast.activation._keeping.writing_behind import WritingBehind
from holdfast.errors import CorruptedError

LEAST_BYTES: Final = 64 * 1024
"""Smaller tensors stay in memory: moving them costs more than it saves."""

BACKLOG_BYTES: Final = 256 * 1024 * 1024
"""What may wait to be written. Whoever holds more waits for the store, so memory is bounded
whatever the speed of the disk."""

WINDOW_BYTES: Final = 64 * 1024 * 1024
"""What is read ahead of being asked for; a single larger tensor is, too."""

_WRITE, _READ_AHEAD = range(2)

_log = logging.getLogger("holdfast.activation")


class MovingTier:
    """Tensors in a store, in memory only on the way there and back. Thread-safe.

    What has no plain storage (sparse, quantized, wrapper subclasses) and what is smaller than
    ``LEAST_BYTES`` is kept in place. So is everything in a forked process, which has neither the
    threads nor a file of its own; it can get what was moved before, as long as the process it
    came from still holds that.
    """

    moves = True

    def __init__(
        self,
        store: Any,
        account: MemoryAccount,
        lock: threading.Lock,
        subscribers: Subscribers,
        *,
        backlog_bytes: int = BACKLOG_BYTES,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        self.closed = False
        self._store = store
        self._account = account
        self._changed = threading.Condition(lock)
        self._stay = InPlaceTier(lock, account)
        workers = Workers(self, (MovingTier._write, MovingTier._read_ahead))
        self._workers = workers
        self._behind = WritingBehind(store, account, self._changed, subscribers, backlog_bytes)
        self._ahead = ReadingAhead(
            window_bytes, account, lambda payload: workers.put(_READ_AHEAD, payload)
        )
        self._sequence = itertools.count()
        self._index: dict[int, list[PayloadRef]] = {}
        self._gone: collections.deque[PayloadRef] = collections.deque()
        self._readers = 0

    def hold(self, tensor: Any, layer_id: str, *, lasting: bool) -> Held:
        """Keep a tensor. ``lasting`` says that it may be asked for many times.

        Waits while too much is to be written. ``ValueError`` if the store is not for its device.
        """
        refusal = self._store.refusal(tensor.device)
        if refusal is not None:
            for_whom = f" for {layer_id!r}" if layer_id else ""
            raise ValueError(
                f"the {self._store.word} tier cannot keep a tensor{for_whom}: {refusal}; use the "
                "tier 'disk' or 'inplace'"
            )
        storage = plain_storage(tensor)
        start, stop = (0, 0) if storage is None else stretch(tensor, storage.nbytes())
        if stop - start < LEAST_BYTES or not self._workers.are_here:
            return self._stay.hold(tensor, layer_id, lasting=lasting)
        payload = self._same(storage, start, stop)
        with self._changed:
            self._open()
            self.tidy()
            if payload is None or payload.state is State.CHANGED:
                self._wait_for_room(stop - start)
                mark = self._store.mark(tensor.device)
                payload = Payload(self, layer_id, storage, (start, stop), mark)
                self._add(payload)
            sequence = next(self._sequence)
            held = payload.join(tensor.detach(), layer_id, sequence, lasting=lasting)
            self._ahead.add(sequence, payload)
            return held

    def get(self, held: MovingTensor) -> Any:
        """The tensor; see ``Held.get``."""
        payload = held.memory
        with self._changed:
            self.tidy()
            if self._is_in_memory(held):
                if not payload.lasting:  # asked for so soon, it is not worth writing
                    self._behind.cancel(payload)
                return payload.aliases[held.index]
            payload.unasked -= not held.asked
            held.asked = True
            self._ahead.asked(held.sequence, payload)
            found = self._ahead.take(payload)
            if found is None:
                self._begin_read(payload)
            elif payload.unasked <= 0:
                self._ahead.drop(payload)
        if found is None:
            try:
                found = self._read(payload, ahead=False)
            except (OSError, CorruptedError) as error:
                raise lost(held.layer_id, error) from error
        self._store.hand_out(found)
        return payload.geometries[held.index].over(found, payload.start)

    def tidy(self) -> None:
        """Clear up after what was dropped, and settle what this thread held. The caller holds the
        lock."""
        self._stay.tidy()
        while self._gone:
            self._clear_up(self._gone.popleft())
        for payload in self._behind.settle():
            self._ahead.drop(payload)

    def trim(self) -> None:
        """Give room that nobody uses back to the disk, unless that is being written to."""
        with self._changed:
            if self._behind.busy or self.closed:
                return
            self._behind.busy = True
        self._behind.trim()

    def close(self) -> None:
        """End the threads, drop what is in memory and give the store up. Idempotent."""
        with self._changed:
            if self.closed:
                return
            self.closed = True
            self._stay.close()
            living = self._ahead.living()
            for payload in living:
                self._behind.cancel(payload)
            self._changed.notify_all()
        self._workers.stop()
        self._workers.join()
        with self._changed:
            while (self._readers or self._behind.busy) and self._workers.are_here:
                self._changed.wait()
            for payload in living:
                payload.aliases, payload.versions, payload.ready = [], [], None
        self._store.close()

    def _open(self) -> None:
        if self.closed:
            raise closed()

    def _is_in_memory(self, held: MovingTensor) -> bool:
        """Whether the tensor is where it was; if not, it is in the store and nobody is reading
        it."""
        payload = held.memory
        while True:
            self._open()
            if payload.state is State.CHANGED or (not payload.settled and payload.is_changed()):
                raise changed(held.layer_id)
            if payload.state is not State.MOVED:
                return True
            if not payload.reading:
                return False
            self._changed.wait()

    def _same(self, storage: Any, start: int, stop: int) -> Payload | None:
        """A payload that already has the bytes of a stretch as they are now."""
        if storage._cdata not in self._index:  # noqa: SLF001
            return None
        with self._changed:
            payload = self._known(storage, start, stop)
            place = None if payload is None else payload.place
        if payload is None or place is None:
            return payload
        # Versions do not tell of all changes (``.data``, fused optimizers), bytes do.
        source = stretch_bytes(storage, payload.start, payload.stop)
        return payload if source is not None and self._store.is_same(place, source) else None

    def _known(self, storage: Any, start: int, stop: int) -> Payload | None:
        for ref in self._index.get(storage._cdata, ()):  # noqa: SLF001
            payload = ref()
            if (
                payload is not None
                and payload.storage() is storage
                and payload.start <= start
                and stop <= payload.stop
                and payload.state is not State.CHANGED
                and not payload.is_changed()
            ):
                return payload
        return None

    def _wait_for_room(self, size_bytes: int) -> None:
        # A subscriber that holds something cannot wait for the thread it is called by.
        while not self._behind.has_room(size_bytes) and not self._workers.is_one_of_them():
            self._changed.wait()
            self._open()
            self.tidy()

    def _add(self, payload: Payload) -> None:
        reference = payload.reference(self._gone.append)
        self._index.setdefault(payload.record.key, []).append(reference)
        self._account.add(payload.size_bytes)
        if self._workers.start():
            self._behind.add(payload)
            self._workers.put(_WRITE, payload)
        else:
            payload.state = State.KEPT

    def _clear_up(self, gone: PayloadRef) -> None:
        record = gone.record
        known = self._index[record.key]
        known[:] = [each for each in known if each is not gone]
        if not known:
            del self._index[record.key]
        self._ahead.forget(record)
        if record.state is State.MOVED:
            self._behind.free(record.place, record.size_bytes)
        elif record.state is not State.CHANGED:
            self._account.add(-record.size_bytes)
        if record.state is State.WAITING:
            self._behind.unwait(record.size_bytes)

    def _begin_read(self, payload: Payload) -> None:
        self._ahead.started(payload)
        payload.reading = True
        self._readers += 1

    def _read(self, payload: Payload, *, ahead: bool) -> Any:
        """The bytes from the store. They stay in memory if somebody is still to ask for them."""
        found = None
        try:
            found = self._store.read(payload.place)
        finally:
            with self._changed:
                self._readers -= 1
                payload.reading = False
                if found is not None and (ahead or payload.unasked > 0) and not self.closed:
                    self._ahead.put(payload, found)
                self._changed.notify_all()
        return found

    def _read_ahead(self, payload: Payload | None) -> None:
        if payload is None:
            return
        with self._changed:
            if self.closed or not payload.requested or payload.state is not State.MOVED:
                return
            self._begin_read(payload)
        try:
            self._read(payload, ahead=True)
        except Exception as error:  # noqa: BLE001 -- whoever asks reads it again and is told
            _log.debug("reading ahead for %r failed: %s", payload.layer_id, error)

    def _write(self, payload: Payload | None) -> None:
        if payload is not None:
            self._behind.write(payload)
            return
        with self._changed:  # what was dropped no longer waits, and somebody may wait for that
            self.tidy()
