"""The bare disk: a file written and read past the page cache, in blocks, by a few threads. What
anything that keeps bytes on this disk is to be compared with."""

import mmap
import os
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

_BLOCK: Final = 4 * 1024 * 1024
_THREADS: Final = 4


def bare_write(path: Path, nbytes: int) -> None:
    """A new file, of whole blocks, durable when this returns."""
    path.unlink(missing_ok=True)
    fd = _opened(path, os.O_RDWR | os.O_CREAT)
    try:
        with mmap.mmap(-1, _BLOCK) as block:
            block.write(secrets.token_bytes(_BLOCK))
            os.posix_fallocate(fd, 0, len(_blocks(nbytes)) * _BLOCK)
            _on_threads(_blocks(nbytes), lambda at: os.pwrite(fd, block, at))
        os.fsync(fd)
    finally:
        os.close(fd)


def bare_read(path: Path, nbytes: int) -> None:
    """All of such a file, and nothing done with it."""
    fd = _opened(path, os.O_RDONLY)
    blocks = [mmap.mmap(-1, _BLOCK) for _ in range(_THREADS)]
    try:
        _on_threads(
            _blocks(nbytes), lambda at: os.preadv(fd, [blocks[at // _BLOCK % _THREADS]], at)
        )
    finally:
        for block in blocks:
            block.close()
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


def _opened(path: Path, flags: int) -> int:
    """Past the page cache where the filesystem can do that, and else through it."""
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError:
        return os.open(path, flags, 0o600)


def _blocks(nbytes: int) -> range:
    return range(0, nbytes, _BLOCK)


def _on_threads(offsets: range, move: Callable[[int], int]) -> None:
    def lane(nth: int) -> None:
        for at in offsets[nth::_THREADS]:
            if move(at) != _BLOCK:
                raise OSError("the disk took or gave less than a block")

    with ThreadPoolExecutor(_THREADS) as pool:
        for done in [pool.submit(lane, nth) for nth in range(_THREADS)]:
            done.result()
