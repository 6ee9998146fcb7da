"""Removing a checkpoint's objects in the order that never leaves a broken checkpoint.

Knows that a checkpoint is its commit record (``contracts.COMMIT_RECORD``) and finds the rest by
listing, so it needs neither the number of ranks nor a readable record.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from holdfast import _checks
from holdfast.contracts import COMMIT_RECORD, Storage
from holdfast.errors import StorageError
from holdfast.resilience._operation import is_cancellation

T = TypeVar("T")

_log = logging.getLogger("holdfast.resilience")

_NAMED_AT_MOST = 20


class Retry(Protocol):
    """``FaultToleranceHandler.execute_with_retry``."""

    def __call__(self, operation: Callable[[], T], /) -> T: ...


def roll_back(storage: Storage, checkpoint: str, *, retry: Retry) -> None:
    """See ``FaultToleranceHandler.rollback``."""
    prefix = prefix_of(checkpoint)
    record = f"{prefix}/{COMMIT_RECORD}"
    with _storage_errors(
        f"could not roll back {prefix}: what it holds could not be listed; nothing was touched",
        path=prefix,
    ):
        keys = retry(lambda: [info.key for info in storage.list(f"{prefix}/")])
    inner = [key for key in keys if key.endswith(f"/{COMMIT_RECORD}") and key != record]
    if inner:
        raise StorageError(
            f"{prefix} has other checkpoints in it, {inner[0].removesuffix(f'/{COMMIT_RECORD}')} "
            "for one; nothing was touched, roll back each by its own name",
            path=prefix,
        )
    with _storage_errors(
        f"could not roll back {prefix}: its commit record could not be deleted, "
        "so nothing else was touched",
        path=record,
    ):
        retry(functools.partial(storage.delete, record))
    _delete_all(storage, [*keys, prefix], prefix, retry=retry)
    _log.info("rolled back %s in %s: %d objects", prefix, storage.url, len(keys))


def prefix_of(checkpoint: str) -> str:
    """The prefix of a checkpoint that is named by it or by its commit record."""
    prefix = _checks.key("checkpoint", checkpoint).removesuffix(f"/{COMMIT_RECORD}")
    if prefix == COMMIT_RECORD:
        raise ValueError(f"checkpoint must name a prefix inside the storage, not {checkpoint!r}")
    return prefix


@contextlib.contextmanager
def _storage_errors(message: str, *, path: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if is_cancellation(error):
            raise
        raise StorageError(message, path=path) from error


def _delete_all(storage: Storage, keys: list[str], prefix: str, *, retry: Retry) -> None:
    errors: list[Exception] = []
    left: list[str] = []
    for key in keys:
        try:
            retry(functools.partial(storage.delete, key))
        except Exception as error:
            if is_cancellation(error):
                raise
            errors.append(error)
            left.append(key)
    if errors:
        named = ", ".join(left[:_NAMED_AT_MOST])
        more = f" and {len(left) - _NAMED_AT_MOST} more" if len(left) > _NAMED_AT_MOST else ""
        raise StorageError(
            f"rolled back {prefix} only in part: its commit record is gone, "
            f"but these could not be deleted: {named}{more}; roll back again",
            path=prefix,
        ) from ExceptionGroup(f"deleting {prefix}", errors)
