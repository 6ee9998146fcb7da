"""Pieces of bytes that are kept until they are asked for: the first few in memory, the rest in a
temporary file. Knows their order and sizes, not what they are."""

import errno
import tempfile
from types import TracebackType
from typing import IO, Final, Self

from holdfast.contracts import Data
from holdfast.errors import NoSpaceError, StorageError

MEMORY_BYTES: Final = 64 * 1024 * 1024
"""How much is kept in memory. What is more goes to a file."""


class Spool:
    """Used by one thread. A context manager: leaving it drops everything.

    The file has no name, is in the folder that ``tempfile`` chooses (``TMPDIR``), and is gone
    when the process is. If that folder is full this is a ``NoSpaceError``.
    """

    def __init__(self, *, memory_bytes: int = MEMORY_BYTES) -> None:
        self._room = memory_bytes
        self._held: dict[int, Data] = {}
        self._file: IO[bytes] | None = None
        self._file_bytes = 0
        self._places: dict[int, tuple[int, int]] = {}
        self._count = 0

    def add(self, piece: Data) -> int:
        """Keep a piece. Returns its number, counted from 0. One that is kept in memory is the
        very object that was given, and is not to change."""
        number = self._count
        self._count += 1
        if self._file is None and len(piece) <= self._room:
            self._room -= len(piece)
            self._held[number] = piece
            return number
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115 -- closed on leaving
            self._file.seek(self._file_bytes)
            self._file.write(piece)
        except OSError as error:
            raise _translated(error) from error
        self._places[number] = self._file_bytes, len(piece)
        self._file_bytes += len(piece)
        return number

    def take(self, number: int) -> Data:
        """Give a piece away: it cannot be asked for again."""
        held = self._held.pop(number, None)
        if held is not None:
            return held
        offset, size = self._places.pop(number)
        if self._file is None:
            raise RuntimeError("the spool is closed")
        try:
            self._file.seek(offset)
            piece = self._file.read(size)
        except OSError as error:
            raise _translated(error) from error
        if len(piece) != size:
            raise StorageError("a temporary file was cut short", path=tempfile.gettempdir())
        return piece

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._held.clear()
        self._places.clear()
        if self._file is not None:
            self._file.close()
            self._file = None


def _translated(error: OSError) -> StorageError:
    kind = NoSpaceError if error.errno in {errno.ENOSPC, errno.EDQUOT} else StorageError
    return kind(
        f"compressed data that does not fit in memory could not be kept in a temporary file: "
        f"{error}; set TMPDIR to a folder with room",
        path=tempfile.gettempdir(),
    )
