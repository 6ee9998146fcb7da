"""Takes the snapshots of one checkpointer, one after another, into the same memory.

Decides what is copied at once and what can wait; the copying itself is ``_snapshot``'s.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch

from holdfast.catalog._writing import Array, storable_array
from holdfast.distributed._capture import Captured, leaves_in
from holdfast.distributed._pace import Pace
from holdfast.distributed._pool import Pool
from holdfast.distributed._snapshot import Kept, Snapshot
from holdfast.distributed._tensors import (
    Unstorable,
    address,
    check_storable,
    home,
    identity,
    is_distributed,
)
from holdfast.distributed._units import CutLeaf, Seen

SMALL_BYTES: Final = 64 * 1024
"""Up to here a tensor is copied at once: to look after it would cost more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A snapshot, and what became of each tensor and array of the captured tree, by its ``id``.
    What cannot be stored is left out."""

    snapshot: Snapshot
    kept: Mapping[int, Kept]


class Snapshots:
    """Used by one thread, for one snapshot at a time. ``staging_bytes`` is the most memory it
    holds; ``None`` lets it have what a state takes, if half of what is free allows."""

    def __init__(self, staging_bytes: int | None = None) -> None:
        self._pool = Pool(staging_bytes)
        self._known: dict[int, _Known] = {}
        self._pace = Pace()

    @property
    def size_bytes(self) -> int:
        """How much memory is held for copies."""
        return self._pool.size_bytes

    def take(self, captured: Captured, *, steps: int, copy: bool) -> Taken:
        """``steps`` is how many steps optimizers have taken so far. With ``copy`` everything is to
        be copied at once. Nothing is, yet."""
        sorting = _Sorting(captured, self._known, steps, copy=copy)
        for value in leaves_in(captured.tree):
            sorting.add(value)
        self._known = self._known if copy else sorting.known
        snapshot = Snapshot(
            self._pool,
            owned=sorting.owned,
            still=sorting.still,
            others=sorting.others,
            pace=self._pace,
        )
        return Taken(
            snapshot=snapshot,
            kept={number: Kept(snapshot, leaf) for number, leaf in sorting.cut.items()},
        )

    def give_back(self, taken: Taken) -> None:
        """A snapshot is not needed any more. Idempotent."""
        self._pace = taken.snapshot.pace()
        taken.snapshot.close()


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of the tensor at an address: what was last seen of it, after how many steps it
    was first seen like that, and whether it was ever seen otherwise."""

    seen: Seen | None
    since: int
    moved: bool

    def met(self, now: Seen, steps: int) -> "_Known":
        if now == self.seen:
            return self
        return _Known(now, steps, self.seen is not None)

    def is_still(self, steps: int) -> bool:
        """Whether it has not changed though optimizers stepped, and never did: it is frozen, so
        far as can be told. An average that is updated now and then is not."""
        return self.seen is not None and not self.moved and self.since < steps


_NOBODY: Final = _Known(None, 0, moved=False)


@dataclass(slots=True)
class _Sorting:
    """What is to become of each tensor. Quick: training waits for it."""

    captured: Captured
    known_before: Mapping[int, _Known]
    steps: int
    copy: bool
    owned: list[CutLeaf] = field(default_factory=list)
    still: list[CutLeaf] = field(default_factory=list)
    others: list[CutLeaf] = field(default_factory=list)
    known: dict[int, _Known] = field(default_factory=dict)
    cut: dict[int, CutLeaf] = field(default_factory=dict)
    _by_address: dict[int, list[tuple[Any, CutLeaf]]] = field(default_factory=dict)

    def add(self, value: Any) -> None:
        if isinstance(value, np.ndarray):
            array = storable_array(value)
            if array is not None and id(value) not in self.cut:
                copy = np.array(array, order="C", copy=True)
                self._keep_still(value, _as_bytes(copy), shown=copy)
            return
        at = address(value)
        alike = self._by_address.setdefault(at, [])
        if alike:
            key = identity(value)
            known = next((leaf for other, leaf in alike if identity(other) == key), None)
            if known is not None:
                self.cut[id(value)] = known
                return
        try:
            local = check_storable(value)
        except Unstorable:
            return
        if local.nbytes <= SMALL_BYTES:
            local = local.clone(memory_format=torch.contiguous_format)
            leaf = self._keep_still(value, local, shown=_shown(value, local))
        else:
            local = local.detach() if local is value else local
            leaf = self.cut[id(value)] = CutLeaf(tensor=local, shown=_shown(value, local))
            self._sort(leaf, at)
        alike.append((value, leaf))

    def _sort(self, leaf: CutLeaf, at: int) -> None:
        where = home(leaf.tensor)
        if not self.copy and where in self.captured.owned:
            leaf.seen = Seen.of(leaf.tensor)
            self.owned.append(leaf)
            return
        if not self.copy and where in self.captured.frozen:
            now = Seen.of(leaf.tensor)
            known = self.known[at] = self.known_before.get(at, _NOBODY).met(now, self.steps)
            if known.is_still(self.steps):
                leaf.seen = now
                self.still.append(leaf)
                return
        self.others.append(leaf)

    def _keep_still(self, value: object, private: torch.Tensor, *, shown: object) -> CutLeaf:
        """Nobody else knows this memory, so that nobody changes it."""
        leaf = self.cut[id(value)] = CutLeaf(tensor=private, shown=shown)
        self.still.append(leaf)
        return leaf


def _shown(value: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    return value if is_distributed(value) else local


def _as_bytes(array: Array) -> torch.Tensor:
    if not array.size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_numpy(array.reshape(-1).view(np.uint8))
