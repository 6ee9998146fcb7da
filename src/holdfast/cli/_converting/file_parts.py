"""Tensors that lie in files as plain bytes, read a piece at a time. Knows offsets and strides, not
what wrote them.

A file is read where it stands and never mapped as a whole, so that memory stays bounded, and a
file that is cut short meanwhile is an error and not a signal.
"""

import io
import math
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.cli._converting.contents import PIECE_BYTES, Tensor
from holdfast.errors import CorruptedError
from holdfast.format import dtype_of
from holdfast.reshard import Box, check_coverage, split_box

_Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePart:
    """A box of a tensor: its first element is at ``offset`` of a file, its neighbours along each
    dimension ``strides`` bytes further."""

    box: Box
    path: Path
    offset: int
    strides: tuple[int, ...]

    def end(self, itemsize: int) -> int:
        """The byte after its last."""
        if self.box.is_empty:
            return self.offset
        steps = zip(self.box.shape, self.strides, strict=True)
        return self.offset + sum((size - 1) * stride for size, stride in steps) + itemsize


def row_major(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """The strides, in bytes, of a contiguous array."""
    return tuple(itemsize * math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def tensor_in_files(name: str, dtype: str, shape: tuple[int, ...], parts: list[FilePart]) -> Tensor:
    """``CorruptedError`` unless the parts are all of it and lie within their files."""
    itemsize = dtype_of(dtype).itemsize
    where = str(parts[0].path) if parts else None
    whole = Box.whole(shape)
    if not whole.is_empty and (hole := check_coverage(shape, [part.box for part in parts])):
        raise CorruptedError(f"tensor {name!r} is not there exactly once: {hole}", path=where)
    for part in parts:
        size = part.path.stat().st_size
        if part.end(itemsize) > size:
            raise CorruptedError(
                f"tensor {name!r} ends at byte {part.end(itemsize)} of a file that has {size}; it "
                "is cut short",
                path=str(part.path),
            )

    def pieces() -> Iterator[memoryview]:
        if whole.is_empty:
            return
        if len(parts) == 1 and parts[0].strides == row_major(shape, itemsize):
            yield from file_pieces(parts[0].path, parts[0].offset, whole.size * itemsize)
            return
        for box in split_box(whole, PIECE_BYTES // itemsize):
            yield _gathered(box, parts, itemsize).reshape(-1).view(np.uint8).data

    return Tensor(dtype=dtype, shape=shape, pieces=pieces)


def file_in(folder: Path, name: object) -> Path | None:
    """The plain file of this name in a folder, and in no other. ``None`` if there is none, as there
    is none of a name that no file can have."""
    try:
        if not isinstance(name, str) or Path(name).name != name:
            return None
        path = folder / name
        return path if path.is_file() else None
    except (OSError, ValueError):
        return None


def file_view(path: Path, offset: int, nbytes: int) -> io.BufferedReader:
    """That many bytes of a file as a file of its own. To be closed."""
    return io.BufferedReader(_View(path, offset, nbytes))


class _View(io.RawIOBase):
    def __init__(self, path: Path, offset: int, nbytes: int) -> None:
        super().__init__()
        self._file = path.open("rb", buffering=0)
        self._offset = offset
        self._nbytes = nbytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, to: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._nbytes}[whence]
        if start + to < 0:
            raise ValueError(f"there is no byte {start + to}")
        self._at = start + to
        return self._at

    def readinto(self, into: Any) -> int:
        wanted = memoryview(into).cast("B")[: max(0, self._nbytes - self._at)]
        got = os.preadv(self._file.fileno(), [wanted], self._offset + self._at)
        self._at += got
        return got

    def close(self) -> None:
        self._file.close()
        super().close()


def file_pieces(path: Path, offset: int, nbytes: int) -> Iterator[memoryview]:
    """That many bytes of a file, some at a time."""
    with path.open("rb", buffering=0) as file:
        for start in range(offset, offset + nbytes, PIECE_BYTES):
            piece = memoryview(bytearray(min(PIECE_BYTES, offset + nbytes - start)))
            done = 0
            while done < len(piece):
                got = os.preadv(file.fileno(), [piece[done:]], start + done)
                if not got:
                    raise CorruptedError(
                        "the file became shorter while it was read", path=str(path)
                    )
                done += got
            yield piece


def _gathered(box: Box, parts: Sequence[FilePart], itemsize: int) -> _Array:
    """The elements of a box as an array of bytes that nobody interprets."""
    out = np.empty(box.shape, f"V{itemsize}")
    for part in parts:
        shared = box.intersect(part.box)
        if shared is not None:
            _copy(shared, part, out[_slices(shared, box)], itemsize)
    return out


def _copy(shared: Box, part: FilePart, into: _Array, itemsize: int) -> None:
    """Map just the bytes that the box lies in, for as long as they are copied, and if they are far
    apart, as those of a few columns are, some after the others."""
    inner = shared.relative_to(part.box)
    steps = zip(inner.start, part.strides, strict=True)
    first = part.offset + sum(start * stride for start, stride in steps)
    wanted = FilePart(box=shared, path=part.path, offset=first, strides=part.strides)
    if wanted.end(itemsize) - first > PIECE_BYTES and shared.size > 1:
        for half in _halves(shared, part.strides):
            _copy(half, part, into[_slices(half, shared)], itemsize)
        return
    base = first - first % mmap.ALLOCATIONGRANULARITY
    with (
        part.path.open("rb") as file,
        mmap.mmap(
            file.fileno(), wanted.end(itemsize) - base, access=mmap.ACCESS_READ, offset=base
        ) as memory,
    ):
        source = np.ndarray(shared.shape, into.dtype, memory, first - base, part.strides)
        into[...] = source
        del source  # a mapping that is still looked at cannot be closed


def _halves(box: Box, strides: Sequence[int]) -> Iterator[Box]:
    """A box cut across the dimension whose elements are furthest apart."""
    reach = [(size - 1) * stride for size, stride in zip(box.shape, strides, strict=True)]
    dim = reach.index(max(reach))
    middle = (box.start[dim] + box.stop[dim]) // 2
    yield Box(box.start, (*box.stop[:dim], middle, *box.stop[dim + 1 :]))
    yield Box((*box.start[:dim], middle, *box.start[dim + 1 :]), box.stop)


def _slices(box: Box, outer: Box) -> tuple[slice, ...]:
    inner = box.relative_to(outer)
    return tuple(map(slice, inner.start, inner.stop))
