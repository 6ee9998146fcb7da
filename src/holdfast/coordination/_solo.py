"""The coordinator of a job with one process: every collective is already complete."""

import contextlib
import math
import time
from collections.abc import Generator
from typing import final

from holdfast import _checks
from holdfast.coordination._group import Alone, Exchange, GroupCoordinator, titled
from holdfast.coordination._turns import TurnBook
from holdfast.errors import ClosedError

TIMEOUT_S = 600.0  # for another thread of this process to get out of the same operation


@final
class SoloCoordinator(GroupCoordinator):
    """One rank, number 0, with the same arguments refused and the same errors raised."""

    def __init__(self) -> None:
        self._closed = False
        self._turns = TurnBook()

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
        if self._closed:
            raise ClosedError("this coordinator is closed")
        title = titled(name)
        turns = self._turns.of(name, title)
        # Without a limit from the caller only the wait for its turn has one: nobody waits for it.
        limit_s = math.inf if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        with turns.serve(turns.draw(), TIMEOUT_S if timeout_s is None else timeout_s):
            yield Alone(title, limit_s, deadline)
