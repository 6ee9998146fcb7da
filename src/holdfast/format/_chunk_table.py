"""A shard's last entry: the digest of every chunk, and the size of every compressed frame.

Knows the layout it belongs to. It does not check the chunks themselves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import numpy as np
import xxhash

from holdfast.contracts import Data
from holdfast.errors import CorruptedError
from holdfast.format._digest import DIGEST_BYTES, last_chunk_bytes
from holdfast.format._shard_layout import MAX_FRAME_BYTES, PlacedEntry, ShardLayout

_FRAME_SIZE: Final = np.dtype("<u4")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTable:
    """The table of one shard, in file order: 16 bytes per chunk, one size per frame."""

    digests: bytes
    frame_sizes: np.ndarray[tuple[int], np.dtype[np.uint32]]

    def digests_of(self, placed: PlacedEntry) -> memoryview:
        """The digests of an entry's chunks, one after the other."""
        start = placed.first_chunk * DIGEST_BYTES
        return memoryview(self.digests)[start : start + placed.chunks * DIGEST_BYTES]

    def digest_of(self, placed: PlacedEntry, chunk: int) -> bytes:
        """The digest of one of an entry's chunks."""
        start = (placed.first_chunk + chunk) * DIGEST_BYTES
        return self.digests[start : start + DIGEST_BYTES]

    def frames_of(self, placed: PlacedEntry) -> list[int]:
        """The stored sizes of a compressed entry's frames; none for another entry."""
        if placed.codec is None:
            return []
        start = placed.first_frame
        sizes: list[int] = self.frame_sizes[start : start + placed.frames].tolist()
        return sizes

    def frame_offsets_of(self, placed: PlacedEntry) -> list[int]:
        """Where in the file a compressed entry's frames start, and where the last one ends."""
        return list(accumulate(self.frames_of(placed), initial=placed.offset))


def encode_table(
    layout: ShardLayout,
    digests: Sequence[Data],
    frame_sizes: Mapping[str, Sequence[int]] | None = None,
) -> bytes:
    """The table's bytes: ``digests`` per entry in file order (``chunk_digests`` of its raw
    bytes), ``frame_sizes`` by the key of every compressed one, as given to ``plan_shard``.
    ``ValueError`` if they do not fit the layout."""
    if len(digests) != len(layout.entries):
        raise ValueError(f"digests of {len(digests)} entries for a shard of {len(layout.entries)}")
    sizes = frame_sizes or {}
    if unknown := [key for key in sizes if key not in layout.by_key]:
        raise ValueError(f"frame sizes for an entry {unknown[0]!r} that the shard does not have")
    parts: list[Data] = []
    for placed, given in zip(layout.entries, digests, strict=True):
        if len(given) != placed.chunks * DIGEST_BYTES:
            raise ValueError(
                f"entry {placed.key!r} has {placed.chunks} chunks, not the digests of "
                f"{len(given) / DIGEST_BYTES:g}"
            )
        parts.append(given)
    for placed in layout.entries:
        frames = sizes.get(placed.key, ())
        stored = placed.stored_bytes if placed.frames else 0
        if len(frames) != placed.frames or sum(frames) != stored:
            raise ValueError(f"the frames of entry {placed.key!r} are not those of the layout")
        if frames:
            parts.append(np.asarray(frames, dtype=_FRAME_SIZE).tobytes())
    return b"".join(parts)


def parse_table(layout: ShardLayout, table: Data, *, path: str) -> ChunkTable:
    """Read a table that may be anything; ``CorruptedError`` if it does not fit the layout.

    That it is the table which was written is for ``file_digest`` to say.
    """
    data = bytes(table)
    if not layout.is_holdfast:
        raise CorruptedError(
            "the file was not written by holdfast and has no chunk table, so its bytes cannot be "
            "verified",
            path=path,
        )
    if len(data) != layout.table_bytes:
        raise CorruptedError(
            f"the chunk table has {len(data)} bytes where the header says {layout.table_bytes}",
            path=path,
        )
    split = layout.chunks * DIGEST_BYTES
    parsed = ChunkTable(
        digests=data[:split], frame_sizes=np.frombuffer(data, _FRAME_SIZE, offset=split)
    )
    for placed in layout.entries:
        if placed.codec is None:
            continue
        frames = parsed.frames_of(placed)
        if sum(frames) != placed.stored_bytes or 0 in frames:
            raise CorruptedError(
                f"the frames of entry {placed.key!r} are {sum(frames)} bytes by the chunk table "
                f"and {placed.stored_bytes} by the header, or one of them is empty",
                path=path,
            )
        if max(frames, default=0) > MAX_FRAME_BYTES or (
            frames and frames[-1] > last_chunk_bytes(placed.raw_bytes)
        ):
            raise CorruptedError(
                f"one of the frames of entry {placed.key!r} is longer than its chunk", path=path
            )
    return parsed


def file_digest(header: Data, table: Data) -> bytes:
    """What the commit record says of a shard: one digest over its header (with the 8 bytes of
    its length) and its table."""
    state = xxhash.xxh3_128(header)
    state.update(table)
    return state.digest()
