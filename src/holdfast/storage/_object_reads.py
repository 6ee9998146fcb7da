"""Reads ranges of a remote object side by side. Knows requests and threads, not stores."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.contracts import ReadRange

GAP_BYTES: Final = 1024 * 1024
"""Bytes that are cheaper to read and drop than to ask for twice."""

REQUEST_BYTES: Final = 8 * 1024 * 1024
"""The most one request asks for."""

THREADS: Final = 4
"""How many requests are under way at a time, each holding its bytes twice until they are copied:
obstore collects a body in pieces and then joins them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Bytes ``start`` to ``stop``, and where in the caller's memory parts of them go."""

    start: int
    stop: int
    pieces: tuple[tuple[int, memoryview], ...]


def planned(ranges: Sequence[ReadRange]) -> list[Request]:
    """The requests that fill ``ranges``: near ones joined, large ones cut, empty ones left out."""
    pieces = sorted(
        (
            (wanted.start + at, view[at : at + REQUEST_BYTES])
            for wanted in ranges
            if wanted.into.nbytes
            for view in [wanted.into.cast("B")]
            for at in range(0, len(view), REQUEST_BYTES)
        ),
        key=lambda piece: piece[0],
    )
    requests: list[Request] = []
    group: list[tuple[int, memoryview]] = []
    start = stop = 0
    for at, view in pieces:
        end = max(stop, at + len(view))
        if group and (at - stop > GAP_BYTES or end - start > REQUEST_BYTES):
            requests.append(Request(start=start, stop=stop, pieces=tuple(group)))
            group = []
        if not group:
            start, end = at, at + len(view)
        stop = end
        group.append((at, view))
    if group:
        requests.append(Request(start=start, stop=stop, pieces=tuple(group)))
    return requests


def fetch_all(requests: Sequence[Request], fetch: Callable[[int, int], memoryview]) -> None:
    """Fill every request with what ``fetch(start, stop)`` returns. The first error stops the
    rest, and is raised once none is under way."""
    waiting = deque(requests)
    errors: list[BaseException] = []

    def work() -> None:
        while waiting and not errors:
            try:
                request = waiting.popleft()
            except IndexError:  # another thread took the last one
                return
            try:
                body = fetch(request.start, request.stop)
                for at, view in request.pieces:
                    view[:] = body[at - request.start : at - request.start + len(view)]
            except BaseException as error:  # noqa: BLE001 -- raised in the calling thread
                errors.append(error)

    helpers = [
        threading.Thread(target=work, name="holdfast-read")
        for _ in range(min(THREADS, len(requests)) - 1)
    ]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]
