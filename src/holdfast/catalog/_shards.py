"""The files of a checkpoint, opened when they are needed, several at once. Knows how much memory
open ones take, and keeps those that were used last; knows nothing of what is in them."""

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from holdfast._lanes import run_all
from holdfast.catalog._shard_read import OpenShard

KEPT_BYTES: Final = 64 * 1024 * 1024
"""About how much memory is spent on open files that nobody uses just now."""

FILES_AT_ONCE: Final = 32
"""How many files are worked on together."""

_LANES: Final = 16
"""Files opened at the same time: each is a few small requests, one after the other."""

_ENTRY_BYTES: Final = 800


class Shards:
    """Thread-safe. Several callers that want the same file wait for the one that opens it."""

    def __init__(self, open_file: Callable[[int], OpenShard]) -> None:
        self._open_file = open_file
        self._kept: dict[int, OpenShard] = {}
        self._opening: dict[int, threading.Lock] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, index: int) -> OpenShard:
        """The file of that number, open."""
        with self._lock:
            if (shard := self._used(index)) is not None:
                return shard
            turn = self._opening.setdefault(index, threading.Lock())
        with turn:
            with self._lock:
                if (shard := self._used(index)) is not None:
                    return shard
            try:
                shard = self._open_file(index)
            finally:
                with self._lock:
                    self._opening.pop(index, None)
            with self._lock:
                self._keep(index, shard)
            return shard

    def get_all(self, indexes: Iterable[int]) -> Mapping[int, OpenShard]:
        """All of these, opened side by side. Give at most ``FILES_AT_ONCE``: all are held."""
        opened: dict[int, OpenShard] = {}

        def run(index: int) -> None:
            opened[index] = self.get(index)

        run_all(indexes, run, lanes=_LANES)
        return opened

    def _used(self, index: int) -> OpenShard | None:
        shard = self._kept.pop(index, None)
        if shard is not None:
            self._kept[index] = shard
        return shard

    def _keep(self, index: int, shard: OpenShard) -> None:
        if index in self._kept:
            return
        self._kept[index] = shard
        self._bytes += _weight(shard)
        while self._bytes > KEPT_BYTES:
            oldest = next(iter(self._kept))
            self._bytes -= _weight(self._kept.pop(oldest))


def _weight(shard: OpenShard) -> int:
    layout = shard.layout
    return len(layout.header) + layout.table_bytes + _ENTRY_BYTES * len(layout.entries)
