"""What outsiders implement, and what several rooms share: Storage, Coordinator, Clock.

Everything here is a protocol, a value or a name; nothing does anything. Docstrings are the
contract: whoever implements a protocol keeps them, whoever calls one may rely on them.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Protocol, Self, runtime_checkable

__all__ = [
    "COMMIT_RECORD",
    "EARLY_BYTES",
    "SMALL_OBJECT_BYTES",
    "CheckpointStore",
    "Clock",
    "Collectives",
    "Coordinator",
    "Data",
    "ObjectInfo",
    "ObjectWriter",
    "Operation",
    "ReadRange",
    "Storage",
]

COMMIT_RECORD: Final = "metadata.json"
"""A checkpoint exists if and only if ``<prefix>/metadata.json`` exists; it is written last."""

SMALL_OBJECT_BYTES: Final = 64 * 1024 * 1024
"""The most that ``Storage.create`` and ``Storage.replace`` take."""

EARLY_BYTES: Final = 64 * 1024 * 1024
"""How many bytes an ``ObjectWriter`` takes ahead of their turn."""

Data = bytes | bytearray | memoryview
"""Contiguous bytes. Implementations read them during the call and keep no reference."""


class Clock(Protocol):
    """Monotonic seconds and two ways to let them pass. Never wall-clock time."""

    def now(self) -> float:
        """Seconds since some fixed moment. Never goes back."""

    def sleep(self, seconds: float) -> None:
        """Block this thread for that long."""

    async def sleep_async(self, seconds: float) -> None:
        """Suspend this task for that long; cancellation passes through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """One stored object: its key, its size, and a version that changes whenever its bytes do.

    ``modified_s`` is when it was written, in seconds since 1970 by the storage's own clock. It
    is to be compared with other objects of the same storage only, never with this machine's
    clock, and may be no finer than a second.
    """

    key: str
    size_bytes: int
    version: str
    modified_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRange:
    """Bytes ``start`` to ``start + len(into)`` of an object, wanted in the caller's memory.

    ``uncached`` asks for what is stored, not for what this machine remembers of it: who verifies
    wants to know of the disk. It is a wish: where a filesystem cannot read past its cache, or a
    server has one of its own, that may be what is read. Other storages need not look at it. Asked
    of one range, all of the call are read so.
    """

    start: int
    into: memoryview
    uncached: bool = False


class ObjectWriter(Protocol):
    """One object being written. Used by one thread at a time unless the storage says otherwise.

    A context manager: leaving the block without ``finish()`` aborts. One that is forgotten never
    keeps the interpreter from ending.
    """

    def write_at(self, offset: int, data: Data) -> None:
        """Put ``data`` at ``offset``.

        Bytes are best written in order. Those ahead of their turn are held in memory, up to
        ``EARLY_BYTES``; more of them, and bytes written twice, are a ``StorageError``. ``data``
        may be reused once this returns.
        """

    def finish(self) -> ObjectInfo:
        """Make the object visible, whole and durable, or raise.

        After an error what was there before is still there, unless the storage failed in the very
        last step: then the object may be there, and may or may not outlast a crash.

        Refuses an object with holes, or of another size than was announced. Call once: a
        failure aborts.
        """

    def abort(self) -> None:
        """Drop everything written. Idempotent; does nothing after ``finish()``."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class Storage(Protocol):
    """Bytes by key. Knows nothing of tensors, ranks or checkpoints.

    Keys are relative names with ``/`` between the parts (``step_100/shard-0.safetensors``);
    what cannot be a key is a ``ValueError``.
    All methods may be called from any thread. A method that returns has taken effect durably:
    it survives a crash of this process, and of the machine where the storage outlives it.
    Failures are ``StorageError``s; only a ``TransientStorageError`` is worth trying again.
    Every method but ``create`` and ``replace`` is idempotent.
    """

    @property
    def url(self) -> str:
        """Where this is, for people and for error messages. Carries no secrets."""

    def open_writer(self, key: str, *, size_bytes: int | None = None) -> ObjectWriter:
        """Start writing an object of any size. Readers see nothing until ``finish()``, then
        all of it; an object already under that key is replaced at that instant.

        ``size_bytes`` announces the size, so that a storage may refuse at once what it has no
        room for (``NoSpaceError``), and writes faster. What cannot be a size is a ``ValueError``.
        """

    def create(self, key: str, data: Data) -> ObjectInfo:
        """Store a small object if the key is free, else ``ObjectExistsError``. Atomic: of
        several callers one wins."""

    def replace(self, key: str, data: Data, expected: str) -> ObjectInfo:
        """Replace a small object if its version is still ``expected``. Atomic.
        ``ObjectChangedError`` if it is another, ``ObjectNotFoundError`` if it is gone."""

    def read(self, key: str) -> bytes:
        """The whole object. ``ObjectNotFoundError`` if there is none."""

    def read_into(self, key: str, ranges: Sequence[ReadRange]) -> None:
        """Fill every range; they may overlap and come in any order. All ranges of one call are of
        one version of the object: if it is replaced meanwhile, the old one is read, or it is a
        ``TransientStorageError``. A range past the end is a ``StorageError``, never a short read.
        After an error the ranges hold anything."""

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object whose key starts with the characters of ``prefix``, ordered by key."""

    def stat(self, key: str) -> ObjectInfo:
        """The object's size and version. ``ObjectNotFoundError`` if there is none."""

    def delete(self, key: str, *, expected: str | None = None) -> None:
        """Remove the object; nothing happens if there is none.

        With ``expected`` only that version of it, in one atomic step: ``ObjectChangedError`` if
        it is another. A storage that cannot do this raises ``StorageError`` and removes nothing.
        """

    def free_bytes(self) -> int | None:
        """Room left, or ``None`` where the storage does not know."""

    def sweep(self, older_than_s: float) -> int:
        """Remove what interrupted writes left and readers never see, if nothing was added to it
        for that long by the storage's clock. Returns how many such leftovers were removed, and
        never harms a write that is younger. A storage that leaves none, or tidies by itself,
        returns 0."""


