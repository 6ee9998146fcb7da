"""Turns one chunk into a smaller frame and back, without loss. Knows bytes and element types, not
which leaf or file they belong to.

A frame stands alone: with the codec's name and the chunk's raw size it can be decoded. Its layout
is in ``docs/format.md``; how the settings were chosen, in ``docs/design/0004-compression.md``.
A chunk that does not shrink has no frame and is stored as it is, so a stored chunk that is as
long as its raw size is raw, and a frame is always shorter.

Everything here is thread-safe, and decoding is safe for hostile frames: it allocates in
proportion to the raw size the caller knows, whatever the frame claims.
"""

import enum
import struct
import threading
from dataclasses import dataclass
from typing import Final

import numpy as np
import zstandard

from holdfast import _checks
from holdfast.errors import CorruptedError, IncompatibleVersionError
from holdfast.format._digest import CHUNK_BYTES
from holdfast.format._dtypes import dtype_of
from holdfast.format._planes import TURNED_WIDTHS, WIDTHS, Plane, Splitter, join

PLANES_ZSTD: Final = "planes-zstd"

_TURNED: Final = 0x80
_ZSTD: Final = 1
_BITS: Final = 2
_PLANE: Final = struct.Struct("<BI")

# Complex numbers are taken apart as their two floats.
_FLOAT_WIDTH: Final = {"F16": 2, "BF16": 2, "F32": 4, "F64": 8, "C32": 2, "C64": 4, "C128": 8}


class CompressionLevel(enum.Enum):
    """How much time to spend on size. No chunk gets larger by a higher level."""

    NONE = "none"
    FAST = "fast"
    BALANCED = "balanced"
    MAXIMUM = "maximum"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """How Zstandard looks for repeats; ``gain`` is the share a trial on a sample must save."""

    strategy: int
    min_match: int
    search_log: int = 1
    table_log: int = 17
    target_length: int = 0
    gain: float = 0.0


# A search that finds next to nothing: chance repeats in an exponent plane cost more than the
# Huffman codes they replace, and looking for them costs time.
_ENTROPY: Final = _Search(strategy=zstandard.STRATEGY_FAST, min_match=7, table_log=6)
_REPEATS: Final = _Search(strategy=zstandard.STRATEGY_DFAST, min_match=4, gain=0.02)
_OPTIMAL: Final = _Search(
    strategy=zstandard.STRATEGY_BTOPT, min_match=6, target_length=16, gain=0.01
)
_WHOLE: Final = _Search(strategy=zstandard.STRATEGY_LAZY2, min_match=6, search_log=6)

_FURTHER: Final = {
    CompressionLevel.FAST: (),
    CompressionLevel.BALANCED: (_REPEATS,),
    CompressionLevel.MAXIMUM: (_REPEATS, _OPTIMAL),
}
_SAMPLE_BYTES: Final = 8_192


def codec_for(level: CompressionLevel | str, dtype: str) -> str | None:
    """The codec a shard's header names for leaves of ``dtype`` at ``level``; ``None`` if they are
    not compressed. ``ValueError`` for an unknown level or dtype."""
    dtype_of(dtype)
    return None if CompressionLevel(level) is CompressionLevel.NONE else PLANES_ZSTD


def check_codec(codec: str, *, path: str | None = None) -> None:
    """``IncompatibleVersionError`` unless this version can decode ``codec``."""
    if codec != PLANES_ZSTD:
        raise IncompatibleVersionError(
            f"the codec {codec!r} is unknown; this version of holdfast reads {PLANES_ZSTD!r}. "
            f"Nothing was changed; read it with the version that wrote it",
            path=path,
        )


def compress_chunk(raw: memoryview, *, dtype: str, level: CompressionLevel | str) -> bytes | None:
    """The frame of ``raw``, shorter than it; ``None`` if the chunk is to be stored as it is.

    ``raw`` is contiguous, at most ``CHUNK_BYTES`` long, and any part of a leaf of ``dtype``: a
    last element may be cut off. The same input gives the same frame with the same Zstandard.
    """
    level = CompressionLevel(level)
    width = _FLOAT_WIDTH.get(dtype) or dtype_of(dtype).itemsize
    raw = _chunk("raw", raw)
    if level is CompressionLevel.NONE or len(raw) <= 1 + width * _PLANE.size:
        return None
    frame = _frame(raw, width, turned=dtype in _FLOAT_WIDTH, level=level)
    if level is CompressionLevel.MAXIMUM:
        whole = _zstd(_WHOLE).compress(raw)
        head = bytes([1]) + _PLANE.pack(_ZSTD, len(whole))
        if len(head) + len(whole) < len(frame):
            frame = head + whole
    return frame if len(frame) < len(raw) else None


