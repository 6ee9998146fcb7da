"""Tries failed calls of a storage again. Knows which calls are safe to repeat, not what they do."""

import functools
import random
from collections.abc import Callable
from typing import TypeVar

from holdfast.contracts import Clock, Data, ObjectInfo, ObjectWriter, Storage
from holdfast.errors import ObjectChangedError, ObjectExistsError, ObjectNotFoundError, StorageError
from holdfast.resilience import FaultToleranceHandler, RetryBudget, RetryPolicy
from holdfast.storage._wrapped import WrappedStorage

T = TypeVar("T")


def retrying(
    storage: Storage,
    policy: RetryPolicy | None = None,
    *,
    budget: RetryBudget | None = None,
    clock: Clock | None = None,
    rng: random.Random | None = None,
) -> Storage:
    """``storage``, whose calls are tried again after errors that may pass, as ``policy`` says.

    A ``create`` or ``replace`` that failed may have worked all the same. If its next attempt is
    refused (``ObjectExistsError``, ``ObjectChangedError``), the object is read back: if it holds
    exactly these bytes, the call has succeeded, otherwise the refusal is raised. So two callers
    that store the same bytes may both succeed: where that matters, store something of the
    caller's along with them. And a refused call may have taken effect, if the object was
    replaced or deleted right after: nobody can tell.

    A ``delete`` that is tried again and finds nothing has succeeded; one of an ``expected`` version
    that finds another raises ``ObjectChangedError``, whoever removed the one that was expected.

    A listing goes on after the last entry it gave. ``sweep`` returns what its last attempt
    removed. A writer's bytes are gone once written, so ``write_at`` and ``finish`` are not
    tried again: whoever has the bytes opens another writer.

    Delays are slept in the calling thread, on ``clock``; ``rng`` draws their jitter. Calls of
    wrappers that were given the same ``budget`` draw on it together.
    """
    handler = FaultToleranceHandler(retry_policy=policy, retry_budget=budget, clock=clock, rng=rng)
    return _RetryingStorage(storage, handler)


class _RetryingStorage(WrappedStorage):
    def __init__(self, storage: Storage, handler: FaultToleranceHandler) -> None:
        super().__init__(storage)
        self._handler = handler

    def open_writer(self, key: str, *, size_bytes: int | None = None) -> ObjectWriter:
        call = functools.partial(self._inner.open_writer, key, size_bytes=size_bytes)
        return self._through("open_writer", key, call)

    def create(self, key: str, data: Data) -> ObjectInfo:
        call = functools.partial(self._inner.create, key, data)
        return self._through("create", key, _Put(self._inner, key, data, call, ObjectExistsError))

    def replace(self, key: str, data: Data, expected: str) -> ObjectInfo:
        call = functools.partial(self._inner.replace, key, data, expected)
        return self._through("replace", key, _Put(self._inner, key, data, call, ObjectChangedError))

    def _through(self, _method: str, _key: str | None, call: Callable[[], T], /) -> T:
        return self._handler.execute_with_retry(call)


class _Put:
    """A ``create`` or ``replace`` that may be called again though an earlier call may have taken
    effect. ``refusal`` is what the storage then answers."""

    def __init__(
        self,
        storage: Storage,
        key: str,
        data: Data,
        put: Callable[[], ObjectInfo],
        refusal: type[StorageError],
    ) -> None:
        self._storage = storage
        self._key = key
        self._data = data
        self._put = put
        self._refusal = refusal
        self._in_doubt = False

    def __call__(self) -> ObjectInfo:
        try:
            return self._put()
        except self._refusal:
            ours = self._read_back() if self._in_doubt else None
            if ours is None:
                raise
            return ours
        except Exception:
            self._in_doubt = True
            raise

    def _read_back(self) -> ObjectInfo | None:
        """The object, if it holds our bytes. Its version must be the one of these bytes: the
        caller may replace it next."""
        try:
            before = self._storage.stat(self._key)
            stored = self._storage.read(self._key)
            after = self._storage.stat(self._key)
        except ObjectNotFoundError:
            return None
        if before.version != after.version or stored != memoryview(self._data).tobytes():
            return None
        return after
