"""Which tiers there are, and how one is opened. Knows their names."""

import os
import threading
from typing import Any, Protocol

from holdfast.activation._events import Subscribers
from holdfast.activation._keeping.disk_tier import DiskStore
from holdfast.activation._keeping.held import Held
from holdfast.activation._keeping.host_tier import HostStore
from holdfast.activation._keeping.in_place_tier import InPlaceTier
from holdfast.activation._keeping.memory_stats import MemoryAccount
from holdfast.activation._keeping.moving_tier import MovingTier
from holdfast.activation._keeping.scratch import ScratchFile, scratch_folder

_NAMES = ("inplace", "host", "disk")


class Tier(Protocol):
    """Where tensors are kept. Thread-safe."""

    moves: bool

    def hold(self, tensor: Any, layer_id: str, *, lasting: bool) -> Held:
        """Keep a tensor until what is returned is dropped."""

    def tidy(self) -> None:
        """Bring the account up to date. The caller holds the tier's lock."""

    def trim(self) -> None:
        """Give back what nobody uses, as far as that can be had at once."""

    def close(self) -> None:
        """Drop everything. Idempotent."""


def open_tier(
    name: object,
    folder: str | os.PathLike[str] | None,
    lock: threading.Lock,
    account: MemoryAccount,
    subscribers: Subscribers,
) -> Tier:
    """The tier of this name; ``ValueError`` if there is none, or if it has no use for a folder."""
    if name not in _NAMES:
        raise ValueError(f"tier must be one of {', '.join(map(repr, _NAMES))}, not {name!r}")
    if name != "disk" and folder is not None:
        raise ValueError(f"folder is for the disk tier; the {name} tier has no use for {folder!r}")
    if name == "inplace":
        return InPlaceTier(lock, account)
    store = HostStore() if name == "host" else DiskStore(ScratchFile(scratch_folder(folder)))
    return MovingTier(store, account, lock, subscribers)
