"""What a request for bytes must be. Knows sizes and memory, not where the bytes are."""

from collections.abc import Sequence

from holdfast.contracts import SMALL_OBJECT_BYTES, Data, ReadRange
from holdfast.errors import StorageError


def check_ranges(ranges: Sequence[ReadRange], size_bytes: int, key: str) -> None:
    """``StorageError`` unless every range lies inside the object, ``ValueError`` unless it can be
    filled."""
    for wanted in ranges:
        if wanted.into.readonly:
            raise ValueError("a range to read into must be memory that can be written")
        if not wanted.into.c_contiguous:
            raise ValueError("a range to read into must be contiguous memory")
        end = wanted.start + wanted.into.nbytes
        if wanted.start < 0 or end > size_bytes:
            raise StorageError(
                f"bytes {wanted.start} to {end} are not inside the object of {size_bytes}",
                path=key,
            )


def small(data: Data, key: str) -> memoryview:
    """``data`` as bytes, or ``StorageError`` if they are too many for one request."""
    view = memoryview(data)
    if view.nbytes > SMALL_OBJECT_BYTES:
        raise StorageError(
            f"{view.nbytes} bytes are more than the {SMALL_OBJECT_BYTES} that one request "
            "stores; use open_writer",
            path=key,
        )
    return view.cast("B") if view.nbytes else memoryview(b"")
