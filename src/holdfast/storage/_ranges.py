"""What a request for bytes must be. Knows sizes and memory, not where the bytes are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from holdfast.contracts import SMALL_OBJECT_BYTES, Data, ReadRange
from holdfast.errors import StorageError
from holdfast.reshard import coalesce

_LONG_BYTES: Final = 256 * 1024
"""From how many bytes on a range is worth up to two short reads at its edges, to save a copy."""


def check_ranges(ranges: Sequence[ReadRange], size_bytes: int, key: str) -> None:
    """``StorageError`` unless every range lies inside the object, ``ValueError`` unless it can be
    filled."""
    for wanted in ranges:
        if wanted.into.readonly:
            raise ValueError("a range to read into must be memory that can be written")
        if not wanted.into.c_contiguous:
            raise ValueError("a range to read into must be contiguous memory")
        end = wanted.start + wanted.into.nbytes
        if wanted.start < 0 or end > size_bytes:
            raise StorageError(
                f"bytes {wanted.start} to {end} are not inside the object of {size_bytes}",
                path=key,
            )


def small(data: Data, key: str) -> memoryview:
    """``data`` as bytes, or ``StorageError`` if they are too many for one request."""
    view = memoryview(data)
    if view.nbytes > SMALL_OBJECT_BYTES:
        raise StorageError(
            f"{view.nbytes} bytes are more than the {SMALL_OBJECT_BYTES} that one request "
            "stores; use open_writer",
            path=key,
        )
    return view.cast("B") if view.nbytes else memoryview(b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSpan:
    """Bytes ``start`` to ``stop`` to be read at once. ``targets`` says where they go: from which
    byte of the span on, into which memory. One that ``fits`` may be read there straight away, by
    direct I/O too."""

    start: int
    stop: int
    targets: tuple[tuple[int, memoryview], ...]
    fits: bool = False


def read_spans(
    ranges: Sequence[ReadRange], *, max_gap: int, max_bytes: int, block_bytes: int | None = None
) -> list[ReadSpan]:
    """The reads that fill ``ranges``: near ones joined, long ones cut, empty ones left out.

    With ``block_bytes``, a long range whose memory lies as it does in the file, as far from the
    start of a block, is read by spans that fit, and by others at its edges.
    """
    views = [wanted.into.cast("B") if wanted.into.nbytes else wanted.into for wanted in ranges]
    wanted = [(range_.start, view) for range_, view in zip(ranges, views, strict=True)]
    spans: list[ReadSpan] = []
    if block_bytes is not None and any(len(view) >= _LONG_BYTES for view in views):
        wanted, middles = _apart(wanted, block_bytes)
        for start, view in middles:
            for at in range(0, len(view), max_bytes):
                part = view[at : at + max_bytes]
                low = start + at
                spans.append(
                    ReadSpan(start=low, stop=low + len(part), targets=((0, part),), fits=True)
                )
    joined = coalesce(
        [(start, len(view)) for start, view in wanted],
        max_gap=max_gap,
        max_bytes=max_bytes,
        split=True,
    )
    for span in joined:
        targets = tuple(_target(span.start, span.stop, *wanted[index]) for index in span.members)
        spans.append(ReadSpan(start=span.start, stop=span.stop, targets=targets))
    return spans


_Piece = tuple[int, memoryview]


def _apart(wanted: Sequence[_Piece], block_bytes: int) -> tuple[list[_Piece], list[_Piece]]:
    """What fits into whole blocks of its memory, as the second, and the rest."""
    rest: list[_Piece] = []
    middles: list[_Piece] = []
    for start, view in wanted:
        head, stop = -start % block_bytes, (start + len(view)) // block_bytes * block_bytes
        if len(view) < _LONG_BYTES or (_address(view) + head) % block_bytes:
            rest.append((start, view))
            continue
        middles.append((start + head, view[head : stop - start]))
        rest += [(start, view[:head]), (stop, view[stop - start :])]
    return rest, middles


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0])


def _target(start: int, stop: int, first: int, view: memoryview) -> tuple[int, memoryview]:
    low, high = max(start, first), min(stop, first + len(view))
    return low - start, view[low - first : high - first]
