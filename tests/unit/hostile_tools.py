"""What the tests of hostile files share: how a file is refused, and how much memory that takes."""

import tracemalloc
from collections.abc import Callable

import pytest

from holdfast.errors import CorruptedError


def peak_of(call: Callable[[], object]) -> int:
    """The most bytes that Python held at once during the call, beyond those before it."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def assert_refused(call: Callable[[], object], words: str, *, path: str, most_bytes: int) -> None:
    """The call raises ``CorruptedError`` with these words, for that path, in so little memory."""
    errors: list[CorruptedError] = []

    def refused() -> None:
        with pytest.raises(CorruptedError) as raised:
            call()
        errors.append(raised.value)

    peak = peak_of(refused)
    assert words in errors[0].message
    assert errors[0].path == path
    assert len(errors[0].message) < 1500
    assert peak < most_bytes
