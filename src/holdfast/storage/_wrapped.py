"""Puts one function around every call of a storage. Knows the contract, not what the function does.

The wrappers of this room differ in that function and in the few methods they treat otherwise.
"""

import builtins
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeVar

from holdfast import _checks
from holdfast.contracts import Data, ObjectInfo, ObjectWriter, ReadRange, Storage

T = TypeVar("T")

LISTED_AT_ONCE = 1000
"""How many entries of a listing are asked for in one call."""


class Through(Protocol):
    """What a call goes through. ``method`` is its name, ``key`` its key or prefix if it has one."""

    def __call__(self, method: str, key: str | None, call: Callable[[], T], /) -> T: ...


class WrappedStorage:
    """``contracts.Storage`` around another. A wrapper defines ``_through``, and overrides what it
    does in another way."""

    def __init__(self, storage: Storage) -> None:
        self._inner = _checks.storage("storage", storage)

    def __repr__(self) -> str:
        return f"<{type(self).__name__.lstrip('_')} around {self._inner!r}>"

    @property
    def url(self) -> str:
        return self._inner.url

    def open_writer(self, key: str, *, size_bytes: int | None = None) -> ObjectWriter:
        call = functools.partial(self._inner.open_writer, key, size_bytes=size_bytes)
        return WrappedWriter(self._through("open_writer", key, call), key, self._through)

    def create(self, key: str, data: Data) -> ObjectInfo:
        return self._through("create", key, functools.partial(self._inner.create, key, data))

    def replace(self, key: str, data: Data, expected: str) -> ObjectInfo:
        call = functools.partial(self._inner.replace, key, data, expected)
        return self._through("replace", key, call)

    def read(self, key: str) -> bytes:
        return self._through("read", key, functools.partial(self._inner.read, key))

    def read_into(self, key: str, ranges: Sequence[ReadRange]) -> None:
        self._through("read_into", key, functools.partial(self._inner.read_into, key, ranges))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        listing = _Listing(self._inner, prefix)
        while batch := self._through("list", prefix, listing.advance):
            yield from batch

    def stat(self, key: str) -> ObjectInfo:
        return self._through("stat", key, functools.partial(self._inner.stat, key))

    def delete(self, key: str, *, expected: str | None = None) -> None:
        call = functools.partial(self._inner.delete, key, expected=expected)
        self._through("delete", key, call)

    def free_bytes(self) -> int | None:
        return self._through("free_bytes", None, self._inner.free_bytes)

    def sweep(self, older_than_s: float) -> int:
        return self._through("sweep", None, functools.partial(self._inner.sweep, older_than_s))

    def _through(self, _method: str, _key: str | None, call: Callable[[], T], /) -> T:
        return call()


class WrappedWriter:
    """``contracts.ObjectWriter`` around another, whose calls go through ``through``.

    A ``finish`` that ``through`` fails or refuses aborts, as the contract wants.
    """

    def __init__(self, writer: ObjectWriter, key: str, through: Through) -> None:
        self._writer = writer
        self._key = key
        self._through = through

    def write_at(self, offset: int, data: Data) -> None:
        call = functools.partial(self._writer.write_at, offset, data)
        self._through("write_at", self._key, call)

    def finish(self) -> ObjectInfo:
        try:
            return self._through("finish", self._key, self._writer.finish)
        except BaseException:
            self._writer.abort()
            raise

    def abort(self) -> None:
        self._through("abort", self._key, self._writer.abort)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()


class _Listing:
    """A listing in batches. One that failed starts again after the last entry it gave: keys are
    ordered, so nothing is given twice or left out."""

    def __init__(self, storage: Storage, prefix: str) -> None:
        self._storage = storage
        self._prefix = prefix
        self._entries: Iterator[ObjectInfo] | None = None
        self._last: str | None = None

    def advance(self) -> builtins.list[ObjectInfo]:
        """The next entries; none if that is all."""
        if self._entries is None:
            self._entries = filter(self._is_new, self._storage.list(self._prefix))
        try:
            batch = list(itertools.islice(self._entries, LISTED_AT_ONCE))
        except BaseException:
            self._entries = None
            raise
        if batch:
            self._last = batch[-1].key
        return batch

    def _is_new(self, info: ObjectInfo) -> bool:
        return self._last is None or info.key > self._last
