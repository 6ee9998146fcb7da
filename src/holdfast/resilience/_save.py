"""Saving a checkpoint that is one object, so that a failure leaves no trace of the attempt."""

import asyncio
import concurrent.futures
import contextlib
import functools
import threading
from collections.abc import Awaitable, Callable, Iterator

from holdfast import _checks
from holdfast.contracts import Data, Storage
from holdfast.errors import CheckpointError, SaveError
from holdfast.resilience._handler import FaultToleranceHandler
from holdfast.resilience._operation import (
    MisuseError,
    in_words,
    is_cancellation,
    name_of,
    require_callable,
)


class CheckpointRollbackManager:
    """Publishes the bytes an operation makes, whole or not at all. Thread- and task-safe.

    Making the bytes and storing them are each retried by ``fault_handler``. Storing goes through
    ``Storage.open_writer``: readers see nothing until all is durable, then all of it at once,
    on every storage alike.
    """

    __slots__ = ("_handler", "_storage")

    def __init__(self, fault_handler: FaultToleranceHandler, storage: Storage) -> None:
        self._handler = _checks.instance("fault_handler", fault_handler, FaultToleranceHandler)
        self._storage = _checks.storage("storage", storage)

    def save_with_rollback(self, checkpoint_path: str, save_operation: Callable[[], Data]) -> str:
        """Store what ``save_operation`` returns under ``checkpoint_path``, which is returned.

        If it fails, nothing of the attempt is left and what was there before is untouched.
        Errors of holdfast are raised as they are, others as the cause of a ``SaveError``.
        Anything but bytes (also a ``bytearray`` or ``memoryview``) is a ``TypeError``.
        """
        _require(checkpoint_path, save_operation)
        with _save_errors(checkpoint_path):
            data = self._handler.execute_with_retry(save_operation)
            _require_bytes(data, save_operation)
            self._publish(checkpoint_path, data, threading.Event())
        return checkpoint_path

    async def save_with_rollback_async(
        self, checkpoint_path: str, save_operation: Callable[[], Awaitable[Data]]
    ) -> str:
        """As ``save_with_rollback``; the storage is written in a thread.

        Cancelling the task keeps the object from being published, unless that is what the
        storage was doing at this very moment.
        """
        _require(checkpoint_path, save_operation)
        with _save_errors(checkpoint_path):
            data = await self._handler.execute_with_retry_async(save_operation)
            _require_bytes(data, save_operation)
            abandoned = threading.Event()
            try:
                await asyncio.to_thread(self._publish, checkpoint_path, data, abandoned)
            finally:
                abandoned.set()
        return checkpoint_path

    def _publish(self, key: str, data: Data, abandoned: threading.Event) -> None:
        write = functools.partial(self._write, key, data, abandoned)
        self._handler.execute_with_retry(write)

    def _write(self, key: str, data: Data, abandoned: threading.Event) -> None:
        _refuse_if(abandoned)
        with self._storage.open_writer(key) as writer:
            writer.write_at(0, data)
            _refuse_if(abandoned)
            writer.finish()


def _refuse_if(abandoned: threading.Event) -> None:
    if abandoned.is_set():
        raise concurrent.futures.CancelledError


def _require(checkpoint_path: object, save_operation: object) -> None:
    _checks.key("checkpoint_path", checkpoint_path)
    require_callable(save_operation, "save_operation")


def _require_bytes(data: object, save_operation: object) -> None:
    if not isinstance(data, bytes | bytearray | memoryview):
        raise MisuseError(
            f"{name_of(save_operation)} must return bytes, not {type(data).__name__}; "
            "nothing was stored"
        )


@contextlib.contextmanager
def _save_errors(path: str) -> Iterator[None]:
    try:
        yield
    except (CheckpointError, MisuseError):
        raise
    except Exception as error:
        if is_cancellation(error):
            raise
        raise SaveError(
            f"could not save: {in_words(error)}; what was stored there before is untouched",
            path=path,
        ) from error
