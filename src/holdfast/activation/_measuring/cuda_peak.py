"""The peak that CUDA's caching allocator keeps. Knows its statistics, not whose tensors they are.

Written against the documented behaviour of ``torch.cuda.memory_allocated``,
``max_memory_allocated`` and ``reset_peak_memory_stats``.
"""

import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePeak:
    """What a call took on one device, over what was alive there when it began."""

    device: str
    peak_bytes: int
    after_bytes: int


class CudaPeaks:
    """Watches a CUDA device, none for a CPU, all of them for ``None``, while its block is open.

    There is one peak per device and process, and every start resets it; so the blocks that are
    open then, nested or of other threads, are first told how high it had got.
    """

    __slots__ = ("_high", "_start", "_wanted")

    _open: "list[CudaPeaks]" = []  # noqa: RUF012 -- as there is one peak
    _lock = threading.Lock()

    def __init__(self, wanted: Any) -> None:
        self._wanted = wanted
        if wanted is not None and wanted.type == "cuda" and wanted.index is None:
            self._wanted = torch.device("cuda", torch.cuda.current_device())
        self._start: dict[int, int] = {}
        self._high: dict[int, int] = {}

    def __enter__(self) -> Self:
        with self._lock:
            for index in self._devices():
                for other in self._open:
                    other._note(index)  # noqa: SLF001 -- of this class
                torch.cuda.reset_peak_memory_stats(index)
                self._start[index] = torch.cuda.memory_allocated(index)
            self._open.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._open.remove(self)

    def read(self) -> list[DevicePeak]:
        """How it stands now. A device that was first used in the block had nothing before."""
        with self._lock:
            return [self._read(index) for index in self._devices()]

    def _read(self, index: int) -> DevicePeak:
        self._note(index)
        start = self._start.get(index, 0)
        return DevicePeak(
            device=f"cuda:{index}",
            peak_bytes=max(0, self._high[index] - start),
            after_bytes=torch.cuda.memory_allocated(index) - start,
        )

    def _note(self, index: int) -> None:
        peak = torch.cuda.max_memory_allocated(index)
        self._high[index] = max(self._high.get(index, 0), peak)

    def _devices(self) -> list[int]:
        """Those to watch. Before CUDA is initialised nothing is allocated, and asking would
        initialise it."""
        if self._wanted is None:
            return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
        return [self._wanted.index] if self._wanted.type == "cuda" else []
