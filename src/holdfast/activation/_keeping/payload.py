"""The bytes of one stretch of a storage, wherever they are now. Knows its state and who holds it;
``MovingTier`` moves it, under its lock.
"""

import enum
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from holdfast.activation._keeping.geometry import Geometry, probe_of, version_of

if TYPE_CHECKING:
    from holdfast.activation._keeping.moving_tier import MovingTier


class State(enum.Enum):
    """Where the bytes are."""

    WAITING = "in memory, to be written"
    WRITING = "in memory, being written"
    KEPT = "in memory, and stays there"
    MOVED = "in the store"
    CHANGED = "nowhere: changed in place before a copy was safe"


class Record:
    """What of a payload outlives it, until the tier has cleared up after it."""

    __slots__ = ("key", "place", "sequences", "size_bytes", "state")

    def __init__(self, key: int, size_bytes: int) -> None:
        self.key = key
        self.size_bytes = size_bytes
        self.state = State.WAITING
        self.place: Any = None
        self.sequences: list[int] = []


class PayloadRef(weakref.ref["Payload"]):
    """Knows the record of a payload, also when the payload is gone.

    A callback of a weak reference tells of the end, not ``__del__``: while that runs, another
    thread can still get the payload from a weak reference and would use what is already counted
    as gone.
    """

    __slots__ = ("record",)

    record: Record


class Payload:
    """Owned by those who hold it; everybody else knows it weakly. Changed only under the lock of
    its tier.

    In memory, ``aliases`` are the tensors as they were held. Moved, they are probes: without
    memory, but with versions that tell of changes in place. An operation changes memory first and
    the version after, so a version that has not moved when the copy ends proves nothing while the
    operation may be under way. The copy is ``settled``, and later changes do not matter, once the
    storage is gone or the thread that held it has come back unchanged.
    """

    __slots__ = (
        "__weakref__",
        "aliases",
        "geometries",
        "holder",
        "lasting",
        "layer_id",
        "mark",
        "reading",
        "ready",
        "ready_version",
        "record",
        "requested",
        "settled",
        "start",
        "stop",
        "storage",
        "tier",
        "unasked",
        "versions",
    )

    def __init__(
        self, tier: "MovingTier", layer_id: str, storage: Any, span: tuple[int, int], mark: Any
    ) -> None:
        self.tier = tier
        self.layer_id = layer_id
        self.storage = weakref.ref(storage)
        self.start, self.stop = span
        self.record = Record(storage._cdata, self.stop - self.start)  # noqa: SLF001
        self.mark = mark
        self.aliases: list[Any] = []
        self.versions: list[int] = []
        self.geometries: list[Geometry] = []
        self.holder: int | None = threading.get_ident()
        self.lasting = False
        self.settled = False
        self.unasked = 0
        self.ready: Any = None
        self.ready_version = 0
        self.reading = False
        self.requested = False

    def reference(self, gone: Callable[[PayloadRef], object]) -> PayloadRef:
        """A weak reference that ``gone`` is called with in the end, in any thread and at any point
        of its work: it must not wait for a lock. To be kept until then."""
        ref = PayloadRef(self, gone)
        ref.record = self.record
        return ref

    @property
    def state(self) -> State:
        return self.record.state

    @state.setter
    def state(self, state: State) -> None:
        self.record.state = state

    @property
    def place(self) -> Any:
        """Where in the store it is, if it is there."""
        return self.record.place

    @place.setter
    def place(self, place: Any) -> None:
        self.record.place = place

    @property
    def first_sequence(self) -> int:
        return self.record.sequences[0]

    @property
    def size_bytes(self) -> int:
        return self.record.size_bytes

    def join(self, alias: Any, layer_id: str, sequence: int, *, lasting: bool) -> "MovingTensor":
        """One more tensor that lies in these bytes."""
        if self.holder != threading.get_ident() and self.state is not State.MOVED:
            self.holder = None  # nobody alone can say that nothing is changing it
        self.lasting |= lasting
        self.record.sequences.append(sequence)
        self.unasked += 1
        if self.state is State.MOVED:  # and was found to be what the tensor holds
            self.geometries.append(Geometry.of(alias))
            self.versions.append(-1)
            self.aliases.append(None)
        else:
            self.versions.append(version_of(alias))
            self.aliases.append(alias)
        return MovingTensor(self, layer_id, len(self.aliases) - 1, sequence)

    def is_changed(self) -> bool:
        """Whether a tensor was changed in place after it was held."""
        return any(
            version >= 0 and alias._version != version  # noqa: SLF001
            for alias, version in zip(self.aliases, self.versions, strict=True)
        )

    def put_away(self, place: Any) -> list[Any]:
        """The bytes are safe in the store. Returns what is to be let go outside the lock."""
        released = self.aliases
        self.geometries = [Geometry.of(alias) for alias in released]
        self.aliases = [probe_of(alias) for alias in released]
        self.place = place
        self.state = State.MOVED
        return released


class MovingTensor:
    """A ``Held`` whose tensor may be in memory or in the tier's store.

    ``index`` says which of the payload's tensors it is, ``sequence`` when it was held, counted over
    the whole tier.
    """

    __slots__ = ("asked", "index", "layer_id", "memory", "sequence")

    def __init__(self, memory: Payload, layer_id: str, index: int, sequence: int) -> None:
        self.memory = memory
        self.layer_id = layer_id
        self.index = index
        self.sequence = sequence
        self.asked = False

    @property
    def size_bytes(self) -> int:
        return self.memory.size_bytes

    @property
    def parts(self) -> tuple[Payload, ...]:
        return (self.memory,)

    def get(self) -> Any:
        return self.memory.tier.get(self)
