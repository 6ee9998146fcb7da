"""How an operation is called, plain or async, and which mistakes in doing so are refused."""

import concurrent.futures
import functools
import inspect
import traceback
from collections.abc import Awaitable, Callable
from types import CoroutineType
from typing import TypeVar

T = TypeVar("T")


class MisuseError(TypeError):
    """The caller's mistake, not the operation's failure: never retried, counted or replaced."""


def require_callable(operation: object, name: str = "operation") -> None:
    if not callable(operation):
        raise MisuseError(f"{name} must be a callable without arguments, not {operation!r}")


def call(operation: Callable[[], T]) -> T:
    """The operation's result. A coroutine is closed unstarted and refused."""
    result = operation()
    if isinstance(result, CoroutineType):
        result.close()
        raise MisuseError(f"{name_of(operation)} is async: give it to the method ending in _async")
    return result


async def call_async(operation: Callable[[], Awaitable[T]]) -> T:
    """What the operation's awaitable gives. A plain function is refused, after it has run:
    until then nobody can know that it returns nothing to await."""
    pending = operation()
    if not inspect.isawaitable(pending):
        raise MisuseError(
            f"{name_of(operation)} returned {type(pending).__name__}, nothing to await: "
            "give it to the method without _async"
        )
    return await pending


def name_of(operation: object) -> str:
    """What to call the operation in messages."""
    while isinstance(operation, functools.partial):
        operation = operation.func
    return getattr(operation, "__qualname__", None) or type(operation).__qualname__


def in_words(error: BaseException) -> str:
    """The error as one line. Never fails, also if the error's own methods do."""
    return " ".join("".join(traceback.format_exception_only(error)).split())


def is_cancellation(error: BaseException) -> bool:
    """Whether somebody stopped the work, as against the work failing."""
    return not isinstance(error, Exception) or isinstance(error, concurrent.futures.CancelledError)
