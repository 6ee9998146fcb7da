"""Copies of units, made by a training that waits or by a thread behind its back. Knows memory and
devices; who copies what when is decided elsewhere."""

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch

from holdfast.distributed._tensors import has_memory, memory_of
from holdfast.distributed._units import Piece, Unit
from holdfast.errors import TornSnapshotError

_NAMED: Final = 5

Claim = tuple[Unit, torch.Tensor]
"""A unit that is being copied, and the slot that it is copied into."""

Streams = Mapping[torch.device, Any]


def streams_for(devices: Iterable[torch.device]) -> Streams:
    """A stream for each device that begins after what the training has queued by now."""
    streams = {}
    for device in devices:
        if device.type == "cuda":
            streams[device] = torch.cuda.Stream(device)
            streams[device].wait_stream(torch.cuda.current_stream(device))
    return streams


def copy_claims(claims: Sequence[Claim], streams: Streams, *, background: bool) -> None:
    """Copy units into their slots. In the background with one thread, and on a stream of its own;
    else as fast as can be."""
    into: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for unit, slot in claims:
        for piece in unit.pieces:
            check_memory(piece)
            target = slot[piece.at : piece.at + piece.stop - piece.start]
            if piece.is_bytes and piece.source.device.type == "cpu" and not background:
                into.append(target)
                sources.append(piece.source)
            else:
                _copy_piece(piece, target, streams if background else {})
    if into:
        # One call for all: between two, other threads would have Python for milliseconds.
        torch._foreach_copy_(into, sources)


def _copy_piece(piece: Piece, into: torch.Tensor, streams: Streams) -> None:
    source = piece.source
    stream = streams.get(source.device)
    if stream is not None:
        with torch.cuda.stream(stream):
            into.view(source.dtype).view(source.shape).copy_(source, non_blocking=True)
        stream.synchronize()
    elif piece.is_bytes and source.device.type == "cpu":
        # On this thread alone, while the others train; and without NumPy, which would have
        # torch refuse for ever to resize the source.
        ctypes.memmove(into.data_ptr(), source.data_ptr(), source.numel())
    else:
        into.view(source.dtype).view(source.shape).copy_(source)


def copy_of(piece: Piece, low: int, high: int, streams: Streams) -> memoryview:
    """A copy of some of its bytes, from where they live; of what is no row of bytes, all is copied
    on the way."""
    check_memory(piece)
    source = piece.source
    if piece.is_bytes:
        source = source[low - piece.start : high - piece.start]
    stream = streams.get(source.device)
    if stream is None:
        copy = source.clone(memory_format=torch.contiguous_format).cpu()
    else:
        with torch.cuda.stream(stream):
            copy = source.clone(memory_format=torch.contiguous_format).cpu()
    data = memory_of(copy)
    return data if piece.is_bytes else data[low - piece.start : high - piece.start]


def check_memory(piece: Piece) -> None:
    """Reading memory that was given back would end the process, not the save."""
    if not has_memory(piece.source):
        raise torn([piece.leaf.name or "a tensor"])


def torn(names: Sequence[str]) -> TornSnapshotError:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return TornSnapshotError(
        f"{', '.join(names[:_NAMED])}{more} changed while being saved, by something else than a "
        "step of a torch optimizer, so that what was written is of no one moment; nothing was "
        'committed. Change it when the save is done, or save with SaveOptions(snapshot="copy")'
    )
