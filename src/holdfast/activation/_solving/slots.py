"""How bytes are counted in slots, so that a table over memory stays small. Knows sizes only.

Every size is rounded up and the room down, so what fits in slots fits in bytes. What is lost is at
most one rounding for each stage, as each has one thing on its account at a time, one for the peak
on top of them, and one for the room.
"""

from dataclasses import dataclass

import numpy as np

from holdfast.activation._solving.chain import Chain

# A slot may be this much larger than it must, if the sizes then come out even: activations are
# multiples of one another, and a slot that divides them loses nothing.
_LARGER = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """``room`` slots of ``slot_bytes`` fit the bytes there are. ``widened`` are so many that
    rounding shuts out nothing that fits those bytes exactly; what is found between the two must be
    checked. ``rounding_bytes``: whatever fits that much less memory exactly fits ``room`` slots."""

    slot_bytes: int
    room: int
    widened: int
    rounding_bytes: int

    def size(self, count_bytes: int) -> int:
        return -(-count_bytes // self.slot_bytes)


def slots_for(chain: Chain, room_bytes: int, most: int) -> Slots:
    """Slots for ``room_bytes``, no more than ``most``."""
    sizes = _sizes(chain)
    smallest = max(1, -(-room_bytes // most))
    distinct = np.unique(sizes)
    whole = distinct[distinct >= smallest]
    even = -(-whole // (whole // smallest))
    candidates = {smallest, *even[even <= _LARGER * smallest].tolist()}
    slot_bytes = min(sorted(candidates), key=lambda each: _lost(sizes, each))
    lost = _lost(sizes, slot_bytes) + slot_bytes - 1
    return Slots(
        slot_bytes=slot_bytes,
        room=room_bytes // slot_bytes,
        widened=(room_bytes + lost) // slot_bytes,
        rounding_bytes=lost + room_bytes % slot_bytes,
    )


def _sizes(chain: Chain) -> np.ndarray:
    """What each stage may have on its account: a row a stage, filled up with zeros."""
    sizes = [
        [stage.input_bytes, *(option.kept_bytes for option in stage.options)]
        for stage in chain.stages
    ]
    width = max(map(len, sizes))
    return np.array([[*each, *[0] * (width - len(each))] for each in sizes], np.int64)


def _lost(sizes: np.ndarray, slot_bytes: int) -> int:
    """What rounding the account of every stage up can take at most."""
    return int((-sizes % slot_bytes).max(axis=1).sum())
