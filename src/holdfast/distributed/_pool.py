"""Memory that copies of a state are put into, save after save. Knows slots, not what is in them."""

import threading
from pathlib import Path
from typing import Final

import torch

from holdfast.distributed._fresh import in_large_pages

SLOT_BYTES: Final = 16 * 1024 * 1024
"""What is lent out at a time: large enough to be copied at full speed, small enough that whoever
waits for one copy waits for a few milliseconds."""

_SLAB_BYTES: Final = 4 * SLOT_BYTES
_MEMINFO: Final = "/proc/meminfo"
_CGROUP: Final = "/sys/fs/cgroup"

LEAST_BYTES: Final = SLOT_BYTES


class Pool:
    """Slots of ``SLOT_BYTES``, made when they are first needed and then kept. Thread-safe.

    ``limit_bytes`` is the most it ever holds. Without one it grows until half of the memory that
    was free at first is gone, whoever took it: several ranks of one machine share it like this.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._free: list[torch.Tensor] = []
        self._bytes = 0
        self._keep_free: int | None = None

    @property
    def size_bytes(self) -> int:
        """How much memory it has taken so far."""
        return self._bytes

    def room_bytes(self) -> int:
        """How much can be taken from it now."""
        with self._lock:
            return len(self._free) * SLOT_BYTES + self._growth_bytes()

    def take(self) -> torch.Tensor | None:
        """A slot of bytes with anything in it, or ``None`` if all are lent out and there may be no
        more. Never waits."""
        with self._lock:
            if not self._free:
                self._grow()
            return self._free.pop() if self._free else None

    def give(self, slot: torch.Tensor) -> None:
        """Give back what ``take`` gave."""
        with self._lock:
            self._free.append(slot)

    def _grow(self) -> None:
        nbytes = min(_SLAB_BYTES, self._growth_bytes())
        if nbytes <= 0:
            return
        try:
            with torch.inference_mode(False):  # or nobody could write to it outside of that mode
                pinned = _is_cuda_in_use()
                slab = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
                if not pinned:
                    in_large_pages(slab)
        except RuntimeError:  # no more memory is to be had; copies go through what there is
            self._limit = self._bytes
            return
        self._bytes += nbytes
        self._free += slab.split(SLOT_BYTES)

    def _growth_bytes(self) -> int:
        """How much memory it may still take, in whole slots."""
        return self._may_take() // SLOT_BYTES * SLOT_BYTES

    def _may_take(self) -> int:
        if self._limit is not None:
            return self._limit - self._bytes
        free = available_bytes()
        if free is None:
            return _SLAB_BYTES
        if self._keep_free is None:
            self._keep_free = free // 2
        return max(free - self._keep_free, LEAST_BYTES - self._bytes, 0)


def available_bytes() -> int | None:
    """How much memory this process can still have without swapping, or without its container
    being stopped; ``None`` where nobody tells."""
    machine = _numbers(_MEMINFO).get("MemAvailable:")
    limit, used = _number(f"{_CGROUP}/memory.max"), _number(f"{_CGROUP}/memory.current")
    found = [] if machine is None else [machine * 1024]
    if limit is not None and used is not None:
        cached = _numbers(f"{_CGROUP}/memory.stat").get("file", 0)  # is given back when needed
        found.append(max(0, limit - used + cached))
    return min(found, default=None)


def _number(path: str) -> int | None:
    try:
        text = Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _numbers(path: str) -> dict[str, int]:
    """The lines of a file that are a name and a number."""
    try:
        lines = Path(path).read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    words = (line.split() for line in lines)
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdigit()}


def _is_cuda_in_use() -> bool:
    return bool(torch.cuda.is_available() and torch.cuda.is_initialized())
