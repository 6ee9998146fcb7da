"""Memory in large pages, where the system has them. Knows pages, not what they are for.

A disk is given one request for what lies together in memory, and pages of 4 KiB seldom do: to and
from large ones the same direct I/O was up to three times as fast. The kernel also clears what it
gives, page by page, when it is first touched, which takes longer in small ones.
"""

import collections
import ctypes
import mmap
import sys
from typing import Final

import numpy as np

_LARGE_BYTES: Final = 2 * 1024 * 1024
"""A large page where a page is 4 KiB. Where pages are larger, so are large ones: none is had."""

_KEPT_BUFFERS: Final = 8

_HUGE: Final = 14
"""``MADV_HUGEPAGE``."""

_madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
if _madvise is not None:
    _madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def ask_for_large_pages(address: int, nbytes: int) -> None:
    """For memory of this process that was just made. An advice: a system that has no large pages,
    or none to give, gives small ones."""
    if _madvise is not None:
        start = address // mmap.PAGESIZE * mmap.PAGESIZE  # also what it has in part
        _madvise(start, address + nbytes - start, _HUGE)


def address_of(memory: memoryview) -> int:
    """Where it begins."""
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def aligned_memory(nbytes: int) -> memoryview:
    """Memory for direct I/O, in large pages as far as it fills them. It holds zeros.

    ``MemoryError`` if there is none. Private, since memory that may be shared with others is in
    small pages on most systems. So, before Linux 5.8, a process that forks while its threads read
    to it may find old bytes there, and take what is intact for damaged.
    """
    try:
        mapped = mmap.mmap(-1, nbytes + _LARGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"there is no memory for a buffer of {nbytes} bytes") from error
    address = address_of(memoryview(mapped))
    skipped = -address % _LARGE_BYTES
    ask_for_large_pages(address + skipped, nbytes // _LARGE_BYTES * _LARGE_BYTES)
    return memoryview(mapped)[skipped : skipped + nbytes]


class Buffers:
    """Aligned memory that is used again. Thread-safe; never makes anybody wait."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._free: collections.deque[memoryview] = collections.deque(maxlen=_KEPT_BUFFERS)

    def take(self) -> memoryview:
        try:
            return self._free.pop()
        except IndexError:
            return aligned_memory(self.nbytes)

    def give(self, buffer: memoryview) -> None:
        self._free.append(buffer)
