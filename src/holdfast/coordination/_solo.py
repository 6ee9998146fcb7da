"""The coordinator of a job with one process: every collective is already complete."""

import contextlib
from collections.abc import Generator
from typing import final

from holdfast import _checks
from holdfast.coordination._group import Exchange, GroupCoordinator
from holdfast.errors import ClosedError, ErrorRecord


@final
class SoloCoordinator(GroupCoordinator):
    """One rank, number 0, with the same arguments refused and the same errors raised."""

    def __init__(self) -> None:
        self._closed = False

    @property
    def rank(self) -> int:
        return 0

    @property
    def world_size(self) -> int:
        return 1

    def wait_for_rank(self, rank: int, timeout_s: float | None = None) -> None:
        _checks.rank("rank", rank, 1)
        if timeout_s is not None:
            _checks.seconds("timeout_s", timeout_s)
        with self._open("wait_for_rank", timeout_s):
            pass

    def close(self) -> None:
        self._closed = True

    @contextlib.contextmanager
    def _open(self, name: str, timeout_s: float | None) -> Generator[Exchange]:
        del name, timeout_s  # nothing is shared and nothing is waited for
        if self._closed:
            raise ClosedError("this coordinator is closed")
        yield _Alone()


class _Alone:
    def barrier(self, timeout_s: float | None) -> None: ...

    def broadcast(self, data: bytes | None, source: int, timeout_s: float | None) -> bytes:
        del source, timeout_s
        return data or b""

    def gather(self, data: bytes, target: int, timeout_s: float | None) -> list[bytes] | None:
        del target, timeout_s
        return [data]

    def all_gather(self, data: bytes, timeout_s: float | None) -> list[bytes]:
        del timeout_s
        return [data]

    def fail(self, record: ErrorRecord) -> ErrorRecord:
        return record