def decompress_chunk(
    frame: memoryview, into: memoryview, *, codec: str, path: str | None = None
) -> None:
    """Fill ``into``, as long as the chunk's raw size, from what is stored for the chunk.

    Raises ``CorruptedError`` if the stored bytes are no such chunk, ``IncompatibleVersionError``
    for an unknown codec; ``into`` then holds anything. That the chunk is the one that was written
    is for its digest to say: a damaged frame may well decode.
    """
    check_codec(codec, path=path)
    into = _chunk("into", into)
    if into.readonly:
        raise ValueError("into must be writable")
    frame = memoryview(_checks.data("frame", frame)).cast("B")
    if len(frame) == len(into):
        into[:] = frame
        return
    try:
        _decode(frame, into)
    except (_Malformed, zstandard.ZstdError) as problem:
        raise CorruptedError(
            f"a compressed chunk of {len(frame)} bytes cannot be decoded to its {len(into)}: "
            f"{problem}. The stored bytes are damaged; load another checkpoint",
            path=path,
        ) from problem


class _Malformed(Exception):  # noqa: N818 -- never leaves this module
    """What is wrong with a frame."""


def _chunk(name: str, value: memoryview) -> memoryview:
    view = memoryview(_checks.data(name, value))
    if view.nbytes > CHUNK_BYTES:
        raise ValueError(f"{name} must be at most {CHUNK_BYTES} bytes, not {view.nbytes}")
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def _frame(raw: memoryview, width: int, *, turned: bool, level: CompressionLevel) -> bytes:
    whole = len(raw) - len(raw) % width
    head = [bytes([width | (_TURNED if turned else 0)])]
    body: list[bytes | memoryview] = []
    for plane in _contexts.splitter.split(raw[:whole], width, turned=turned):
        mode, stored = _compressed_plane(plane, level)
        head.append(_PLANE.pack(mode, len(stored)))
        body.append(stored)
    return b"".join([*head, *body, raw[whole:]])


def _compressed_plane(plane: Plane, level: CompressionLevel) -> tuple[int, bytes | memoryview]:
    """The plane's mode and the smallest of what the level's searches make of it."""
    mode, data = 0, plane.data
    if plane.max() <= 1:
        mode, data = _BITS, np.packbits(plane).data
    best: bytes | memoryview = data
    for search in (_ENTROPY, *_FURTHER[level]):
        if _promising(data, search):
            stored = _zstd(search).compress(data)
            if len(stored) < len(best):
                mode, best = mode | _ZSTD, stored
    return mode, best


def _promising(data: memoryview, search: _Search) -> bool:
    """Whether a sample gets so much smaller than by entropy alone that a full search may pay."""
    if not search.gain:
        return True
    middle = max(0, len(data) - _SAMPLE_BYTES) // 2
    sample = data[middle : middle + _SAMPLE_BYTES]
    usual = min(len(_zstd(_ENTROPY).compress(sample)), len(sample))
    return len(_zstd(search).compress(sample)) < (1 - search.gain) * usual


class _Contexts(threading.local):
    """Working memory, one set for each thread that compresses or decompresses."""

    def __init__(self) -> None:
        self.splitter = Splitter(CHUNK_BYTES)
        self.compressors: dict[_Search, zstandard.ZstdCompressor] = {}
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=CHUNK_BYTES)


_contexts = _Contexts()


def _zstd(search: _Search) -> zstandard.ZstdCompressor:
    found = _contexts.compressors.get(search)
    if found is None:
        parameters = zstandard.ZstdCompressionParameters(
            window_log=CHUNK_BYTES.bit_length() - 1,
            hash_log=search.table_log,
            chain_log=search.table_log,
            search_log=search.search_log,
            min_match=search.min_match,
            target_length=search.target_length,
            strategy=search.strategy,
        )
        found = zstandard.ZstdCompressor(compression_params=parameters)
        _contexts.compressors[search] = found
    return found


def _decode(frame: memoryview, into: memoryview) -> None:
    if len(frame) > len(into):
        raise _Malformed("it is longer than what it stands for")
    if not frame:
        raise _Malformed("it is empty")
    width, turned = frame[0] & ~_TURNED, bool(frame[0] & _TURNED)
    if width not in (TURNED_WIDTHS if turned else WIDTHS):
        raise _Malformed(f"its first byte is {frame[0]}, which is no layout")
    start = 1 + width * _PLANE.size
    if len(frame) < start:
        raise _Malformed("it ends within its head")
    count, tail = divmod(len(into), width)
    planes = []
    for mode, size in _PLANE.iter_unpack(frame[1:start]):
        if size > len(frame) - start:
            raise _Malformed("it ends within a plane")
        planes.append(_decoded_plane(mode, frame[start : start + size], count))
        start += size
    if len(frame) - start != tail:
        raise _Malformed(f"{len(frame) - start} bytes follow its planes instead of {tail}")
    join(planes, into[: count * width], turned=turned)
    into[count * width :] = frame[start:]


def _decoded_plane(mode: int, stored: memoryview, count: int) -> Plane:
    if mode & ~(_ZSTD | _BITS):
        raise _Malformed(f"a plane has the mode {mode}, which is none")
    expected = -(-count // 8) if mode & _BITS else count
    plane: bytes | memoryview = stored
    if mode & _ZSTD:
        # The content size is what the library allocates, so it is compared before.
        if zstandard.frame_content_size(stored) != expected:
            raise _Malformed("a plane claims to be of another size")
        plane = _contexts.decompressor.decompress(stored, allow_extra_data=False)
    if len(plane) != expected:
        raise _Malformed("a plane is of another size")
    values = np.frombuffer(plane, np.uint8)
    return np.unpackbits(values, count=count) if mode & _BITS else values
