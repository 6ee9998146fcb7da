"""The bare disk: a file written and read past the page cache, in blocks, by a few threads. What
anything that keeps bytes on this disk is to be compared with."""

import functools
import os
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from holdfast.storage._pages import aligned_memory

_BLOCK: Final = 4 * 1024 * 1024
_PAGE: Final = 4096
_THREADS: Final = 4


def bare_write(path: Path, nbytes: int) -> None:
    """A new file of so many bytes, or up to a page more, durable when this returns."""
    path.unlink(missing_ok=True)
    fd = _opened(path, os.O_RDWR | os.O_CREAT)
    try:
        noise = _noise()  # before the threads, each of which would make its own
        os.posix_fallocate(fd, 0, _in_pages(nbytes))
        _on_threads(nbytes, lambda at, size: os.pwrite(fd, noise[:size], at))
        os.fsync(fd)
    finally:
        os.close(fd)


def bare_read(path: Path, nbytes: int) -> None:
    """All of such a file, and nothing done with it."""
    fd = _opened(path, os.O_RDONLY)
    try:
        blocks = aligned_memory(_THREADS * _BLOCK)

        def move(at: int, size: int) -> int:
            own = at % len(blocks)  # two that are read at once are of different lanes
            return os.preadv(fd, [blocks[own : own + size]], at)

        _on_threads(nbytes, move)
    finally:
        os.close(fd)


def drop_from_cache(folder: Path) -> None:
    """Have what is in a folder read from the disk the next time. It must be durable already."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def take_into_cache(path: Path) -> None:
    """Have a file, or what is in a folder, read from the page cache the next time: with many large
    files the first may be gone from it when the last is there."""
    block = bytearray(_BLOCK)
    for each in (path, *path.rglob("*")):
        if each.is_file():
            with each.open("rb", buffering=0) as file:
                while file.readinto(block):
                    pass


def _opened(path: Path, flags: int) -> int:
    """Past the page cache where the filesystem can do that, and else through it."""
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError:
        return os.open(path, flags, 0o600)


@functools.cache
def _noise() -> memoryview:
    """A block that cannot be compressed. Made once: it takes longer than to write it."""
    block = aligned_memory(_BLOCK)
    block[:] = secrets.token_bytes(_BLOCK)
    return block


def _in_pages(nbytes: int) -> int:
    """What direct I/O can move of it: whole pages."""
    return -(-nbytes // _PAGE) * _PAGE


def _on_threads(nbytes: int, move: Callable[[int, int], int]) -> None:
    """``move(at, size)`` for every block, the last of which is as short as it can be."""
    end = _in_pages(nbytes)
    offsets = range(0, end, _BLOCK)

    def lane(nth: int) -> None:
        for at in offsets[nth::_THREADS]:
            size = min(_BLOCK, end - at)
            if move(at, size) != size:
                raise OSError("the disk took or gave less than a block")

    with ThreadPoolExecutor(_THREADS) as pool:
        for done in [pool.submit(lane, nth) for nth in range(_THREADS)]:
            done.result()
