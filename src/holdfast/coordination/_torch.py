"""The coordinator of a ``torch.distributed`` job.

Uses clones of the process group's store, never the training's own client: a thread that waits
on a client blocks every other user of it. So all of this may run in a background thread while
training collectives run.
"""

import contextlib
import functools
import json
import logging
import os
import secrets
import socket
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, final

from holdfast import _checks
from holdfast.coordination._channel import Channel, Session, StoreFailedError, briefly
from holdfast.coordination._exchange import StoreExchange
from holdfast.coordination._group import Alone, GroupCoordinator, titled
from holdfast.coordination._liveness import Liveness
from holdfast.coordination._meeting import Ranks
from holdfast.coordination._turns import TurnBook
from holdfast.errors import (
    CheckpointError,
    ClosedError,
    CoordinationError,
    ErrorRecord,
    RankLostError,
    RankTimeoutError,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MIN_LIVENESS_S = 0.5
STALE_S = 10.0

_PROCESS = secrets.token_hex(8)  # with the process id, a name no other process ever had

_log = logging.getLogger("holdfast.coordination")


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
        self._group, self._rank, self._world_size, self._store = _members(process_group)
        self._pid = os.getpid()
        self._closed = threading.Event()
        self._guard = threading.Lock()
        self._idle: list[Channel] = []
        self._finalizer = weakref.finalize(self, _close_all, self._idle)
        self._turns = TurnBook()
        self._waited: defaultdict[int, int] = defaultdict(int)
        self._liveness: Liveness | None = None
        self._base = "holdfast"
        self._hub_key = ""
        if self._world_size > 1:
            try:
                self._join()
            except BaseException:
                self.close()
                raise

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    @property
    def process_group(self) -> "ProcessGroup":
        """The process group this was made for; the default one if none was given."""
        return self._group

    def wait_for_rank(self, rank: int, timeout_s: float | None = None) -> None:
        _checks.rank("rank", rank, self._world_size)
        key = f"{self._base}/arrived/{rank}"
        with self._open(f"wait_for_rank {rank}", timeout_s, is_shared=False) as exchange:
            if isinstance(exchange, Alone):
                return
            if rank == self._rank:
                exchange.count(key)
            else:
                exchange.await_arrival(key, self._waited[rank] + 1, rank)
                self._waited[rank] += 1

    def close(self) -> None:
        """Leave the job. Rank 0 waits up to 5 s for the ranks that have not left: its helper
        and, without torchrun, its store serve them."""
        if self._closed.is_set() or os.getpid() != self._pid:
            return
        self._closed.set()
        try:
            if self._liveness is not None and self._liveness.close() and self._rank == 0:
                self._tidy()
        finally:
            with self._guard:
                self._finalizer()

    def _tidy(self) -> None:
        """Delete what a coordinator keeps in the store. All ranks have left."""
        at = self._ranks().at
        keys = [f"{self._base}/arrived/{rank}" for rank in range(self._world_size)]
        for name in ["", *self._turns.names()]:
            keys += [at(rank, name) for rank in range(self._world_size)]

        def work(session: Session) -> None:
            for key in [self._hub_key, *keys]:
                session.delete(key)

        if self._idle:
            with contextlib.suppress(TimeoutError, StoreFailedError):  # it is only clutter
                self._idle[-1].run(work, briefly)

    def _join(self) -> None:
        """Agree on a name for this coordinator's keys, and connect the helpers."""
        start = "start of the coordinator"
        deadline = time.monotonic() + self._timeout_s
        # How many coordinators this very process has made: a restarted job, whose store may
        # still be the old one with the old job's keys in it, counts from one again.
        made = f"holdfast/made/{_PROCESS}-{os.getpid()}"
        with self._channel() as channel:
            exchange = self._exchange(channel, start, start, self._timeout_s, deadline)
            self._hub_key = f"holdfast/hub/{exchange.count(made)}"
            try:
                hub = self._publish(exchange) if self._rank == 0 else self._connect(exchange)
            except BaseException:
                with contextlib.suppress(CheckpointError):  # the failure at hand says more
                    exchange.count(made, -1)  # so that making it again meets the others
                raise
        self._base = f"holdfast/{hub['name']}"

    def _publish(self, exchange: StoreExchange) -> Any:
        """Start rank 0's helper, and tell the others where it is."""
        name, token = secrets.token_hex(8), secrets.token_hex(16)
        self._liveness = self._live(token, _own_address(self._store), None)
        hub = {"name": name, "token": token, "address": self._liveness.address}
        exchange.set_value(self._hub_key, json.dumps(hub).encode())
        return hub

    def _connect(self, exchange: StoreExchange) -> Any:
        """Connect to rank 0's helper and return what rank 0 published.

        An address where nobody answers may be what a former job left in the store: give rank 0
        a while to publish another.
        """
        word = exchange.await_value(self._hub_key, 0)
        while True:
            hub = json.loads(word)
            host, port = hub["address"]
            try:
                self._liveness = self._live(hub["token"], "", (host, port))
            except CoordinationError as error:
                _log.warning("%s; waiting for another address", error)
                try:
                    word = exchange.await_value(
                        self._hub_key, 0, other_than=word, timeout_s=STALE_S
                    )
                except RankTimeoutError:
                    raise RankLostError(
                        f"rank 0 cannot be reached at {host} port {port}: {error.message}. It has "
                        "left or died, or the hosts of this job cannot reach each other's ports",
                        rank=0,
                        ranks=(0,),
                    ) from error
            else:
                return hub

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
    def _open(
        self, name: str, timeout_s: float | None, *, is_shared: bool = True
    ) -> Iterator[StoreExchange | Alone]:
        """An operation. If it ``is_shared`` all ranks make it, and wait for each other."""
        limit_s = self._timeout_s if timeout_s is None else _checks.seconds("timeout_s", timeout_s)
        deadline = time.monotonic() + limit_s
        self._require_open()
        title = titled(name)
        turns = self._turns.of(name, title)
        turn = turns.draw()
        if self._world_size == 1:
            with turns.serve(turn, limit_s):
                yield Alone(title, limit_s, deadline)
            return
        exchange = functools.partial(
            self._exchange,
            name=title,
            base=f"{name}/{turn}",
            timeout_s=limit_s,
            deadline=deadline,
        )
        served = False
        try:
            with turns.serve(turn, limit_s), self._channel() as channel:
                shared = exchange(channel)
                served = True
                yield shared
        except BaseException as error:
            if is_shared and not served:  # the others must not wait for what this rank gave up
                record = ErrorRecord.of(error, rank=self._rank, phase=title)
                # The error at hand says more than that they cannot be told.
                with contextlib.suppress(CheckpointError, RuntimeError), self._channel() as channel:
                    exchange(channel).fail(record)
            raise

    def _exchange(
        self, channel: Channel, name: str, base: str, timeout_s: float, deadline: float
    ) -> StoreExchange:
        return StoreExchange(
            channel,
            self._ranks(),
            reconnect=functools.partial(Channel, self._store.clone),
            base=f"{self._base}/{base}",
            name=name,
            timeout_s=timeout_s,
            deadline=deadline,
        )

    def _ranks(self) -> Ranks:
        return Ranks(
            home=self._base,
            rank=self._rank,
            world_size=self._world_size,
            liveness=self._liveness,
            silence_s=self._silence_s,
            is_closed=self._closed.is_set,
        )

    def _require_open(self) -> None:
        if os.getpid() != self._pid:
            raise CoordinationError(
                f"the coordinator of rank {self._rank} was made in another process; "
                "a forked process cannot speak for the rank"
            )
        if self._closed.is_set():
            raise ClosedError(f"the coordinator of rank {self._rank} is closed")

    @contextlib.contextmanager
    def _channel(self) -> Generator[Channel]:
        with self._guard:
            self._require_open()
            channel = self._idle.pop() if self._idle else Channel(self._store.clone)
        try:
            yield channel
        finally:
            with self._guard:
                keep = channel.usable and not self._closed.is_set()
                if keep:
                    self._idle.append(channel)
            if not keep:
                channel.close()


def _close_all(channels: list[Channel]) -> None:
    while channels:
        channels.pop().close()


def _members(process_group: "ProcessGroup | None") -> "tuple[ProcessGroup, int, int, Any]":
    """The group given or else the default one, this rank in it, its size, and its store."""
    try:
        import torch.distributed as dist  # noqa: PLC0415 -- optional: `holdfast[torch]`
    except ImportError as error:
        raise CoordinationError(
            "TorchCoordinator needs torch, which is not installed (pip install torch). "
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
    return group, rank, dist.get_world_size(group), group.get_group_store()


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
