"""The coordinator of a ``torch.distributed`` job.

Uses clones of the process group's store, never the training's own client: a thread that waits
on a client blocks every other user of it. So all of this may run in a background thread while
training collectives run.
"""

import contextlib
import itertools
import json
import secrets
import socket
import threading
from collections import defaultdict
from collections.abc import Generator, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, final

from holdfast import _checks
from holdfast.coordination._channel import Channel
from holdfast.coordination._exchange import Ranks, StoreExchange
from holdfast.coordination._group import GroupCoordinator
from holdfast.coordination._liveness import Liveness
from holdfast.errors import ClosedError, CoordinationError, OperationTimeoutError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

LINGER_S = 5.0
MIN_LIVENESS_S = 0.5


@final
class TorchCoordinator(GroupCoordinator):
    """The ranks of a process group (``None``: the default one). A context manager.

    Every rank makes its coordinator, in the same order if there are several. A rank whose
    process ends is reported lost at once, one that is stopped or unreachable after
    ``liveness_timeout_s``; one that is alive is waited for until ``timeout_s``, the limit of
    every call that names none. Thread-safe.

    Keeps one small helper process beside each rank, and a thread for each operation under way.
    """

    def __init__(
        self,
        process_group: "ProcessGroup | None" = None,
        liveness_timeout_s: float = 30.0,
        *,
        timeout_s: float = 600.0,
    ) -> None:
        self._silence_s = _checks.seconds("liveness_timeout_s", liveness_timeout_s)
        if self._silence_s < MIN_LIVENESS_S:
            raise ValueError(
                f"liveness_timeout_s must be at least {MIN_LIVENESS_S}, not {liveness_timeout_s!r}"
            )
        self._timeout_s = _checks.seconds("timeout_s", timeout_s)
        self._rank, self._world_size, self._store = _members(process_group)
        self._closed = threading.Event()
        self._guard = threading.Lock()
        self._idle: list[Channel] = []
        self._turns: defaultdict[str, _Turns] = defaultdict(_Turns)
        self._waited: defaultdict[int, int] = defaultdict(int)
        self._liveness: Liveness | None = None
        self._base = "holdfast"
        if self._world_size > 1:
            self._join()

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    def wait_for_rank(self, rank: int, timeout_s: float | None = None) -> None:
        _checks.rank("rank", rank, self._world_size)
        timeout_s = self._limit(timeout_s)
        key = f"{self._base}/arrived/{rank}"
        with self._turns[f"wait_for_rank {rank}"].take(timeout_s), self._channel() as channel:
            exchange = self._exchange(channel, "wait_for_rank", timeout_s)
            if rank == self._rank:
                exchange.count(key)
            else:
                exchange.await_arrival(key, self._waited[rank] + 1, rank)
                self._waited[rank] += 1

    def close(self) -> None:
        """Leave the job. Rank 0 stays up to 5 s for ranks that have not left: its helper and,
        without torchrun, its store serve them."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._liveness is not None:
            if self._rank == 0:
                self._liveness.wait_until_alone(LINGER_S)
            self._liveness.close()
        with self._guard:
            while self._idle:
                self._idle.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _join(self) -> None:
        """Agree on a name for this coordinator's keys, and connect the helpers."""
        with self._channel() as channel:
            exchange = self._exchange(channel, "start", self._timeout_s)
            # The rank's own count of coordinators is kept in the store: a restarted process
            # group has a new store, and so starts anew.
            turn = exchange.count(f"holdfast/made/{self._rank}")
            self._base = f"holdfast/{turn}"
            exchange = self._exchange(channel, "start", self._timeout_s)
            hub_key = f"{self._base}/hub"
            if self._rank == 0:
                token = secrets.token_hex(16)
                self._liveness = self._live(token, _own_address(self._store), None)
                hub = {"token": token, "address": self._liveness.address}
                exchange.set_value(hub_key, json.dumps(hub).encode())
            else:
                hub = json.loads(exchange.await_value(hub_key, 0))
                host, port = hub["address"]
                self._liveness = self._live(hub["token"], "", (host, port))

    def _live(self, token: str, bind: str, hub: tuple[str, int] | None) -> Liveness:
        return Liveness(
            rank=self._rank,
            world_size=self._world_size,
            token=token,
            bind=bind,
            hub=hub,
            timeout_s=self._silence_s,
        )

    @contextlib.contextmanager
    def _open(self, name: str, timeout_s: float | None) -> Iterator[StoreExchange]:
        timeout_s = self._limit(timeout_s)
        with self._turns[name].take(timeout_s) as turn, self._channel() as channel:
            kind, _, given = name.partition(":")
            yield self._exchange(
                channel, f"operation {given!r}" if given else kind, timeout_s, f"{name}/{turn}"
            )

    def _limit(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else _checks.seconds("timeout_s", timeout_s)

    def _exchange(
        self, channel: Channel, name: str, timeout_s: float, base: str = ""
    ) -> StoreExchange:
        ranks = Ranks(
            rank=self._rank,
            world_size=self._world_size,
            liveness=self._liveness,
            silence_s=self._silence_s,
            is_closed=self._closed.is_set,
        )
        return StoreExchange(
            channel, ranks, base=f"{self._base}/{base or name}", name=name, timeout_s=timeout_s
        )

    @contextlib.contextmanager
    def _channel(self) -> Generator[Channel]:
        with self._guard:
            if self._closed.is_set():
                raise ClosedError(f"the coordinator of rank {self._rank} is closed")
            channel = self._idle.pop() if self._idle else Channel(self._store.clone)
        try:
            yield channel
        finally:
            with self._guard:
                if channel.usable and not self._closed.is_set():
                    self._idle.append(channel)
                else:
                    channel.close()


class _Turns:
    """Operations of one name: one at a time, numbered alike on every rank."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = itertools.count()

    @contextlib.contextmanager
    def take(self, timeout_s: float) -> Generator[int]:
        if not self._lock.acquire(timeout=timeout_s):
            raise OperationTimeoutError(
                f"another thread of this rank has been in the same operation for {timeout_s:g} s",
                timeout_s=timeout_s,
            )
        try:
            yield next(self._next)
        finally:
            self._lock.release()


def _members(process_group: "ProcessGroup | None") -> tuple[int, int, Any]:
    """This rank, the number of ranks, and their store."""
    try:
        import torch.distributed as dist  # noqa: PLC0415 -- optional: `holdfast[torch]`
    except ImportError as error:
        raise CoordinationError(
            "TorchCoordinator needs torch: pip install 'holdfast[torch]'. "
            "For one process without it there is SoloCoordinator"
        ) from error
    if not dist.is_available() or not dist.is_initialized():
        raise CoordinationError(
            "torch.distributed is not initialised: call torch.distributed.init_process_group() "
            "first, or use SoloCoordinator for a single process"
        )
    group = dist.group.WORLD if process_group is None else process_group
    rank = dist.get_rank(group)
    if rank < 0:
        raise CoordinationError(
            "this process is not a member of the process group given to TorchCoordinator"
        )
    return rank, dist.get_world_size(group), group.get_group_store()


def _own_address(store: Any) -> str:
    """The address under which this host is known where the store is known."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    if host is None:  # a store without a server, as from init_method="file://..."
        host, port = socket.gethostname(), 9
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # a datagram socket: sends nothing, but chooses an interface
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
