"""The gloo connections of one rank with all others, and what must be known to end them.

Found by trying, with torch 2.13: a pending send or receive does not tell whether it is done, for
``is_completed()`` is false until ``wait()`` has returned; a ``wait()`` that times out breaks every
connection of its group; ``abort()`` and ``shutdown()`` wake nobody. So a thread waits for each
direction, with a long timeout, and a group is ended by a wait with a very short one. After that
nothing is pending, with a dead or stopped peer neither, and freeing the group does not block.
"""

import contextlib
import functools
import queue
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist

from holdfast.coordination import TorchCoordinator
from holdfast.errors import CoordinationError

LOOK_S = 0.05
NEWS_S = 2.0
END_S = 0.25
SHORT = timedelta(milliseconds=1)
LONG = timedelta(days=7)  # whoever waits for a piece has less patience, and ends the group
PIECE_BYTES = 8 * 1024 * 1024  # less than 2**24, see _next_tag
END_TAG = 2**31 - 1  # no piece's, and the largest there is


@dataclass(slots=True, kw_only=True, eq=False)
class Flight:
    """A piece under way. ``error`` is set, if at all, before ``done``."""

    peer: int
    memory: torch.Tensor  # gloo knows only its address: it must live as long as this
    work: Any = None
    done: threading.Event = field(default_factory=threading.Event)
    error: str | None = None

    def land(self, error: BaseException | None = None) -> None:
        if error is not None:
            self.error = _first_line(error)
        self.done.set()


@final
class Links:
    """The connections of this rank with all others, from one ``open`` to the first failure."""

    def __init__(
        self, group: Any, *, name: str, rank: int, world_size: int, timeout_s: float
    ) -> None:
        self.name = name
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.broken = threading.Event()
        self._group = group
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        self._sends = _Waiter("holdfast-sends")
        self._receives = _Waiter("holdfast-receives")
        waiters = (self._sends, self._receives)
        self._end = weakref.finalize(self, _end, group, rank, world_size, waiters)

    @classmethod
    def connected(
        cls,
        coordinator: TorchCoordinator,
        name: str,
        timeout_s: float,
        proceed: Callable[[], None],
    ) -> "Links":
        rank, world_size = coordinator.rank, coordinator.world_size
        try:
            # A clone, because who waits on a store's client blocks all its other users.
            store = coordinator.process_group.get_group_store().clone()
            group = dist.ProcessGroupGloo(
                dist.PrefixStore(f"holdfast/bulk/{name}", store),
                rank,
                world_size,
                timedelta(seconds=timeout_s),
            )
        except RuntimeError as error:  # every error of torch's stores and groups is one
            _await_news(proceed)
            raise CoordinationError(
                f"rank {rank} could not connect to the others for sending tensors: "
                f"{_first_line(error)}. Do the hosts of this job reach each other's free ports, "
                "and is GLOO_SOCKET_IFNAME right?",
                rank=rank,
            ) from error
        return cls(group, name=name, rank=rank, world_size=world_size, timeout_s=timeout_s)

    def send(self, peer: int, memory: torch.Tensor) -> Flight:
        tag = _next_tag(self._sent, peer, memory)
        begin = functools.partial(self._group.send, [memory], peer, tag)
        return self._sends.begin(begin, Flight(peer=peer, memory=memory))

    def receive(self, peer: int, memory: torch.Tensor) -> Flight:
        tag = _next_tag(self._received, peer, memory)
        begin = functools.partial(self._group.recv, [memory], peer, tag)
        return self._receives.begin(begin, Flight(peer=peer, memory=memory))

    def wait(self, flight: Flight, proceed: Callable[[], None]) -> None:
        began = time.monotonic()
        proceed()
        while not flight.done.wait(LOOK_S):
            proceed()
            if time.monotonic() - began > self.timeout_s:
                flight.error = f"it did not come through within {self.timeout_s:g} s"
                break
        if flight.error is not None:
            _await_news(proceed)
            raise CoordinationError(
                f"the transfer between rank {self.rank} and rank {flight.peer} broke: "
                f"{flight.error}",
                rank=self.rank,
            )

    @contextlib.contextmanager
    def breaking(self) -> Iterator[None]:
        """A block of transfers. If it fails they all have: nothing would match any more."""
        if self.broken.is_set():
            raise CoordinationError(
                "the connections between the ranks broke in an earlier failure: open() makes new "
                "ones"
            )
        try:
            yield
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        self.broken.set()
        self._end()


@final
class _Waiter:
    """A thread that waits for one flight after the other, as gloo has them wait."""

    def __init__(self, name: str) -> None:
        self._flights: queue.SimpleQueue[Flight | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_wait_for_each, args=(self._flights,), name=name, daemon=True
        )
        self._thread.start()

    def begin(self, begin: Callable[[], Any], flight: Flight) -> Flight:
        try:
            flight.work = begin()
        except RuntimeError as error:  # the connection is broken already
            flight.land(error)
        else:
            self._flights.put(flight)
        return flight

    def end(self) -> None:
        """Waits a moment for the thread: if it came out of gloo while the interpreter ends, it
        would abort the process."""
        self._flights.put(None)
        self._thread.join(END_S)


def _wait_for_each(flights: "queue.SimpleQueue[Flight | None]") -> None:
    while (flight := flights.get()) is not None:
        try:
            flight.work.wait(LONG)
        except RuntimeError as error:
            flight.land(error)
        else:
            flight.land()
        flight.work = None
        del flight  # or its memory would live until the next one comes


def _next_tag(counter: Counter[int], peer: int, memory: torch.Tensor) -> int:
    """The tag of the next piece, the same at both ends if both give as many bytes. Else they must
    not meet: gloo ends the process that gets more than it asked for, and says nothing to one that
    gets less."""
    number = counter[peer] % 128
    counter[peer] += 1
    return number << 24 | int(memory.numel())


def _end(group: Any, rank: int, world_size: int, waiters: "tuple[_Waiter, ...]") -> None:
    """Break all connections of a group and end its threads. Also run when the interpreter exits."""
    for peer in range(world_size):
        if peer != rank:
            # Errors say that the connection is broken: by this, or long since.
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], peer, END_TAG).wait(
                    SHORT
                )
    for waiter in waiters:
        waiter.end()


def _await_news(proceed: Callable[[], None]) -> None:
    """A connection breaks as a rule because a rank is lost or has failed. Give the one who
    watches the ranks the time to learn which: it then ends this with the better error."""
    until = time.monotonic() + NEWS_S
    while time.monotonic() < until:
        proceed()
        time.sleep(LOOK_S)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
