"""Waiting for one call no longer than agreed. Knows threads and tasks, not retries."""

import asyncio
import concurrent.futures
import contextvars
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

from holdfast.errors import OperationTimeoutError
from holdfast.resilience._operation import call, call_async, name_of

T = TypeVar("T")

_log = logging.getLogger("holdfast.resilience")


def run(operation: Callable[[], T], timeout_s: float) -> T:
    """The operation's result, from a daemon thread, or ``OperationTimeoutError``."""
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
    context = contextvars.copy_context()
    name = name_of(operation)
    threading.Thread(
        target=context.run, args=(_settle, outcome, operation), name=f"holdfast:{name}", daemon=True
    ).start()
    try:
        concurrent.futures.wait((outcome,), timeout_s)
    finally:
        # Also when Ctrl-C ends the wait: from here on nobody looks at the outcome.
        abandoned = outcome.cancel()
    if abandoned:
        raise OperationTimeoutError(
            f"{name} did not finish in {timeout_s:g} s; it goes on in the background "
            "and its result will be discarded",
            timeout_s=timeout_s,
        )
    try:
        return outcome.result()
    finally:
        del outcome  # it holds the error whose traceback holds this frame


async def run_async(operation: Callable[[], Awaitable[T]], timeout_s: float) -> T:
    """What the operation's awaitable gives, or it is cancelled: ``OperationTimeoutError``."""
    try:
        async with asyncio.timeout(timeout_s) as limit:
            return await call_async(operation)
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise OperationTimeoutError(
            f"{name_of(operation)} did not finish in {timeout_s:g} s and was cancelled",
            timeout_s=timeout_s,
        ) from error


def _settle(outcome: concurrent.futures.Future[T], operation: Callable[[], T]) -> None:
    """Fill ``outcome``, unless its reader has cancelled it and gone."""
    try:
        result = call(operation)
    except BaseException as error:  # noqa: BLE001 -- raised again in the thread that waits
        if outcome.set_running_or_notify_cancel():
            outcome.set_exception(error)
        else:
            _log.debug("%s failed after its timeout", name_of(operation), exc_info=error)
    else:
        if outcome.set_running_or_notify_cancel():
            outcome.set_result(result)
