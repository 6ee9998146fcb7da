"""How the tensors of a snapshot are cut into units that are copied one at a time, and what can be
seen of a tensor in no time. Knows memory; copies nothing and waits for nobody."""

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from holdfast.distributed._pool import SLOT_BYTES
from holdfast.distributed._tensors import bytes_view, has_memory
from holdfast.format import CHUNK_BYTES

_SAMPLES: Final = 64
_ALIGN: Final = 64
_BY_SIZE: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Span = tuple[int, int]
"""A range of the bytes of a tensor, in row-major order."""


class State(enum.Enum):
    """What has become of a unit; see ``_snapshot``."""

    LIVE = enum.auto()
    BUSY = enum.auto()
    STAGED = enum.auto()
    SPENT = enum.auto()
    GONE = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What can be seen of a tensor in no time: how often torch has changed it, and 64 elements
    spread over it. Enough to notice that all of it was changed, by whatever means."""

    version: int | None
    sample: bytes

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Seen":
        version = None if tensor.is_inference() else int(tensor._version)  # noqa: SLF001 -- nothing public tells
        return cls(version=version, sample=_sample(tensor))


@dataclass(slots=True, eq=False)
class Unit:
    """What is copied together, into one slot. ``waits`` if an optimizer that is about to step has
    to wait until it is; ``needed`` counts the bytes that are to be written, and ``written`` has
    those that were, by piece."""

    waits: bool
    pieces: "list[Piece]" = field(default_factory=list)
    nbytes: int = 0
    state: State = State.LIVE
    slot: torch.Tensor | None = None
    needed: int = 0
    written: "dict[tuple[int, int, int], int]" = field(default_factory=dict)

    @property
    def is_spent(self) -> bool:
        """Whether all of it that is needed was written."""
        return sum(self.written.values()) >= self.needed

    @property
    def is_live(self) -> bool:
        """Whether some of it has still to be copied."""
        return self.state is State.LIVE or self.state is State.BUSY

    def leaves(self) -> "Iterable[CutLeaf]":
        return {id(piece.leaf): piece.leaf for piece in self.pieces}.values()


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Bytes ``start`` to ``stop`` of a leaf: those of ``source``, which are to be ``at`` in the
    slot of their unit. ``is_bytes`` if the source is these very bytes, one after the other."""

    leaf: "CutLeaf"
    start: int
    stop: int
    source: torch.Tensor
    unit: Unit
    at: int
    is_bytes: bool

    def shared(self, spans: Sequence[Span]) -> int:
        """How many of its bytes the spans have, all of them together."""
        return sum(max(0, min(self.stop, high) - max(self.start, low)) for low, high in spans)


@dataclass(slots=True, eq=False)
class CutLeaf:
    """A tensor in pieces. ``shown`` has its type and shape, which its own object may lose while it
    is saved; ``seen`` is what was seen of it at the moment of the snapshot, ``None`` if it is
    copied at once; ``live`` counts those of its units that are still to be copied."""

    tensor: torch.Tensor
    shown: Any
    seen: Seen | None = None
    pieces: list[Piece] = field(default_factory=list)
    live: int = 0
    name: str = ""

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes  # type: ignore[no-any-return]

    def is_as_seen(self) -> bool:
        """Whether it still looks as it did at that moment."""
        return has_memory(self.tensor) and self.seen == Seen.of(self.tensor)


def cut_into_units(leaves: Iterable[CutLeaf], *, waits: bool) -> list[Unit]:
    """Units for all of them, each as full as can be. Tells the leaves their pieces."""
    units: list[Unit] = []
    for leaf in leaves:
        leaf.pieces, leaf.live = [], 0  # it may have been interrupted here before
        sources = _parts(leaf.tensor)
        start = 0
        for source in sources:
            rest = source
            while rest is not None:
                unit = units[-1] if units else None
                taken, rest = _fitting(rest, 0 if unit is None else SLOT_BYTES - unit.nbytes)
                if taken is None or unit is None:
                    unit = Unit(waits=waits)
                    units.append(unit)
                    continue
                nbytes = taken.numel() * taken.element_size()
                stop = start + nbytes
                piece = Piece(leaf, start, stop, taken, unit, unit.nbytes, _is_bytes(taken))
                unit.pieces.append(piece)
                unit.nbytes = -(-(unit.nbytes + nbytes) // _ALIGN) * _ALIGN
                leaf.pieces.append(piece)
                start = stop
    for unit in units:
        unit.needed = sum(piece.stop - piece.start for piece in unit.pieces)
        for leaf in unit.leaves():
            leaf.live += 1
    return units


def _fitting(source: torch.Tensor, room: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What of it goes into ``room``, and the rest. Only bytes are cut, and only between chunks."""
    nbytes = source.numel() * source.element_size()
    if nbytes <= room:
        return source, None
    whole = room // CHUNK_BYTES * CHUNK_BYTES
    if not whole or not _is_bytes(source):
        return None, source
    return source[:whole], source[whole:]


def _is_bytes(source: torch.Tensor) -> bool:
    return source.dim() == 1 and source.dtype is torch.uint8 and source.is_contiguous()


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The elements in row-major order: as bytes if they lie so, else in parts that fit a slot."""
    if not tensor.numel():
        return
    if tensor.is_contiguous():
        yield bytes_view(tensor)
        return
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes <= SLOT_BYTES:
        yield tensor
        return
    rows = max(1, SLOT_BYTES * tensor.shape[0] // nbytes)
    for start in range(0, tensor.shape[0], rows):
        if rows > 1:
            yield tensor[start : start + rows]
        else:
            yield from _parts(tensor[start])


def _sample(tensor: torch.Tensor) -> bytes:
    """64 elements spread over all of it, as bytes: a NaN is equal to itself."""
    if tensor.dtype is torch.complex128:  # torch has no integer of that size
        tensor = torch.view_as_real(tensor)
    count, dtype = tensor.numel(), _BY_SIZE[tensor.element_size()]
    if not count:
        return b""
    step = max(1, count // _SAMPLES)
    if tensor.is_contiguous():
        spread = tensor.view(-1)[::step].view(dtype)
    else:
        at = torch.arange(0, count, step, device=tensor.device)
        spread = tensor.view(dtype).take(at)
    # Of a copy: torch lets nobody resize the memory of a tensor that NumPy has seen.
    return spread.clone().cpu().numpy().tobytes()  # type: ignore[no-any-return]