@runtime_checkable
class CheckpointStore(Protocol):
    """Something that knows which objects of a checkpoint others need: ``catalog.Catalog``."""

    def rollback(self, prefix: str) -> None:
        """Remove whatever is under the prefix, committed or not, but for what others need.
        Idempotent."""


class Collectives(Protocol):
    """What ranks do together. Every rank makes the same calls in the same order.

    Payloads are bytes; what they mean is the caller's business. Every call is bounded by
    ``timeout_s`` (``None``: the coordinator's own) and raises on every rank that waits, and
    inside an operation on all: ``RankTimeoutError`` naming the ranks that are alive and did not
    come, ``RankLostError`` naming those that died, fell silent or left, or the error that
    another rank raised.
    """

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def world_size(self) -> int:
        """How many ranks there are."""

    def barrier(self, timeout_s: float | None = None) -> None:
        """Return once every rank has called this."""

    def broadcast(
        self, data: Data | None, *, source: int = 0, timeout_s: float | None = None
    ) -> bytes:
        """Return ``source``'s data on every rank; the others' ``data`` is ignored.
        ``source`` does not wait for the others."""

    def gather(
        self, data: Data, *, target: int = 0, timeout_s: float | None = None
    ) -> list[bytes] | None:
        """Return every rank's data, in rank order, on ``target``, and ``None`` elsewhere.
        Only ``target`` waits."""

    def all_gather(self, data: Data, timeout_s: float | None = None) -> list[bytes]:
        """Return every rank's data, in rank order, on every rank."""


class Operation(Collectives, Protocol):
    """Collectives that succeed or fail together. See ``Coordinator.operation``."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Name what this rank is doing, so that errors can say so. Waits for nobody."""

    def check(self) -> None:
        """Raise if another rank has failed, died, fallen silent or left, or if the operation's
        time is over; waits for nobody.

        For long work between two collectives, which would raise the same error. Cheap: call it
        as often as is convenient, from one thread, while no collective runs. News may be a
        fraction of a second old. A rank need not call it because others do.
        """


class Coordinator(Collectives, Protocol):
    """The ranks of a job. All methods may be called from any thread."""

    def operation(
        self, name: str, timeout_s: float | None = None
    ) -> AbstractContextManager[Operation]:
        """A block that every rank enters, and that ends the same way on all of them.

        Leaving it waits for the others. If the block raises on one rank, every rank raises
        that error with ``rank`` and ``phase`` set: at once if it is waiting in the block, else
        at its next collective or ``check`` there. ``timeout_s`` bounds the whole block's
        waits. Operations of different names may run at the same time in different threads;
        those of one name run one after the other.
        """

    def wait_for_rank(self, rank: int, timeout_s: float | None = None) -> None:
        """Wait until ``rank`` arrives, that is, calls ``wait_for_rank`` with its own number.

        The rank itself returns at once. Ranks that need not wait need not call. The n-th wait
        for a rank ends with that rank's n-th arrival.
        """

    def close(self) -> None:
        """Release threads, processes and connections. Idempotent; other calls then raise
        ``ClosedError``, and ranks that wait for this one ``RankLostError``. Leaving a ``with``
        block closes."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
