"""One large object on its way to an object store. Knows parts and threads, not keys or errors.

obstore's ``put`` takes an iterator and uploads its parts side by side; it removes the parts again
if the iterator or a request raises (its ``open_writer`` does not, when dropped). So the caller's
bytes are handed to an iterator that another thread runs, and giving up is raising in it.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

from holdfast._lanes import Lane, join_all
from holdfast.contracts import ObjectInfo
from holdfast.errors import StorageError

if TYPE_CHECKING:
    from obstore import PutResult

MIB: Final = 1024 * 1024
MOST_PARTS: Final = 10_000
"""As many as S3 and Google take; Azure takes more."""

_LEAST_PART = 8 * MIB
_UNKNOWN_PART = 16 * MIB
_IN_FLIGHT = 4
_IN_FLIGHT_BYTES = 64 * MIB
_GIVE_UP_S = 10.0


def part_bytes(size_bytes: int | None) -> int:
    """How large the parts of an object of that size are; ``None`` if it was not announced."""
    if size_bytes is None:
        return _UNKNOWN_PART
    needed = -(-size_bytes // MOST_PARTS)
    return max(_LEAST_PART, -(-needed // MIB) * MIB)


def in_flight(part: int) -> int:
    """How many parts of that size are uploaded at a time."""
    return max(1, min(_IN_FLIGHT, _IN_FLIGHT_BYTES // part))


class UploadSink:
    """``_ordered.Sink`` that uploads while it is appended to.

    Holds the parts in flight and two more. An object of no more than one part is put in one
    request when published. Of a size that was not announced it takes ``MOST_PARTS`` parts of
    16 MiB, 156 GiB. A sink that is neither published nor discarded is given up when it is
    collected, or the interpreter ends.
    """

    def __init__(
        self,
        key: str,
        *,
        size_bytes: int | None,
        put: Callable[[bytearray], "PutResult"],
        put_parts: Callable[[Iterator[bytearray], int, int], "PutResult"],
        published: Callable[["PutResult", int], ObjectInfo],
    ) -> None:
        self._key = key
        self._part_bytes = part_bytes(size_bytes)
        self._put = put
        self._put_parts = put_parts
        self._published = published
        self._part = bytearray()
        self._size = 0
        self._upload: _Upload | None = None

    def append(self, data: memoryview) -> None:
        while data:
            if len(self._part) == self._part_bytes:
                self._send()
            taken = data[: self._part_bytes - len(self._part)]
            self._part += taken
            self._size += len(taken)
            data = data[len(taken) :]

    def publish(self) -> ObjectInfo:
        if self._upload is None:
            return self._published(self._put(self._part), self._size)
        self._send()
        return self._published(self._upload.finish(), self._size)

    def discard(self) -> None:
        self._part = bytearray()
        if self._upload is not None:
            self._upload.give_up()

    def _send(self) -> None:
        if self._size > self._part_bytes * MOST_PARTS:
            raise StorageError(
                f"an object whose size was not announced may have {self._part_bytes * MOST_PARTS} "
                "bytes; give open_writer its size_bytes",
                path=self._key,
            )
        if self._upload is None:
            size, count = self._part_bytes, in_flight(self._part_bytes)
            put_parts = self._put_parts
            self._upload = _Upload(lambda parts: put_parts(parts, size, count))
        part, self._part = self._part, bytearray()
        self._upload.send(part)


class _GivenUpError(Exception):
    """Raised inside obstore to make it remove the parts."""


class _Handover:
    """What the writing and the uploading thread share. Refers to neither."""

    def __init__(self) -> None:
        # SimpleQueue, because a finalizer may put into it while this thread is inside it.
        self.parts: SimpleQueue[bytearray | _GivenUpError | None] = SimpleQueue()
        self.room = threading.Semaphore(1)
        self.result: PutResult | None = None
        self.error: BaseException | None = None

    def stream(self) -> Iterator[bytearray]:
        """The parts as obstore asks for them. A part may be sent once the last was taken."""
        while (part := self.parts.get()) is not None:
            if isinstance(part, _GivenUpError):
                raise part
            yield part
            self.room.release()

    def run(self, put: Callable[[Iterator[bytearray]], "PutResult"]) -> None:
        try:
            self.result = put(self.stream())
        except BaseException as error:  # noqa: BLE001 -- raised in the writing thread
            self.error = error
        finally:
            self.room.release()


class _Upload:
    """A running ``put``. Used by one thread."""

    def __init__(self, put: Callable[[Iterator[bytearray]], "PutResult"]) -> None:
        self._handover = _Handover()
        # A daemon, or a writer that somebody forgot would keep the interpreter from ending.
        self._thread = Lane(self._handover.run, put, name="holdfast-upload", daemon=True)
        self._thread.start()
        self._forgotten = weakref.finalize(self, _forget, self._handover, self._thread)

    def send(self, part: bytearray) -> None:
        self._handover.room.acquire()
        self._raise_if_failed()
        self._handover.parts.put(part)

    def finish(self) -> "PutResult":
        self._handover.parts.put(None)
        join_all([self._thread])
        self._forgotten.detach()
        self._raise_if_failed()
        result = self._handover.result
        if result is None:
            raise StorageError("the upload ended without a word")
        return result

    def give_up(self) -> None:
        self._handover.parts.put(_GivenUpError())
        join_all([self._thread])
        self._forgotten.detach()

    def _raise_if_failed(self) -> None:
        if self._handover.error is not None:
            raise self._handover.error


def _forget(handover: _Handover, thread: Lane) -> None:
    handover.parts.put(_GivenUpError())
    if thread is not threading.current_thread():
        thread.wait(_GIVE_UP_S)
