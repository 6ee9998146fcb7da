"""Reads ranges of a remote object side by side, all of one version. Knows requests, not stores."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast._lanes import run_all
from holdfast.contracts import ReadRange
from holdfast.errors import TransientStorageError
from holdfast.storage._ranges import ReadSpan, read_spans

GAP_BYTES: Final = 1024 * 1024
"""Bytes that are cheaper to read and drop than to ask for twice."""

REQUEST_BYTES: Final = 8 * 1024 * 1024
"""The most one request asks for."""

THREADS: Final = 4
"""How many requests are under way at a time, each holding its bytes twice until they are copied:
obstore collects a body in pieces and then joins them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """The bytes one request brought, and the version of the object that they are of."""

    body: memoryview
    version: str


class PastTheEndError(Exception):
    """Bytes were asked for that were not there: of the object, or of one that replaced it
    meanwhile. ``versions`` are those that answered."""

    versions: frozenset[str] = frozenset()


def fetch_all(ranges: Sequence[ReadRange], fetch: Callable[[int, int], Fetched], key: str) -> None:
    """Fill every range from what ``fetch(start, stop)`` returns, or raises ``PastTheEndError``.
    The first error stops the rest, and is raised once none is under way.

    Every answer says of which version it is. Of two versions it is a ``TransientStorageError``:
    asking for one version from the start would make all requests wait for the first.
    """
    versions: set[str] = set()

    def fill(span: ReadSpan) -> None:
        fetched = fetch(span.start, span.stop)
        versions.add(fetched.version)
        if len(versions) > 1:
            raise replaced(key)
        if len(fetched.body) != span.stop - span.start:
            raise PastTheEndError
        for at, view in span.targets:
            view[:] = fetched.body[at : at + len(view)]

    spans = read_spans(ranges, max_gap=GAP_BYTES, max_bytes=REQUEST_BYTES)
    try:
        run_all(spans, fill, lanes=THREADS)
    except PastTheEndError as error:
        error.versions = frozenset(versions)
        raise


def replaced(key: str) -> TransientStorageError:
    return TransientStorageError(
        "the object was replaced while it was being read; read it again", path=key
    )
