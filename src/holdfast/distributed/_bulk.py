"""Tensor bytes from rank to rank, over gloo connections of our own. Knows no tensors' meaning.

The training's process group is left alone: it may be NCCL's, and busy. Known inefficiency: each
group connects every rank with every other, whether or not they will send each other anything.
"""

import secrets
from collections import deque
from collections.abc import Callable, Iterator
from typing import final

import torch

from holdfast import _checks
from holdfast.contracts import Coordinator, Operation
from holdfast.coordination import TorchCoordinator
from holdfast.distributed._links import PIECE_BYTES, Flight, Links
from holdfast.distributed._watch import Watch
from holdfast.errors import ClosedError, CoordinationError

WINDOW_BYTES = 64 * 1024 * 1024


@final
class Bulk:
    """One gloo group beside the training's. Made on first use, by all ranks together; thrown away
    after a failure.

    Used by one thread at a time, but for ``discard`` and ``close``, which any thread may call.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._links: Links | None = None
        self._closed = False

    def open(self, timeout_s: float, *, operation: Operation | None = None) -> None:
        """Connect the ranks, unless all of them are connected already. All ranks call this.

        It is an operation of its own, or a part of ``operation``, if one is given that no other
        thread is using: a rank that fails there instead of coming here is then noticed at once.
        ``timeout_s`` bounds the connecting and, later, the wait for any one piece. A job of one
        rank needs no connections.
        """
        _checks.seconds("timeout_s", timeout_s)
        if self._closed:
            raise ClosedError("the connections between the ranks for bulk transfer are closed")
        if self._coordinator.world_size == 1:
            return
        if not isinstance(self._coordinator, TorchCoordinator):
            raise CoordinationError(
                "sending tensors from rank to rank needs torch.distributed: use a "
                f"TorchCoordinator, not {type(self._coordinator).__name__}"
            )
        if operation is not None:
            self._connect(self._coordinator, operation, timeout_s)
            return
        with self._coordinator.operation("bulk transfer", timeout_s) as own:
            self._connect(self._coordinator, own, timeout_s)

    def course(self, proceed: Callable[[], None]) -> "Course":
        """A course of transfers. ``proceed`` is called while it waits, and may raise. All ranks
        that take part begin it after the same transfers as the others, and one at a time."""
        if self._links is None:
            raise CoordinationError("the ranks are not connected for bulk transfer: open() first")
        return Course(self._links, proceed)

    def discard(self) -> None:
        """Break the connections, so that the next ``open`` makes new ones. Idempotent, waits for
        no rank, and afterwards no memory that was given to a course is touched any more."""
        links, self._links = self._links, None
        if links is not None:
            links.end()

    def close(self) -> None:
        """Break the connections for good. Idempotent."""
        self._closed = True
        self.discard()

    def _connect(
        self, coordinator: TorchCoordinator, operation: Operation, timeout_s: float
    ) -> None:
        # Ranks may disagree on whether they are connected: one may have failed where the others
        # got through. And a name used before would find the addresses of then in the store.
        old = "" if self._links is None or self._links.broken.is_set() else self._links.name
        words = operation.all_gather(f"{old} {secrets.token_hex(8)}".encode(), timeout_s)
        names = [word.decode().partition(" ") for word in words]
        if self._links is not None and all(name == old != "" for name, _, _ in names):
            self._links.timeout_s = timeout_s
            return
        self.discard()
        self._links = Watch(operation).run(
            lambda proceed: Links.connected(coordinator, names[0][2], timeout_s, proceed)
        )


@final
class Course:
    """Transfers in one order that is the same on all ranks; each rank gives those it takes part
    in. No deadlock: of the earliest transfer not done, both ends get to it.

    Memory is contiguous, of bytes (uint8), and on the CPU. Both ends give the same number of
    bytes, or none arrive and the wait ends with the timeout given to ``Bulk.open``. Nothing is
    sent where there are no bytes. After any error but a ``ValueError`` the connections are broken,
    on all ranks: ``Bulk.open`` makes new ones. Used by one thread.
    """

    def __init__(self, links: Links, proceed: Callable[[], None]) -> None:
        self._links = links
        self._proceed = proceed
        self._sending: deque[Flight] = deque()
        self._sending_bytes = 0

    def send(self, target: int, memory: torch.Tensor) -> None:
        """Send to ``target``. Waits only for earlier sends, while more than ``WINDOW_BYTES`` are
        under way. ``memory`` must not change before ``flush`` has returned."""
        peer = self._checked("target", target, memory)
        with self._links.breaking():
            for piece in _pieces(memory):
                while self._sending and self._sending_bytes + piece.numel() > WINDOW_BYTES:
                    self._retire()
                self._sending.append(self._links.send(peer, piece))
                self._sending_bytes += piece.numel()
            while self._sending and self._sending[0].done.is_set():
                self._retire()

    def receive(self, source: int, memory: torch.Tensor) -> None:
        """Fill ``memory`` with what ``source`` sends. Returns when it is filled."""
        peer = self._checked("source", source, memory)
        with self._links.breaking():
            coming: deque[Flight] = deque()
            for piece in _pieces(memory):
                if len(coming) * PIECE_BYTES >= WINDOW_BYTES:
                    self._links.wait(coming.popleft(), self._proceed)
                coming.append(self._links.receive(peer, piece))
            while coming:
                self._links.wait(coming.popleft(), self._proceed)

    def flush(self) -> None:
        """Return when all that was sent has left this rank's memory."""
        with self._links.breaking():
            while self._sending:
                self._retire()

    def _retire(self) -> None:
        flight = self._sending.popleft()
        self._links.wait(flight, self._proceed)
        self._sending_bytes -= flight.memory.numel()

    def _checked(self, name: str, rank: int, memory: torch.Tensor) -> int:
        if _checks.rank(name, rank, self._links.world_size) == self._links.rank:
            raise ValueError(f"{name} must be another rank than this one, which is {rank}")
        if memory.dtype != torch.uint8 or memory.device.type != "cpu" or not memory.is_contiguous():
            raise ValueError(
                f"memory must be contiguous uint8 on the CPU, not {memory.dtype} on "
                f"{memory.device} with strides {memory.stride()}"
            )
        return rank


def _pieces(memory: torch.Tensor) -> Iterator[torch.Tensor]:
    flat = memory.view(-1)
    for start in range(0, flat.numel(), PIECE_BYTES):
        yield flat[start : start + PIECE_BYTES]
