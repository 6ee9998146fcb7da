"""What every coordinator does the same way, over whatever carries its bytes.

An `Exchange` moves bytes between the ranks of one operation and agrees on one error. Here
stand the checks on what callers give, and the block that ends alike on all ranks.
"""

import abc
import contextlib
import time
from collections.abc import Generator
from types import TracebackType
from typing import Protocol, Self, final

from holdfast import _checks
from holdfast.contracts import Data, Operation
from holdfast.coordination._outcome import error_to_raise, overdue_error
from holdfast.errors import ClosedError, ErrorRecord

_PHASE = "_holdfast_phase"
NAME_CHARS = 200  # a name is part of every key of its operation


class Exchange(Protocol):
    """One operation's way to the other ranks. Timeouts are seconds from now."""

    def barrier(self, timeout_s: float | None, *, last: bool = False) -> None:
        """``last``: who has got through has succeeded, whatever becomes of another rank."""

    def broadcast(self, data: bytes | None, source: int, timeout_s: float | None) -> bytes: ...

    def gather(self, data: bytes, target: int, timeout_s: float | None) -> list[bytes] | None: ...

    def all_gather(self, data: bytes, timeout_s: float | None) -> list[bytes]: ...

    def check(self) -> None:
        """Raise what a collective would, were it called now; wait for nobody."""

    def fail(self, record: ErrorRecord) -> ErrorRecord:
        """Tell the others, and return the record they all go by: the first one told."""


@final
class Alone:
    """The exchange of a world of one: everybody is here already. ``deadline`` is a moment of
    ``time.monotonic``."""

    def __init__(self, name: str, timeout_s: float, deadline: float) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._deadline = deadline

    def barrier(self, timeout_s: float | None, *, last: bool = False) -> None: ...

    def broadcast(self, data: bytes | None, source: int, timeout_s: float | None) -> bytes:
        del source, timeout_s
        return data or b""

    def gather(self, data: bytes, target: int, timeout_s: float | None) -> list[bytes] | None:
        del target, timeout_s
        return [data]

    def all_gather(self, data: bytes, timeout_s: float | None) -> list[bytes]:
        del timeout_s
        return [data]

    def check(self) -> None:
        if time.monotonic() > self._deadline:
            raise overdue_error(self._name, self._timeout_s)

    def fail(self, record: ErrorRecord) -> ErrorRecord:
        return record


@final
class GroupOperation:
    """The collectives of one operation. See `holdfast.contracts.Operation`."""

    def __init__(self, exchange: Exchange, *, rank: int, world_size: int, phase: str) -> None:
        self._exchange = exchange
        self._rank = rank
        self._world_size = world_size
        self._phase = phase
        self._over = False

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    def barrier(self, timeout_s: float | None = None) -> None:
        self._running().barrier(_optional(timeout_s))

    def broadcast(
        self, data: Data | None, *, source: int = 0, timeout_s: float | None = None
    ) -> bytes:
        _checks.rank("source", source, self._world_size)
        own = bytes(_checks.data("data", data)) if self._rank == source else None
        return self._running().broadcast(own, source, _optional(timeout_s))

    def gather(
        self, data: Data, *, target: int = 0, timeout_s: float | None = None
    ) -> list[bytes] | None:
        _checks.rank("target", target, self._world_size)
        return self._running().gather(
            bytes(_checks.data("data", data)), target, _optional(timeout_s)
        )

    def all_gather(self, data: Data, timeout_s: float | None = None) -> list[bytes]:
        return self._running().all_gather(bytes(_checks.data("data", data)), _optional(timeout_s))

    def phase(self, name: str) -> "_Phase":
        return _Phase(self, _name(name))

    def check(self) -> None:
        self._running().check()

    def agree(self) -> None:
        """The barrier that ends the operation."""
        self._running().barrier(None, last=True)

    def end(self) -> None:
        """Refuse everything from now on."""
        self._over = True

    def _running(self) -> Exchange:
        if self._over:
            raise ClosedError("this operation is over: its block has been left")
        return self._exchange

    def enter_phase(self, name: str) -> str:
        """Enter a phase and return the one before."""
        before, self._phase = self._phase, name
        return before

    def phase_of(self, error: BaseException) -> str:
        """The innermost phase that ``error`` ended, or else the one this rank is in."""
        return str(error.__dict__.get(_PHASE, self._phase))


