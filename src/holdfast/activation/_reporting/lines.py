"""Timelines made fit to draw: fewer points, two steps side by side. Knows levels, no picture."""

import bisect
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from holdfast.activation._reporting.report import Mark, Timeline


def thinned(timeline: Timeline, points: int) -> Timeline:
    """About ``points`` of the levels, with every peak a picture of that many could show.

    Kept are the highest and the lowest level of every stretch, and of each mark its ends and its
    highest, so that what is read off a mark stays exact. With many marks that is more than
    ``points``.
    """
    levels = timeline.bytes_
    if len(levels) <= points:
        return timeline
    pinned = set(_pinned(timeline))
    stretches = max((points - len(pinned)) // 2, points // 8, 1)
    edges = [len(levels) * at // stretches for at in range(stretches + 1)]
    kept = sorted(
        pinned.union(*(_extremes(levels, *ends) for ends in itertools.pairwise(edges))),
    )
    return Timeline(
        bytes_=tuple(levels[at] for at in kept),
        marks=tuple(
            Mark(
                kind=mark.kind,
                stage=mark.stage,
                start=bisect.bisect_left(kept, mark.start),
                end=bisect.bisect_left(kept, mark.end),
            )
            for mark in timeline.marks
        ),
        peak_bytes=timeline.peak_bytes,
    )


def highest(timeline: Timeline, mark: Mark) -> int:
    """The most that is alive while a stage runs."""
    # A stage of less than one point, once thinned, has that point.
    return max(timeline.bytes_[mark.start : max(mark.end, mark.start + 1)], default=0)


def named(timeline: Timeline) -> Iterator[tuple[tuple[str, int, int], Mark]]:
    """The marks as they begin, each with what it is called in any step: a stage may run twice."""
    seen: Counter[tuple[str, int]] = Counter()
    for mark in sorted(timeline.marks, key=lambda mark: mark.start):
        seen[mark.kind, mark.stage] += 1
        yield (mark.kind, mark.stage, seen[mark.kind, mark.stage]), mark


def places(timeline: Timeline, beside: Timeline | None = None) -> list[float]:
    """Where each level is drawn, from 0 to 1.

    ``beside``, the step is stretched so that its stages stand where they do there: a step that
    remakes what it dropped makes more calls, and would drift away from the one it is compared with.
    """
    indices = range(len(timeline.bytes_))
    there = len((timeline if beside is None else beside).bytes_)
    anchors = [(0, 0)]
    if beside is not None:
        anchors += _rising(_shared(timeline, beside), (len(indices) - 1, there - 1))
    anchors.append((max(len(indices) - 1, 1), max(there - 1, 1)))
    own, other = zip(*anchors, strict=True)
    return [float(at) for at in np.interp(indices, own, np.array(other) / max(there - 1, 1))]


def span(mark: Mark, at: Sequence[float]) -> tuple[float, float]:
    """Where a mark begins and ends, given the places of the levels."""
    last = len(at) - 1
    return at[min(mark.start, last)], at[min(mark.end, last)]


def _pinned(timeline: Timeline) -> Iterator[int]:
    levels = timeline.bytes_
    for mark in timeline.marks:
        yield from (at for at in (mark.start, mark.end) if at < len(levels))
        if mark.start < mark.end:
            yield max(range(mark.start, min(mark.end, len(levels))), key=levels.__getitem__)


def _extremes(levels: Sequence[int], start: int, end: int) -> tuple[int, ...]:
    if start == end:
        return ()
    stretch = range(start, end)
    return min(stretch, key=levels.__getitem__), max(stretch, key=levels.__getitem__)


def _shared(timeline: Timeline, beside: Timeline) -> Iterator[tuple[int, int]]:
    there = dict(named(beside))
    for name, mark in named(timeline):
        if name in there:
            yield mark.start, there[name].start
            yield mark.end, there[name].end


def _rising(pairs: Iterable[tuple[int, int]], limit: tuple[int, int]) -> list[tuple[int, int]]:
    kept: list[tuple[int, int]] = []
    own, other = 0, 0
    for pair in sorted(pairs):
        if own < pair[0] < limit[0] and other < pair[1] < limit[1]:
            kept.append(pair)
            own, other = pair
    return kept
