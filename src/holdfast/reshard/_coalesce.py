"""Knows how byte ranges become few reads. Knows no files, and reads nothing."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Bytes ``start`` to ``stop`` to be read at once; ``members`` are the ranges it serves."""

    start: int
    stop: int
    members: tuple[int, ...]


def coalesce(
    ranges: Iterable[tuple[int, int]], *, max_gap: int, max_bytes: int, split: bool = False
) -> list[Span]:
    """Ranges ``(offset, nbytes)`` as spans, ascending by start; gaps to ``max_gap`` are read over.

    A span is no longer than ``max_bytes``, unless a range alone is: that one stays whole, or with
    ``split`` becomes several spans. Members are numbers of ranges in the order given; without
    ``split`` every range is in one span. Ranges of no bytes are in none.
    """
    if max_gap < 0 or max_bytes < 1:
        raise ValueError(f"max_gap={max_gap} and max_bytes={max_bytes} must be >= 0 and >= 1")
    wanted = []
    for index, (offset, nbytes) in enumerate(ranges):
        stop = offset + nbytes
        step = max_bytes if split else max(nbytes, 1)
        wanted += [(low, min(low + step, stop), index) for low in range(offset, stop, step)]
    wanted.sort()
    spans: list[Span] = []
    start = stop = 0
    members: list[int] = []
    for low, high, index in wanted:
        if members and (low - stop > max_gap or max(stop, high) - start > max_bytes):
            spans.append(Span(start=start, stop=stop, members=tuple(members)))
            members = []
        if members:
            stop = max(stop, high)
        else:
            start, stop = low, high
        members.append(index)
    if members:
        spans.append(Span(start=start, stop=stop, members=tuple(members)))
    return spans


def chunk_spans(
    nbytes: int, chunk_bytes: int, ranges: Iterable[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Which chunks of a leaf of ``nbytes`` the ranges ``(offset, nbytes)`` touch.

    As runs of chunks ``(first, last)``, the last not included: ascending, apart from each other.
    """
    if nbytes < 0 or chunk_bytes < 1:
        raise ValueError(f"nbytes={nbytes} and chunk_bytes={chunk_bytes} must be >= 0 and >= 1")
    touched = []
    for offset, length in ranges:
        if offset < 0 or length < 0 or offset + length > nbytes:
            raise ValueError(f"the range ({offset}, {length}) is not within {nbytes} bytes")
        if length:
            touched.append((offset // chunk_bytes, (offset + length - 1) // chunk_bytes + 1))
    touched.sort()
    runs: list[tuple[int, int]] = []
    for first, last in touched:
        if runs and first <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(runs[-1][1], last))
        else:
            runs.append((first, last))
    return runs
