"""Whether a rank sees in its storage what another rank has put there. Knows no checkpoints."""

import time
from collections.abc import Callable
from typing import Final

from holdfast.contracts import ObjectInfo, Storage
from holdfast.errors import ObjectNotFoundError

_SEEN_WITHIN_S: Final = 5.0
_PAUSE_S: Final = 0.1


def seen_here(storage: Storage, key: str, proceed: Callable[[], None]) -> ObjectInfo | None:
    """What another rank has put into the storage, or ``None`` if this rank does not see it within
    5 s: network filesystems remember for a while that something was not there."""
    until = time.monotonic() + _SEEN_WITHIN_S
    while True:
        proceed()
        try:
            return storage.stat(key)
        except ObjectNotFoundError:
            if time.monotonic() >= until:
                return None
            time.sleep(_PAUSE_S)
