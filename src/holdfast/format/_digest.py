"""Digests of format 1: XXH3-128, per chunk and per leaf. Knows bytes, not what they mean.

They find bytes that changed by accident. They are no signature: who may write a checkpoint may
also write digests that fit.
"""

from collections.abc import Iterable
from typing import Final

import xxhash

from holdfast.contracts import Data

CHUNK_BYTES: Final = 262_144
"""Raw bytes per chunk, counted from a leaf's first byte; the last chunk may be shorter."""

DIGEST_BYTES: Final = 16
"""The size of every digest."""


def digest(data: Data) -> bytes:
    """XXH3-128 of contiguous bytes, in the canonical (big-endian) form."""
    return xxhash.xxh3_128_digest(data)


def digest_of(parts: Iterable[Data]) -> bytes:
    """The same of bytes that come in parts."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.digest()


def chunk_count(nbytes: int) -> int:
    """How many chunks that many raw bytes have; 0 for none."""
    return -(-nbytes // CHUNK_BYTES)


def last_chunk_bytes(nbytes: int) -> int:
    """How long the last chunk of that many raw bytes is; 0 if there is none."""
    return nbytes - max(chunk_count(nbytes) - 1, 0) * CHUNK_BYTES


def chunk_digests(data: Data) -> bytes:
    """The digests of all chunks of contiguous bytes, one after the other."""
    view = memoryview(data)
    if not view.nbytes:  # an empty view of several dimensions cannot be cast
        return b""
    view = view.cast("B")
    return b"".join(
        xxhash.xxh3_128_digest(view[start : start + CHUNK_BYTES])
        for start in range(0, len(view), CHUNK_BYTES)
    )


def leaf_digest(chunk_digests: Data) -> bytes:
    """A leaf's own digest, from those of its chunks."""
    return digest(chunk_digests)
