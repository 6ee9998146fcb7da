"""Real ranks for tests: N gloo processes on this machine, ready in a fraction of a second.

The processes are forked from one server process that has already imported torch, so the
import is paid once per test run and not once per rank. A gang runs many functions one after
the other; any rank may be killed, stopped or continued meanwhile. Loopback only.
"""

import contextlib
import importlib.util
import multiprocessing
import os
import signal
import socket
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import ForkingPickler
from pickle import PicklingError
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, final

from holdfast import _checks
from holdfast.errors import (
    CheckpointError,
    ClosedError,
    ErrorRecord,
    OperationTimeoutError,
    RankLostError,
)

__all__ = ["RankGang", "RankOutcome"]

P = ParamSpec("P")
T = TypeVar("T")

# The first optimizer of a process imports torch._dynamo, which takes most of a second.
_PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "holdfast.distributed")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutcome:
    """How one rank's call ended: with a value, with an error, or with the process.

    ``exit_code`` is ``None`` while the process lives; ``-9`` means killed by SIGKILL.
    """

    rank: int
    value: Any = None
    error: ErrorRecord | None = None
    exit_code: int | None = None
    elapsed_s: float = 0.0

    def failure(self) -> CheckpointError | None:
        """The error to raise for this rank, with its traceback as a note; ``None`` if it is well.

        Another library's exception comes as a `RankFailedError` that names it.
        """
        if self.error is not None:
            return self.error.rebuild()
        if self.exit_code is None:
            return None
        return RankLostError(
            f"rank {self.rank} ended with exit code {self.exit_code}",
            rank=self.rank,
            ranks=(self.rank,),
        )


