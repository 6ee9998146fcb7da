"""A state as it was at one moment, though training goes on changing it.

Knows memory: what is still to be copied, what is copied, and what has been written and may be
copied over. Knows no files and no other rank.

A large tensor that an optimizer owns stays where it is, and is copied in the background into a
``Pool``, a unit of at most 16 MiB at a time. Before the optimizer steps, ``freeze`` copies what is
left. A tensor that looks as if nothing changed it is not copied at all, but written from where it
lives. Everything else is copied at once. A unit is

    LIVE -> BUSY -> STAGED -> SPENT -> GONE

and goes back from BUSY to LIVE if it was only looked at, and from SPENT to STAGED if it is read
again. What is LIVE may be read, a chunk at a time, by anybody; a slot of the pool is only needed
for what has to outlast a step. So a pool that is too small makes ``freeze`` wait for the writer,
and the writer waits for nobody.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Final, NoReturn

import torch

from holdfast.distributed._bell import Bell
from holdfast.distributed._copying import Claim, copy_claims, copy_of, streams_for, torn
from holdfast.distributed._pace import Pace, Pacer
from holdfast.distributed._pool import SLOT_BYTES, Pool
from holdfast.distributed._tensors import home
from holdfast.distributed._units import CutLeaf, Piece, Span, State, Unit, cut_into_units
from holdfast.errors import SaveError
from holdfast.format import CHUNK_BYTES

_RUSH_S: Final = 0.5


class Kept:
    """One tensor of a snapshot, as it was. If it is not known to be, the snapshot's ``check`` says
    so."""

    __slots__ = ("_snapshot", "is_contiguous", "leaf", "nbytes")

    def __init__(self, snapshot: "Snapshot", leaf: CutLeaf) -> None:
        self._snapshot = snapshot
        self.leaf = leaf
        self.nbytes = leaf.nbytes
        self.is_contiguous = leaf.tensor.is_contiguous()

    def read(self, start: int, stop: int, *, spend: bool = False) -> Iterator[memoryview]:
        """Its bytes in row-major order; each piece is valid until the next is asked for. With
        ``spend`` it is being written, and its memory may be used again."""
        for piece in self.leaf.pieces:
            low, high = max(start, piece.start), min(stop, piece.stop)
            if low < high:
                yield from self._snapshot.read_piece(piece, low, high, spend=spend)


class Snapshot:
    """Made by one thread, and then thread-safe. ``close`` it: its memory is used again.

    ``owned`` are tensors that torch's optimizers change when they step, ``still`` those that
    nothing seems to change, both with what was seen of them; ``others`` are copied at once, by
    ``copy_at_once``. ``pace`` is what is known from the last one.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        owned: Sequence[CutLeaf] = (),
        still: Sequence[CutLeaf] = (),
        others: Sequence[CutLeaf] = (),
        pace: Pace | None = None,
    ) -> None:
        self._pool = pool
        self._bell = Bell()
        self._uncut: tuple[Sequence[CutLeaf], Sequence[CutLeaf]] | None = (owned, still)
        self._still: dict[int, list[CutLeaf]] = {}
        for leaf in still:
            if leaf.seen is not None:
                self._still.setdefault(home(leaf.tensor), []).append(leaf)
        self._others = cut_into_units(others, waits=True)
        self._owned: list[Unit] = []
        self._units = [*self._others]
        self._streams = streams_for({leaf.tensor.device for leaf in chain(owned, still, others)})
        self._spent: deque[Unit] = deque()
        self._torn: list[CutLeaf] = []
        self._error: Exception | None = None
        self._closed = False
        self._rush_until_s = 0.0  # a training waits for copies until then: so does all else
        self._pacer = Pacer(pace or Pace())
        self.copy_s = 0.0
        self.stall_s = 0.0
        self.predicted_stall_s: float | None = None

    def cut(self) -> None:
        """Before anything is read of it. Takes a while, so the thread that trains does not do it,
        unless it is about to step. Idempotent."""
        with self._bell.lock:
            if self._uncut is not None:
                owned, still = self._uncut
                cut = cut_into_units(owned, waits=True), cut_into_units(still, waits=False)
                self._units = [*self._others, *cut[0], *cut[1]]
                self._owned, self._uncut = cut[0], None

    def give_way(self) -> None:
        """Wait while a training waits for copies: it is the sooner through."""
        while True:
            with self._bell.lock:
                if not self._is_rushing():
                    return
                sleeper = self._bell.listen()
            self._bell.sleep(sleeper)

    def copy_at_once(self, *, wait: bool = True) -> bool:
        """Copy what nobody would keep as it is. If there is no room, waits for what is written,
        or returns that there is something left."""
        return self._copy_units(self._others, wait=wait)

    def finish(self) -> None:
        """Nothing more is read: ``check`` knows all that can be known."""
        while True:
            self.needs({})
            with self._bell.lock:  # a copy that is interrupted leaves its unit LIVE
                if not any(unit.is_live for unit in self._units):
                    return
                sleeper = self._bell.listen()
            self._bell.sleep(sleeper)

    def needs(self, spans: Mapping[Kept, Sequence[Span]]) -> None:
        """Only these bytes will be read from now on. May be called again, with less."""
        wanted: dict[int, list[Span]] = {}
        for kept, ranges in spans.items():
            wanted.setdefault(id(kept.leaf), []).extend(ranges)
        dropped = []
        with self._bell.lock:
            for unit in self._units:
                unit.needed = sum(p.shared(wanted.get(id(p.leaf), ())) for p in unit.pieces)
                if unit.needed:
                    continue
                if unit.state is State.LIVE:
                    unit.state = State.BUSY
                    dropped.append(unit)
                elif unit.state is State.STAGED:
                    self._make_spent(unit)
            self._bell.ring()
        for unit in dropped:
            self._drop(unit)

    def copy_all(self) -> None:
        """Copy what an optimizer may change, as far as there is room, and return when none of it
        is left. For a thread in the background."""
        self._copy_units(self._owned, background=True)

    @property
    def has_still(self) -> bool:
        """Whether there are tensors that are written from where they live."""
        return bool(self._still)

    def freeze(self, homes: Iterable[int] = ()) -> None:
        """Copy what an optimizer may change, which may do so once this returns; ``homes`` has
        where the parameters of this one are. Waits for what is being copied and, if there is no
        room, for what is being written. Whatever is wrong with the save is not raised here."""
        began_s = time.monotonic()
        self.cut()
        self._predict()
        known = (leaf for at in homes for leaf in self._still.get(at, ()))
        moving = {id(p.unit): p.unit for leaf in known for p in leaf.pieces}
        try:
            self._copy_units([*self._owned, *moving.values()])
        finally:
            self.stall_s += time.monotonic() - began_s

    def check(self) -> None:
        """``TornSnapshotError`` if something is not as it was, or what else went wrong."""
        if self._error is not None:
            raise self._error
        if self._torn:
            raise torn([leaf.name or "a tensor" for leaf in self._torn])

    def pace(self) -> Pace:
        """How fast it went, as far as that is known by now."""
        return self._pacer.pace()

    def close(self) -> None:
        """Give all memory back. Whoever waits in ``freeze`` goes on. Idempotent."""
        self._closed = True
        while True:
            with self._bell.lock:
                self._bell.ring()
                if not any(unit.state is State.BUSY for unit in self._units):
                    self._give_all_back()
                    return
                sleeper = self._bell.listen()
            self._bell.sleep(sleeper)

    def _give_all_back(self) -> None:
        for unit in self._units:
            unit.state = State.GONE
            for leaf in unit.leaves():
                leaf.pieces = []
            unit.pieces = []
            if unit.slot is not None:
                self._pool.give(unit.slot)
                unit.slot = None
        self._units, self._owned, self._others, self._uncut = [], [], [], None
        self._still = {}
        self._spent.clear()

    def read_piece(self, piece: Piece, low: int, high: int, *, spend: bool) -> Iterator[memoryview]:
        """Those bytes of a leaf, which are in the piece; see ``Kept.read``."""
        at = low
        if spend:
            self._unspend(piece, low, high)
        while at < high:
            slot = self._slot_of(piece.unit, stage=spend and piece.unit.waits)
            if slot is not None:
                start = piece.at + at - piece.start
                yield memoryview(slot.numpy())[start : start + high - at]
                break
            stop = min(high, at + CHUNK_BYTES) if piece.is_bytes else high
            yield self._look(piece, at, stop)
            at = stop
        if spend:
            self._spend(piece, low, high)

    def _slot_of(self, unit: Unit, *, stage: bool) -> torch.Tensor | None:
        """Where a unit is staged; ``None`` if it is LIVE, and now BUSY. With ``stage`` it is
        copied first, if there is room."""
        while True:
            with self._bell.lock:
                if unit.state is State.GONE:
                    self._refuse_again()
                if unit.state is not State.BUSY and not self._is_rushing():
                    if unit.state is not State.LIVE:
                        return unit.slot
                    slot = self._take_slot() if stage else None
                    unit.state = State.BUSY
                    break
                sleeper = self._bell.listen()
            self._bell.sleep(sleeper)
        if slot is None:
            return None
        self._stage([(unit, slot)], background=True)
        return self._slot_of(unit, stage=stage)

    def _refuse_again(self) -> NoReturn:
        self.check()
        if self._closed:
            raise SaveError("the save was given up; nothing was committed")
        raise SaveError(
            "the memory of what was being written has been used again, so that it cannot be "
            "written once more; with a larger staging_bytes it can. Nothing was committed"
        )

    def _is_rushing(self) -> bool:
        """Whether a training waits for copies, as it said a moment ago."""
        return not self._closed and time.monotonic() < self._rush_until_s

    def _look(self, piece: Piece, low: int, high: int) -> memoryview:
        """A copy of bytes where they live. The unit is BUSY, and then LIVE again."""
        try:
            return copy_of(piece, low, high, self._streams)
        finally:
            with self._bell.lock:
                piece.unit.state = State.LIVE
                self._bell.ring()

    def _unspend(self, piece: Piece, low: int, high: int) -> None:
        """Bytes are about to be written, perhaps once more: their memory is needed."""
        unit = piece.unit
        with self._bell.lock:
            unit.written.pop((id(piece), low, high), None)
            if unit.state is State.SPENT and not unit.is_spent:
                self._spent.remove(unit)
                unit.state = State.STAGED

    def _spend(self, piece: Piece, low: int, high: int) -> None:
        """Bytes were written. What waits for room gets theirs; what is not to be copied stays
        LIVE until the end, and so can be written again."""
        unit = piece.unit
        with self._bell.lock:
            self._pacer.wrote(high - low)
            unit.written[id(piece), low, high] = high - low
            is_dropped = unit.waits and unit.state is State.LIVE and unit.is_spent
            if is_dropped:
                unit.state = State.BUSY
            elif unit.state is State.STAGED and unit.is_spent:
                self._make_spent(unit)
            self._bell.ring()
        if is_dropped:
            self._drop(unit)

    def _copy_units(
        self, units: Sequence[Unit], *, background: bool = False, wait: bool = True
    ) -> bool:
        """Have all of them copied, by this thread or another. Returns whether they are."""
        try:
            return self._copy_each(deque(units), background=background, wait=wait)
        finally:
            if not background:
                with self._bell.lock:
                    self._rush_until_s = 0.0
                    self._bell.ring()

    def _copy_each(self, todo: deque[Unit], *, background: bool, wait: bool) -> bool:
        claims: list[Claim] = []
        try:
            while True:
                with self._bell.lock:
                    while todo and not todo[0].is_live:
                        todo.popleft()
                    if not todo or self._closed:
                        return True
                    self._claim(todo, claims, background=background)
                    if not claims and not wait:
                        return False
                    if not background:
                        # Not while it waits for room: who writes makes some.
                        self._rush_until_s = time.monotonic() + _RUSH_S if claims else 0.0
                        self._bell.ring()
                    sleeper = None if claims else self._bell.listen()
                if sleeper is not None:
                    self._bell.sleep(sleeper)
                else:
                    self._stage(claims, background=background)
                    claims = []
        finally:
            self._unclaim(claims)  # after an interrupt

    def _claim(self, todo: Iterable[Unit], claims: list[Claim], *, background: bool) -> None:
        """Make units BUSY for which there is room: one in the background, else all. The caller has
        the lock."""
        if background and self._is_rushing():
            return
        for unit in todo:
            if unit.state is State.LIVE:
                slot = self._take_slot()
                if slot is None:
                    return
                claims.append((unit, slot))
                unit.state = State.BUSY
                if background:
                    return

    def _unclaim(self, claims: Sequence[Claim]) -> None:
        with self._bell.lock:
            for unit, slot in claims:
                if unit.state is State.BUSY:
                    unit.state = State.LIVE
                    self._pool.give(slot)
            self._bell.ring()

    def _take_slot(self) -> torch.Tensor | None:
        """A slot of the pool, or that of what is SPENT. The caller has the lock."""
        slot = self._pool.take()
        if slot is None and self._spent:
            unit = self._spent.popleft()
            unit.state = State.GONE
            slot, unit.slot = unit.slot, None
        return slot

    def _make_spent(self, unit: Unit) -> None:
        unit.state = State.SPENT
        self._spent.append(unit)

    def _stage(self, claims: Sequence[Claim], *, background: bool) -> None:
        """Copy units that this thread has made BUSY. What goes wrong is the save's to raise, and
        not the training's; unless it is an interrupt."""
        began_s = time.monotonic()
        state = State.LIVE
        try:
            copy_claims(claims, self._streams, background=background)
            for unit, _ in claims:
                self._settle(unit)
            state = State.STAGED
        except Exception as error:  # noqa: BLE001 -- ``check`` raises it
            self._error = error
            state = State.GONE
        finally:
            took_s = time.monotonic() - began_s
            with self._bell.lock:
                self.copy_s += took_s
                if not background:
                    self._pacer.copied(sum(unit.nbytes for unit, _ in claims), took_s)
                for unit, slot in claims:
                    self._staged(unit, slot, state)
                self._bell.ring()

    def _staged(self, unit: Unit, slot: torch.Tensor, state: State) -> None:
        unit.slot, unit.state = (slot if state is State.STAGED else None), state
        if state is not State.STAGED:
            self._pool.give(slot)
        elif unit.is_spent:
            self._make_spent(unit)

    def _drop(self, unit: Unit) -> None:
        """A unit that this thread has made BUSY need not be copied."""
        try:
            self._settle(unit)
        except Exception as error:  # noqa: BLE001 -- ``check`` raises it
            self._error = error
        finally:
            with self._bell.lock:
                unit.state = State.GONE
                self._bell.ring()

    def _settle(self, unit: Unit) -> None:
        """A unit is not to be LIVE again: see whether leaves of which it was the last are as they
        were. It is still BUSY, so that no optimizer steps meanwhile."""
        for leaf in unit.leaves():
            with self._bell.lock:
                leaf.live -= 1
                is_last = leaf.live <= 0  # less if a copy was interrupted and done again
            if is_last and leaf.seen is not None and not leaf.is_as_seen():
                self._torn.append(leaf)

    def _predict(self) -> None:
        if self.predicted_stall_s is not None:
            return
        with self._bell.lock:
            left = sum(unit.nbytes for unit in self._owned if unit.state is State.LIVE)
            room = self._pool.room_bytes() + len(self._spent) * SLOT_BYTES
            wait_s = self._pacer.wait_s(left_bytes=left, room_bytes=room)
        if left:
            self.predicted_stall_s = wait_s