class _Phase:
    """A block of an operation that has a name. Written out, and not as a generator: contextlib
    assigns to the errors that pass, which a frozen dataclass refuses."""

    def __init__(self, operation: GroupOperation, name: str) -> None:
        self._operation = operation
        self._name = name
        self._before = ""

    def __enter__(self) -> None:
        self._before = self._operation.enter_phase(self._name)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            # Kept with the error, so that one that is dealt with takes it along.
            error.__dict__.setdefault(_PHASE, self._name)
        self._operation.enter_phase(self._before)


class GroupCoordinator(abc.ABC):
    """The public verbs, each an operation of its own.

    A base and not a wrapper: the two coordinators differ only in where an exchange comes from.
    Arguments are checked here before an exchange is opened, so that a mistake on one rank
    disturbs no other, and again in `GroupOperation` for calls inside a block.
    """

    @property
    @abc.abstractmethod
    def rank(self) -> int: ...

    @property
    @abc.abstractmethod
    def world_size(self) -> int: ...

    @abc.abstractmethod
    def _open(
        self, name: str, timeout_s: float | None
    ) -> contextlib.AbstractContextManager[Exchange]:
        """The exchange of this rank's next operation of that name. ``ClosedError`` if closed."""

    @abc.abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def barrier(self, timeout_s: float | None = None) -> None:
        with self._together("barrier", timeout_s) as operation:
            operation.agree()

    def broadcast(
        self, data: Data | None, *, source: int = 0, timeout_s: float | None = None
    ) -> bytes:
        _checks.rank("source", source, self.world_size)
        own = bytes(_checks.data("data", data)) if self.rank == source else None
        with self._together("broadcast", timeout_s) as operation:
            return operation.broadcast(own, source=source)

    def gather(
        self, data: Data, *, target: int = 0, timeout_s: float | None = None
    ) -> list[bytes] | None:
        _checks.rank("target", target, self.world_size)
        own = bytes(_checks.data("data", data))
        with self._together("gather", timeout_s) as operation:
            return operation.gather(own, target=target)

    def all_gather(self, data: Data, timeout_s: float | None = None) -> list[bytes]:
        own = bytes(_checks.data("data", data))
        with self._together("all_gather", timeout_s) as operation:
            return operation.all_gather(own)

    @contextlib.contextmanager
    def operation(self, name: str, timeout_s: float | None = None) -> Generator[Operation]:
        with self._together(f"operation:{_name(name)}", timeout_s, phase=name) as operation:
            yield operation
            with operation.phase("agree"):
                operation.agree()

    @contextlib.contextmanager
    def _together(
        self, key: str, timeout_s: float | None, *, phase: str | None = None
    ) -> Generator[GroupOperation]:
        with self._open(key, _optional(timeout_s)) as exchange:
            operation = GroupOperation(
                exchange, rank=self.rank, world_size=self.world_size, phase=phase or key
            )
            try:
                yield operation
                operation.end()
            except BaseException as error:  # noqa: BLE001 -- told to the others, then raised
                record = ErrorRecord.of(error, rank=self.rank, phase=operation.phase_of(error))
                error.__dict__.pop(_PHASE, None)  # if it is raised again, it is elsewhere
                operation.end()
                agreed = exchange.fail(record)
                final_error = error_to_raise(error, agreed, rank=self.rank)
                try:
                    if final_error is error:
                        raise
                    raise final_error from error
                finally:
                    del final_error  # or this frame and the error would keep each other alive


def titled(key: str) -> str:
    """An operation's key, as people call it."""
    kind, _, name = key.partition(":")
    return f"operation {name!r}" if name else kind


def _optional(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else _checks.seconds("timeout_s", timeout_s)


def _name(name: str) -> str:
    return _checks.text("name", name, most=NAME_CHARS)
