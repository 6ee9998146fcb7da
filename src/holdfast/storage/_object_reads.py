"""Reads ranges of a remote object side by side. Knows requests and threads, not stores."""

from collections.abc import Callable, Sequence
from typing import Final

from holdfast._lanes import run_all
from holdfast.contracts import ReadRange
from holdfast.storage._ranges import ReadSpan, read_spans

GAP_BYTES: Final = 1024 * 1024
"""Bytes that are cheaper to read and drop than to ask for twice."""

REQUEST_BYTES: Final = 8 * 1024 * 1024
"""The most one request asks for."""

THREADS: Final = 4
"""How many requests are under way at a time, each holding its bytes twice until they are copied:
obstore collects a body in pieces and then joins them."""


def fetch_all(ranges: Sequence[ReadRange], fetch: Callable[[int, int], memoryview]) -> None:
    """Fill every range from what ``fetch(start, stop)`` returns. The first error stops the rest,
    and is raised once none is under way."""

    def fill(span: ReadSpan) -> None:
        body = fetch(span.start, span.stop)
        for at, view in span.targets:
            view[:] = body[at : at + len(view)]

    spans = read_spans(ranges, max_gap=GAP_BYTES, max_bytes=REQUEST_BYTES)
    run_all(spans, fill, lanes=max(1, min(THREADS, len(spans))))
