"""Puts the garbage collector off while very many objects are made. Knows nothing of them."""

import contextlib
import gc
from collections.abc import Iterator
from typing import Final

_MOST_BYTES: Final = 256 * 1024 * 1024
"""Up to how many bytes are read or written in so little time that nobody's garbage piles up."""


@contextlib.contextmanager
def collecting_later(*, moved_bytes: int = 0) -> Iterator[None]:
    """No garbage is collected in this process inside the block, unless it was not anyway.

    For work of seconds at most, so not if many bytes are moved, that makes objects by the ten
    thousand and needs all of them: each pass over them, and over all that the process has, finds
    nothing, and together the passes take as long as the work. May be entered by several threads;
    the first to leave ends it for all.
    """
    if moved_bytes > _MOST_BYTES or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
