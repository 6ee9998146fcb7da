"""What a request for bytes must be. Knows sizes and memory, not where the bytes are."""

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.contracts import SMALL_OBJECT_BYTES, Data, ReadRange
from holdfast.errors import StorageError
from holdfast.reshard import coalesce


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
    byte of the span on, into which memory."""

    start: int
    stop: int
    targets: tuple[tuple[int, memoryview], ...]


def read_spans(ranges: Sequence[ReadRange], *, max_gap: int, max_bytes: int) -> list[ReadSpan]:
    """The reads that fill ``ranges``: near ones joined, long ones cut, empty ones left out."""
    views = [wanted.into.cast("B") if wanted.into.nbytes else wanted.into for wanted in ranges]
    wanted = [(range_.start, range_.into.nbytes) for range_ in ranges]
    return [
        ReadSpan(
            start=span.start,
            stop=span.stop,
            targets=tuple(
                _target(span.start, span.stop, ranges[index].start, views[index])
                for index in span.members
            ),
        )
        for span in coalesce(wanted, max_gap=max_gap, max_bytes=max_bytes, split=True)
    ]


def _target(start: int, stop: int, first: int, view: memoryview) -> tuple[int, memoryview]:
    low, high = max(start, first), min(stop, first + len(view))
    return low - start, view[low - first : high - first]
