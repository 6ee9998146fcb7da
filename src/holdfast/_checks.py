"""Refuses impossible arguments. Knows their names and values, not what they are for.

Each check returns the value in the form it will be used in, or raises ``ValueError`` naming
the argument and what was given.
"""

import concurrent.futures
import contextlib
import math
import threading
from typing import TypeVar

T = TypeVar("T")


def seconds(name: str, value: object, *, zero: bool = False) -> float:
    """``value`` as a float, or ``ValueError``: finite, positive (or zero if ``zero``), and no
    more than the platform can wait for."""
    least = "0 or more" if zero else "more than 0"
    wanted = f"a number of seconds, {least} and at most {threading.TIMEOUT_MAX:g}"
    given = _number(name, value, wanted)
    if given < 0 or (given == 0 and not zero) or given > threading.TIMEOUT_MAX:
        raise ValueError(f"{name} must be {wanted}, not {value!r}")
    return given


def between(name: str, value: object, least: float, most: float = math.inf) -> float:
    """``value`` as a float, or ``ValueError`` unless it is finite and in range."""
    wanted = f"at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
    given = _number(name, value, f"a number, {wanted}")
    if not least <= given <= most:
        raise ValueError(f"{name} must be a number, {wanted}, not {value!r}")
    return given


def count(name: str, value: object, *, least: int) -> int:
    """``value``, or ``ValueError`` unless it is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number, at least {least}, not {value!r}")
    return value


def rank(name: str, value: object, world_size: int) -> int:
    """``value``, or ``ValueError`` unless it is a rank of a job of that size."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < world_size:
        raise ValueError(f"{name} must be one of the ranks 0 to {world_size - 1}, not {value!r}")
    return value


def text(name: str, value: object, *, most: int) -> str:
    """``value``, or ``ValueError`` unless it is a string of 1 to ``most`` characters that can be
    encoded."""
    if isinstance(value, str) and 0 < len(value) <= most:
        with contextlib.suppress(UnicodeEncodeError):
            value.encode()
            return value
    given = f"{len(value)} characters" if isinstance(value, str) and len(value) > most else value
    raise ValueError(f"{name} must be a text of 1 to {most} characters, not {given!r}")


def instance(name: str, value: object, kind: type[T]) -> T:
    """``value``, or ``ValueError`` unless it is a ``kind``."""
    if not isinstance(value, kind):
        raise ValueError(  # noqa: TRY004 -- as every refusal here
            f"{name} must be a {kind.__name__}, not {value!r}"
        )
    return value


def having(name: str, value: T, kind: str, *methods: str) -> T:
    """``value``, or ``ValueError`` unless it has the methods that make it a ``kind``."""
    if not all(callable(getattr(value, method, None)) for method in methods):
        raise ValueError(f"{name} must be a {kind}, with {', '.join(methods)}(), not {value!r}")
    return value


def data(name: str, value: object) -> bytes | bytearray | memoryview:
    """``value``, or ``TypeError`` unless it is bytes of some kind."""
    if not isinstance(value, bytes | bytearray | memoryview):
        raise TypeError(f"{name} must be bytes, not {type(value).__name__}")
    return value


def clock(name: str, value: T) -> T:
    return having(name, value, "Clock", "now", "sleep", "sleep_async")


def storage(name: str, value: T) -> T:
    return having(name, value, "Storage", "open_writer", "list", "delete")


def key(name: str, value: object) -> str:
    """``value``, or ``ValueError`` unless it can be a key of a storage: relative, ``/`` between
    its parts, and no part empty, ``.`` or ``..`` or holding a NUL."""
    if (
        not isinstance(value, str)
        or "\0" in value
        or any(part in {"", ".", ".."} for part in value.split("/"))
    ):
        raise ValueError(
            f"{name} must be a relative name such as 'step_100', without empty parts, "
            f"'.' or '..', not {value!r}"
        )
    return value


def exception_classes(name: str, value: object) -> tuple[type[Exception], ...]:
    """``value`` as a tuple, or ``ValueError`` unless all of it are classes of errors.

    Classes that only stop a program or a task (``KeyboardInterrupt``, ``CancelledError``) are
    not errors.
    """
    if isinstance(value, tuple | list) and all(map(_is_error_class, value)):
        return tuple(value)
    raise ValueError(f"{name} must be a tuple of subclasses of Exception, not {value!r}")


def _number(name: str, value: object, wanted: str) -> float:
    given = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            given = float(value)
    if not math.isfinite(given):
        raise ValueError(f"{name} must be {wanted}, not {value!r}")
    return given


def _is_error_class(item: object) -> bool:
    return (
        isinstance(item, type)
        and issubclass(item, Exception)
        and not issubclass(item, concurrent.futures.CancelledError)
    )
