"""The disk under the benchmarks: its bare speed, a cold cache, and a process's memory. Linux only.

Knows nothing of time: who calls, measures.
"""

import ctypes
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np

from holdfast.storage._pages import aligned_memory

T = TypeVar("T")

RAW = {f"raw{n}": n for n in (1, 2, 4)}
"""The bare disk, and by how many threads of each process it is used."""

BLOCK_BYTES = 4 * 2**20
PAGE_BYTES = 4096


def in_folder(work: Callable[[Path], T]) -> T:
    """``work`` with a folder on the disk that is measured: below the one the run began in."""
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=".") as folder:
        return work(Path(folder).resolve())


def raw_write(path: Path, size_bytes: int, threads: int) -> None:
    """That many bytes with direct I/O, durably."""
    size_bytes = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
        block = aligned_memory(BLOCK_BYTES)
        block[:] = np.random.default_rng(0).bytes(BLOCK_BYTES)

        def work(first: int) -> None:
            for at in range(first * BLOCK_BYTES, size_bytes, threads * BLOCK_BYTES):
                piece = block[: size_bytes - at]
                if os.pwrite(fd, piece, at) != len(piece):
                    raise OSError("short write")

        on_threads(threads, work)
        os.fsync(fd)
    finally:
        os.close(fd)


def raw_read(
    path: Path, threads: int, use: Callable[[int, memoryview], object] = lambda _at, _piece: None
) -> None:
    """Read a file, and ``use`` each piece of it with its offset."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        size_bytes = os.fstat(fd).st_size

        def work(first: int) -> None:
            block = aligned_memory(BLOCK_BYTES)
            for at in range(first * BLOCK_BYTES, size_bytes, threads * BLOCK_BYTES):
                piece = block[: size_bytes - at]
                if os.preadv(fd, [piece], at) != len(piece):
                    raise OSError("short read")
                use(at, piece)

        on_threads(threads, work)
    finally:
        os.close(fd)


def on_threads(count: int, work: Callable[[int], object]) -> None:
    """``work(n)`` for every ``n`` below ``count``, each on a thread. What one raises is raised."""
    with ThreadPoolExecutor(count) as pool:
        for done in [pool.submit(work, n) for n in range(count)]:
            done.result()


def cold(folder: Path) -> None:
    """Drop all files below from the page cache."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def extra_memory(call: Callable[[], object]) -> int:
    """How far the process's memory rose over what it was, while the call ran."""
    ctypes.CDLL(None).malloc_trim(0)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the peak so far
    call()
    return status("VmHWM") - before


def status(field: str) -> int:
    """Resident bytes of this process, now (``VmRSS``) or at its peak (``VmHWM``).

    ``ru_maxrss`` would not do: a child begins with its parent's, and a peak below that is lost.
    """
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)
