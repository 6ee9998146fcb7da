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

import ctypes
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Final

import torch

from holdfast.distributed._pace import Pace
from holdfast.distributed._pool import SLOT_BYTES, Pool
from holdfast.distributed._tensors import has_memory, memory_of
from holdfast.distributed._units import CutLeaf, Piece, Span, State, Unit, cut_into_units
from holdfast.errors import SaveError, TornSnapshotError
from holdfast.format import CHUNK_BYTES

_NAMED: Final = 5
_RATE_BYTES: Final = 4 * 1024 * 1024
"""How much must have been written before its speed is worth knowing."""


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
        self._changed = threading.Condition()
        self._uncut = [(tuple(owned), True), (tuple(still), False)]
        self._still = {leaf.tensor.data_ptr(): leaf for leaf in still if leaf.seen is not None}
        self._others = cut_into_units(others, waits=True)
        self._owned: list[Unit] = []
        self._units = [*self._others]
        self._streams = _streams({leaf.tensor.device for leaf in chain(owned, others)})
        self._spent: deque[Unit] = deque()
        self._torn: list[CutLeaf] = []
        self._error: Exception | None = None
        self._closed = False
        self._rushing = False  # whether a training waits for copies: then all else does
        self._pace = pace or Pace()
        self._began_s = time.monotonic()
        self._copied_bytes = 0  # by a training that waited for it
        self._copied_s = 0.0
        self._spent_bytes = 0
        self._spent_s: tuple[float, float] | None = None
        self.copy_s = 0.0
        self.stall_s = 0.0
        self.predicted_stall_s: float | None = None

    def cut(self) -> None:
        """Before anything is read of it. Takes a while, so the thread that trains does not do it,
        unless it is about to step. Idempotent."""
        with self._changed:
            while self._uncut:
                leaves, waits = self._uncut.pop()
                units = cut_into_units(leaves, waits=waits)
                self._units += units
                if waits:
                    self._owned = units

    def copy_at_once(self, *, wait: bool = True) -> bool:
        """Copy what nobody would keep as it is. If there is no room, waits for what is written,
        or returns that there is something left."""
        return self._copy_units(self._others, wait=wait)

    def finish(self) -> None:
        """Nothing more is read: ``check`` knows all that can be known."""
        while True:
            self.needs({})
            with self._changed:  # a copy that is interrupted leaves its unit LIVE
                if not any(unit.is_live for unit in self._units):
                    return
                if any(unit.state is State.BUSY for unit in self._units):
                    self._changed.wait()

    def needs(self, spans: Mapping[Kept, Sequence[Span]]) -> None:
        """Only these bytes will be read from now on. May be called again, with less."""
        wanted: dict[int, list[Span]] = {}
        for kept, ranges in spans.items():
            wanted.setdefault(id(kept.leaf), []).extend(ranges)
        dropped = []
        with self._changed:
            for unit in self._units:
                unit.needed = sum(p.shared(wanted.get(id(p.leaf), ())) for p in unit.pieces)
                if unit.needed:
                    continue
                if unit.state is State.LIVE:
                    unit.state = State.BUSY
                    dropped.append(unit)
                elif unit.state is State.STAGED:
                    self._make_spent(unit)
            self._changed.notify_all()
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

    def freeze(self, addresses: Iterable[int] = ()) -> None:
        """Copy what an optimizer may change, which may do so once this returns; ``addresses`` has
        where the parameters of this one are. Waits for what is being copied and, if there is no
        room, for what is being written. Whatever is wrong with the save is not raised here."""
        began_s = time.monotonic()
        self.cut()
        self._predict()
        known = (self._still.get(at) for at in addresses)
        moving = {id(p.unit): p.unit for leaf in known if leaf is not None for p in leaf.pieces}
        try:
            self._copy_units([*self._owned, *moving.values()])
        finally:
            self.stall_s += time.monotonic() - began_s

    def check(self) -> None:
        """``TornSnapshotError`` if something is not as it was, or what else went wrong."""
        if self._error is not None:
            raise self._error
        if self._torn:
            raise _torn([leaf.name or "a tensor" for leaf in self._torn])

    def pace(self) -> Pace:
        """How fast it went, as far as that is known by now."""
        pace = self._pace
        first_s, last_s = self._spent_s or (0.0, 0.0)
        if self._spent_bytes >= _RATE_BYTES and last_s > first_s:
            rate = self._spent_bytes / (last_s - first_s)
            pace = replace(pace, write_rate=rate, start_s=first_s - self._began_s)
        if self._copied_bytes >= _RATE_BYTES and self._copied_s > 0:
            pace = replace(pace, copy_rate=self._copied_bytes / self._copied_s)
        return pace

    def close(self) -> None:
        """Give all memory back. Whoever waits in ``freeze`` goes on. Idempotent."""
        with self._changed:
            self._closed = True
            while any(unit.state is State.BUSY for unit in self._units):
                self._changed.wait()
            for unit in self._units:
                unit.state = State.GONE
                for leaf in unit.leaves():
                    leaf.pieces = []
                unit.pieces = []
                if unit.slot is not None:
                    self._pool.give(unit.slot)
                    unit.slot = None
            self._units, self._owned, self._others, self._uncut = [], [], [], []
            self._still = {}
            self._spent.clear()
            self._changed.notify_all()

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
        with self._changed:
            while unit.state is State.BUSY or (self._rushing and not self._closed):
                self._changed.wait()
            if unit.state is State.GONE:
                self.check()
                raise SaveError(
                    "the memory of what was being written has been used again, so that it cannot "
                    "be written once more; with a larger staging_bytes it can. Nothing was "
                    "committed"
                )
            if unit.state in {State.STAGED, State.SPENT}:
                return unit.slot
            slot = self._take_slot() if stage else None
            unit.state = State.BUSY
        if slot is None:
            return None
        self._stage(unit, slot, background=True)
        return self._slot_of(unit, stage=stage)

    def _look(self, piece: Piece, low: int, high: int) -> memoryview:
        """A copy of bytes where they live. The unit is BUSY, and then LIVE again."""
        try:
            _check_memory(piece)
            if piece.is_bytes:
                return memory_of(_part(piece, low, high).clone().cpu())
            whole = memory_of(piece.source.clone(memory_format=torch.contiguous_format).cpu())
            return whole[low - piece.start : high - piece.start]
        finally:
            with self._changed:
                piece.unit.state = State.LIVE
                self._changed.notify_all()

    def _unspend(self, piece: Piece, low: int, high: int) -> None:
        """Bytes are about to be written, perhaps once more: their memory is needed."""
        unit = piece.unit
        with self._changed:
            unit.written.pop((id(piece), low, high), None)
            if unit.state is State.SPENT and not unit.is_spent:
                self._spent.remove(unit)
                unit.state = State.STAGED

    def _spend(self, piece: Piece, low: int, high: int) -> None:
        """Bytes were written. What waits for room gets theirs; what is not to be copied stays
        LIVE until the end, and so can be written again."""
        now_s, unit = time.monotonic(), piece.unit
        with self._changed:
            self._spent_bytes += high - low
            self._spent_s = (self._spent_s or (now_s, now_s))[0], now_s
            unit.written[id(piece), low, high] = high - low
            is_dropped = unit.waits and unit.state is State.LIVE and unit.is_spent
            if is_dropped:
                unit.state = State.BUSY
            elif unit.state is State.STAGED and unit.is_spent:
                self._make_spent(unit)
            self._changed.notify_all()
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
                with self._changed:
                    self._rushing = False
                    self._changed.notify_all()

    def _copy_each(self, todo: deque[Unit], *, background: bool, wait: bool) -> bool:
        while True:
            with self._changed:
                while todo and not todo[0].is_live:
                    todo.popleft()
                if not todo or self._closed:
                    return True
                if background and self._rushing:
                    self._changed.wait()
                    continue
                unit = next((unit for unit in todo if unit.state is State.LIVE), None)
                slot = None if unit is None else self._take_slot()
                if unit is None or slot is None:
                    if not wait:
                        return False
                    self._rushing = self._rushing and background
                    self._changed.notify_all()  # who writes makes room
                    self._changed.wait()
                    continue
                self._rushing = self._rushing or not background
            self._claim_and_stage(unit, slot, background=background)

    def _claim_and_stage(self, unit: Unit, slot: torch.Tensor, *, background: bool) -> None:
        """Copy a unit, unless another thread is ahead. An interrupt at any point leaves it LIVE,
        or copied."""
        is_mine = False
        try:
            with self._changed:
                if unit.state is State.LIVE:
                    is_mine, unit.state = True, State.BUSY
                else:
                    self._pool.give(slot)
            if is_mine:
                self._stage(unit, slot, background=background)
        except BaseException:
            with self._changed:
                if is_mine and unit.state is State.BUSY:
                    unit.state = State.LIVE
                    self._changed.notify_all()
            raise

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

    def _stage(self, unit: Unit, slot: torch.Tensor, *, background: bool) -> None:
        """Copy a unit that this thread has made BUSY. What goes wrong is the save's to raise, and
        not the training's; unless it is an interrupt."""
        began_s = time.monotonic()
        state = State.LIVE
        try:
            for piece in unit.pieces:
                self._copy(piece, slot, background=background)
            self._settle(unit)
            state = State.STAGED
        except Exception as error:  # noqa: BLE001 -- ``check`` raises it
            self._error = error
            state = State.GONE
        finally:
            with self._changed:
                took_s = time.monotonic() - began_s
                self.copy_s += took_s
                if not background:
                    self._copied_bytes += unit.nbytes
                    self._copied_s += took_s
                unit.state = state
                if state is State.STAGED:
                    unit.slot = slot
                    if unit.is_spent:
                        self._make_spent(unit)
                else:
                    self._pool.give(slot)
                self._changed.notify_all()

    def _drop(self, unit: Unit) -> None:
        """A unit that this thread has made BUSY need not be copied."""
        try:
            self._settle(unit)
        except Exception as error:  # noqa: BLE001 -- ``check`` raises it
            self._error = error
        finally:
            with self._changed:
                unit.state = State.GONE
                self._changed.notify_all()

    def _copy(self, piece: Piece, slot: torch.Tensor, *, background: bool) -> None:
        source = piece.source
        into = slot[piece.at : piece.at + piece.stop - piece.start]
        if not piece.is_bytes:
            into = into.view(source.dtype).view(source.shape)
        _check_memory(piece)
        stream = self._streams.get(source.device)
        if not background or (source.device.type != "cpu" and stream is None):
            into.copy_(source)
        elif stream is not None:
            with torch.cuda.stream(stream):
                into.copy_(source, non_blocking=True)
            stream.synchronize()
        elif piece.is_bytes:
            # On this thread alone, while the others train; and without NumPy, which would have
            # torch refuse for ever to resize the source.
            ctypes.memmove(into.data_ptr(), source.data_ptr(), source.numel())
        else:
            into.copy_(source)

    def _settle(self, unit: Unit) -> None:
        """A unit is not to be LIVE again: see whether leaves of which it was the last are as they
        were. It is still BUSY, so that no optimizer steps meanwhile."""
        for leaf in unit.leaves():
            with self._changed:
                leaf.live -= 1
                is_last = leaf.live <= 0  # less if a copy was interrupted and done again
            if is_last and leaf.seen is not None and not leaf.is_as_seen():
                self._torn.append(leaf)

    def _predict(self) -> None:
        if self.predicted_stall_s is not None:
            return
        with self._changed:
            left = sum(unit.nbytes for unit in self._owned if unit.state is State.LIVE)
            room = self._pool.room_bytes() + len(self._spent) * SLOT_BYTES
            pace = self.pace()
            since_s = time.monotonic() - self._began_s
            start_s = 0.0 if self._spent_s is not None else max(0.0, pace.start_s - since_s)
        if left:
            self.predicted_stall_s = pace.wait_s(left_bytes=left, room_bytes=room, start_s=start_s)


def _part(piece: Piece, low: int, high: int) -> torch.Tensor:
    return piece.source[low - piece.start : high - piece.start]


def _check_memory(piece: Piece) -> None:
    if not has_memory(piece.source):
        raise _torn([piece.leaf.name or "a tensor"])


def _streams(devices: Iterable[torch.device]) -> dict[torch.device, Any]:
    """A stream for each device that begins after what the training has queued by now."""
    streams = {}
    for device in devices:
        if device.type == "cuda":
            streams[device] = torch.cuda.Stream(device)
            streams[device].wait_stream(torch.cuda.current_stream(device))
    return streams


def _torn(names: Sequence[str]) -> TornSnapshotError:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return TornSnapshotError(
        f"{', '.join(names[:_NAMED])}{more} changed while being saved, by something else than a "
        "step of a torch optimizer, so that what was written is of no one moment; nothing was "
        'committed. Change it when the save is done, or save with SaveOptions(snapshot="copy")'
    )
