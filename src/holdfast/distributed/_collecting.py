"""Puts the garbage collector off while very many objects are made. Knows nothing of them."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collecting_later() -> Iterator[None]:
    """No garbage is collected in this process inside the block, unless it was not anyway.

    For work of seconds at most that makes objects by the ten thousand and needs all of them: each
    pass over them, and over all that the process has, finds nothing, and together the passes take
    as long as the work. May be entered by several threads; the first to leave ends it for all.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
