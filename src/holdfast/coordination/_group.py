"""What every coordinator does the same way, over whatever carries its bytes.

An `Exchange` moves bytes between the ranks of one operation and agrees on one error. Here
stand the checks on what callers give, and the block that ends alike on all ranks.
"""

import abc
import contextlib
from collections.abc import Generator
from types import TracebackType
from typing import Protocol, Self, final

from holdfast import _checks
from holdfast.contracts import Data, Operation
from holdfast.coordination._outcome import error_to_raise
from holdfast.errors import ErrorRecord

_PHASE = "_holdfast_phase"
NAME_CHARS = 200  # a name is part of every key of its operation


class Exchange(Protocol):
    """One operation's way to the other ranks. Timeouts are seconds from now."""

    def barrier(self, timeout_s: float | None) -> None: ...

    def broadcast(self, data: bytes | None, source: int, timeout_s: float | None) -> bytes: ...

    def gather(self, data: bytes, target: int, timeout_s: float | None) -> list[bytes] | None: ...

    def all_gather(self, data: bytes, timeout_s: float | None) -> list[bytes]: ...

    def fail(self, record: ErrorRecord) -> ErrorRecord:
        """Tell the others, and return the record they all go by: the first one told."""


@final
class GroupOperation:
    """The collectives of one operation. See `holdfast.contracts.Operation`."""

    def __init__(self, exchange: Exchange, *, rank: int, world_size: int, phase: str) -> None:
        self._exchange = exchange
        self._rank = rank
        self._world_size = world_size
        self._phase = phase

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    def barrier(self, timeout_s: float | None = None) -> None:
        self._exchange.barrier(_optional(timeout_s))

    def broadcast(
        self, data: Data | None, *, source: int = 0, timeout_s: float | None = None
    ) -> bytes:
        _checks.rank("source", source, self._world_size)
        own = _bytes(data) if self._rank == source else None
        return self._exchange.broadcast(own, source, _optional(timeout_s))

    def gather(
        self, data: Data, *, target: int = 0, timeout_s: float | None = None
    ) -> list[bytes] | None:
        _checks.rank("target", target, self._world_size)
        return self._exchange.gather(_bytes(data), target, _optional(timeout_s))

    def all_gather(self, data: Data, timeout_s: float | None = None) -> list[bytes]:
        return self._exchange.all_gather(_bytes(data), _optional(timeout_s))

    @contextlib.contextmanager
    def phase(self, name: str) -> Generator[None]:
        before, self._phase = self._phase, _name(name)
        try:
            yield
        except BaseException as error:
            # Kept with the error, not here: an error that is dealt with takes it along. In its
            # dictionary, because a frozen dataclass may be an exception too.
            error.__dict__.setdefault(_PHASE, self._phase)
            raise
        finally:
            self._phase = before

    def phase_of(self, error: BaseException) -> str:
        """The innermost phase that ``error`` ended, or else the one this rank is in."""
        return str(error.__dict__.get(_PHASE, self._phase))


class GroupCoordinator(abc.ABC):
    """The public verbs, each an operation of its own."""

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
            operation.barrier()

    def broadcast(
        self, data: Data | None, *, source: int = 0, timeout_s: float | None = None
    ) -> bytes:
        _checks.rank("source", source, self.world_size)
        own = _bytes(data) if self.rank == source else None
        with self._together("broadcast", timeout_s) as operation:
            return operation.broadcast(own, source=source)

    def gather(
        self, data: Data, *, target: int = 0, timeout_s: float | None = None
    ) -> list[bytes] | None:
        _checks.rank("target", target, self.world_size)
        own = _bytes(data)
        with self._together("gather", timeout_s) as operation:
            return operation.gather(own, target=target)

    def all_gather(self, data: Data, timeout_s: float | None = None) -> list[bytes]:
        own = _bytes(data)
        with self._together("all_gather", timeout_s) as operation:
            return operation.all_gather(own)

    @contextlib.contextmanager
    def operation(self, name: str, timeout_s: float | None = None) -> Generator[Operation]:
        with self._together(f"operation:{_name(name)}", timeout_s, phase=name) as operation:
            yield operation
            with operation.phase("agree"):
                operation.barrier()

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
            except BaseException as error:  # noqa: BLE001 -- told to the others, then raised
                record = ErrorRecord.of(error, rank=self.rank, phase=operation.phase_of(error))
                agreed = exchange.fail(record)
                final_error = error_to_raise(error, agreed, rank=self.rank)
                try:
                    if final_error is error:
                        raise
                    raise final_error from error
                finally:
                    del final_error  # or this frame and the error would keep each other alive


def _optional(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else _checks.seconds("timeout_s", timeout_s)


def _name(name: str) -> str:
    return _checks.text("name", name, most=NAME_CHARS)


def _bytes(data: object) -> bytes:
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"ranks exchange bytes, not {type(data).__name__}")
    return bytes(data)