@final
class RankGang:
    """N processes with ``torch.distributed`` (gloo) initialised; rank 0 hosts the store.

    A context manager. Functions given to ``run`` and ``start`` must be importable by name
    (defined at the top of a module), their arguments and results picklable; they are called
    with the rank first. Use from one thread. If the process that made the gang is killed, a
    rank ends when its call does; one that is stopped stays until it is continued or killed.
    """

    def __init__(self, world_size: int, *, start_timeout_s: float = 60.0) -> None:
        _checks.count("world_size", world_size, least=1)
        _checks.seconds("start_timeout_s", start_timeout_s)
        if importlib.util.find_spec("torch") is None:
            raise ModuleNotFoundError("RankGang needs torch, which is not installed", name="torch")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(_PRELOAD))
        self._processes: list[ForkServerProcess] = []
        self._pipes: list[Connection] = []
        self._busy: set[int] = set()
        self._finalizer = weakref.finalize(self, _end, self._processes, self._pipes)
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_rank_main, args=(rank, world_size, theirs), name=f"rank-{rank}"
                )
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)
            deadline = time.monotonic() + start_timeout_s
            port = self._first_word(0, deadline)
            for pipe in self._pipes[1:]:
                pipe.send(port)
            for rank in range(1, world_size):
                self._first_word(rank, deadline)
            self._first_word(0, deadline)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid or 0 for process in self._processes)

    def run(
        self, function: Callable[Concatenate[int, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Call ``function(rank, ...)`` on every rank and return the values in rank order.

        If a rank fails, its error is raised here, with its traceback as a note.
        """
        self.start(function, *args, **kwargs)
        outcomes = self.outcomes()
        failures = {o.rank: error for o in outcomes if (error := o.failure()) is not None}
        if failures:
            # Of an error that spread, the copy of the rank where it began tells the most.
            began = [rank for rank, error in failures.items() if error.rank == rank]
            raise failures[min(began or failures)]
        return [outcome.value for outcome in outcomes]

    def start(
        self, function: Callable[Concatenate[int, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Call ``function(rank, ...)`` on every rank that lives, without waiting."""
        self._require_open()
        if self._busy:
            raise RuntimeError(f"ranks {sorted(self._busy)} have not finished the last call")
        try:
            call = ForkingPickler.dumps((function, args, kwargs))
        except (PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"cannot send {function!r} to the ranks: it must be defined at the top of a "
                f"module, and its arguments picklable ({error})"
            ) from error
        for rank, pipe in enumerate(self._pipes):
            with contextlib.suppress(BrokenPipeError):  # it has ended: outcomes() will say so
                pipe.send_bytes(call)
            self._busy.add(rank)

    def outcomes(
        self, timeout_s: float = 60.0, *, ranks: Collection[int] | None = None
    ) -> list[RankOutcome]:
        """Wait until the started call has ended on ``ranks`` (all by default), however it ended.

        ``OperationTimeoutError`` names the ranks still running; they may be asked for again.
        """
        self._require_open()
        _checks.seconds("timeout_s", timeout_s)
        if not self._busy:
            raise ValueError("nothing was started on any rank")
        wanted = set(self._busy if ranks is None else ranks)
        if not wanted <= self._busy:
            raise ValueError(f"nothing was started on ranks {sorted(wanted - self._busy)}")
        deadline = time.monotonic() + timeout_s
        found: list[RankOutcome] = []
        while wanted:
            pipes = {self._pipes[rank]: rank for rank in wanted}
            ready = wait(list(pipes), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                names = ", ".join(map(str, sorted(wanted)))
                raise OperationTimeoutError(
                    f"not finished within {timeout_s:g} s: rank {names}",
                    timeout_s=timeout_s,
                )
            for pipe in ready:
                rank = pipes[pipe]  # type: ignore[index]
                found.append(self._outcome(rank))
                wanted.discard(rank)
                self._busy.discard(rank)
        return sorted(found, key=lambda outcome: outcome.rank)

    def kill(self, rank: int) -> None:
        """SIGKILL: the rank ends at once, like a crash."""
        self._signal(rank, signal.SIGKILL)

    def stop(self, rank: int) -> None:
        """SIGSTOP: the rank freezes with its connections open."""
        self._signal(rank, signal.SIGSTOP)

    def cont(self, rank: int) -> None:
        """SIGCONT: a stopped rank goes on."""
        self._signal(rank, signal.SIGCONT)

    def close(self) -> None:
        """End every rank, stopped ones too. Idempotent."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _signal(self, rank: int, number: signal.Signals) -> None:
        self._require_open()
        os.kill(self.pids[_checks.rank("rank", rank, len(self._pipes))], number)

    def _require_open(self) -> None:
        if not self._finalizer.alive:
            raise ClosedError("this gang of ranks is closed")

    def _first_word(self, rank: int, deadline: float) -> Any:
        if not self._pipes[rank].poll(max(0.0, deadline - time.monotonic())):
            raise OperationTimeoutError(f"rank {rank} did not start in time", rank=rank)
        try:
            return self._pipes[rank].recv()
        except EOFError:
            self._processes[rank].join(5)
            code = self._processes[rank].exitcode
            raise RankLostError(
                f"rank {rank} ended while starting, with exit code {code}; see its output above. "
                "The ranks import the main script: does it run as a file, and does it keep what "
                "it does under if __name__ == '__main__'?",
                rank=rank,
                ranks=(rank,),
            ) from None

    def _outcome(self, rank: int) -> RankOutcome:
        try:
            answer = self._pipes[rank].recv_bytes()
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(5)
            return RankOutcome(rank=rank, exit_code=self._processes[rank].exitcode)
        try:
            value, error, elapsed_s = ForkingPickler.loads(answer)
        except Exception as failure:  # noqa: BLE001 -- becomes the outcome, which the caller reads
            return RankOutcome(rank=rank, error=ErrorRecord.of(failure, rank=rank, phase="return"))
        return RankOutcome(rank=rank, value=value, error=error, elapsed_s=elapsed_s)


def _end(processes: Sequence[ForkServerProcess], pipes: Sequence[Connection]) -> None:
    for process in processes:
        process.kill()  # SIGKILL also ends a stopped process
    for process in processes:
        process.join()
        process.close()
    for pipe in pipes:
        pipe.close()


def _rank_main(rank: int, world_size: int, pipe: Connection) -> None:
    import torch  # noqa: PLC0415 -- only the rank processes need torch
    import torch.distributed as dist  # noqa: PLC0415

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the test runner's to handle
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    host = rank == 0
    # A socket of our own, since torch's takes IPv6, too: it asks for the name of each client's
    # address, which in that form is in no list of hosts, and answers nobody until a DNS server has.
    listener = socket.create_server(("127.0.0.1", 0)) if host else None
    port = pipe.recv() if listener is None else listener.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        world_size,
        is_master=host,
        timeout=timedelta(seconds=60),
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )
    if host:
        pipe.send(port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    pipe.send("ready")
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except (EOFError, ConnectionResetError):  # the gang was closed, or its process is gone
            os._exit(0)
        began = time.perf_counter()
        value: Any = None
        error: ErrorRecord | None = None
        try:
            value = function(rank, *args, **kwargs)
        except BaseException as failure:  # noqa: BLE001 -- the outcome; pytest's own are no Exception
            error = ErrorRecord.of(failure, rank=rank)
        elapsed_s = time.perf_counter() - began
        try:
            pipe.send((value, error, elapsed_s))
        except (PicklingError, AttributeError, TypeError) as failure:
            pipe.send((None, ErrorRecord.of(failure, rank=rank, phase="return"), elapsed_s))
