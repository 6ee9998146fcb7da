"""What stands where in a shard file: the values that its header and its readers share. Plans
nothing, and reads and writes nothing.

A shard is a valid safetensors file: header, entries back to back, and as the last entry the chunk
table, unless that is kept beside the file. Data starts on a page so that direct I/O can write and
read it where it stands.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Self

import msgspec

from holdfast.format._digest import CHUNK_BYTES, DIGEST_BYTES, chunk_count
from holdfast.format._dtypes import DType
from holdfast.format._entry_names import MAX_DIMS, Bounds

SHARD_VERSION: Final = 1
TABLE_ENTRY: Final = "__holdfast_chunks__"
TABLE_BESIDE: Final = "beside"
METADATA_ENTRY: Final = "__metadata__"
METADATA_KEY: Final = "holdfast"
LENGTH_BYTES: Final = 8
DATA_ALIGNMENT: Final = 4096
FRAME_SIZE_BYTES: Final = 4
MAX_HEADER_BYTES: Final = 32 * 1024 * 1024
MAX_ENTRIES: Final = 250_000
MAX_ENTRY_BYTES: Final = 2**60
MAX_FILE_BYTES: Final = 2**63 - 1
MAX_CODEC_CHARS: Final = 64
MAX_FRAME_BYTES: Final = CHUNK_BYTES


class _Value(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """There are very many of these in a file. A struct is made in a fraction of a dataclass's
    time, and is nothing to the garbage collector; none can be part of a cycle."""


class ShardEntry(_Value, frozen=True, kw_only=True, gc=False):
    """A box of a tensor: its name, dtype code and shape; ``box`` is ``None`` for a whole one."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Bounds | None = None


class PlacedEntry(_Value, frozen=True, kw_only=True, gc=False):
    """Where an entry's bytes stand.

    ``key`` is its name in the header, ``offset`` counts from the file's first byte. Its chunks
    are those from ``first_chunk`` on of the file's; if it is compressed (``codec``), its frames
    are those from ``first_frame`` on.
    """

    entry: ShardEntry
    key: str
    offset: int
    stored_bytes: int
    raw_bytes: int
    codec: str | None
    first_chunk: int
    first_frame: int

    @property
    def chunks(self) -> int:
        """How many chunks its raw bytes have."""
        return chunk_count(self.raw_bytes)

    @property
    def frames(self) -> int:
        """How many frames it is stored in: one per chunk if it is compressed, else none."""
        return 0 if self.codec is None else self.chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """A whole shard file but for the bytes of its entries and table.

    ``entries`` are in file order; ``order`` gives, for each of them, its place in what was given to
    ``plan_shard``, or in the file if it was parsed. ``header`` is all that stands before the data,
    its length included. ``metadata`` is the writer's own.

    With ``table_beside`` the table is no entry but an object of its own: ``table_offset`` counts
    from the first byte of what holds the table, and ``file_bytes`` counts the file alone. A file
    that another program wrote is not ``is_holdfast``: it has no table (``table_bytes`` is 0), so
    its bytes cannot be verified.
    """

    entries: tuple[PlacedEntry, ...]
    header: bytes = field(repr=False)
    metadata: Mapping[str, str]
    table_offset: int
    table_bytes: int
    file_bytes: int
    is_holdfast: bool
    table_beside: bool
    order: Sequence[int] = field(repr=False, compare=False)
    by_key: Mapping[str, PlacedEntry] = field(repr=False, compare=False)

    @classmethod
    def of(
        cls,
        entries: tuple[PlacedEntry, ...],
        *,
        header: bytes,
        metadata: Mapping[str, str],
        is_holdfast: bool,
        table_beside: bool = False,
        order: Sequence[int] | None = None,
    ) -> Self:
        """The layout of a file of these entries, which follow each other and the header."""
        last = entries[-1] if entries else None
        end = len(header) if last is None else last.offset + last.stored_bytes
        chunks = 0 if last is None else last.first_chunk + last.chunks
        frames = 0 if last is None else last.first_frame + last.frames
        size = table_bytes(chunks, frames) if is_holdfast else 0
        return cls(
            entries=entries,
            header=header,
            metadata=metadata,
            table_offset=0 if table_beside else end,
            table_bytes=size,
            file_bytes=end if table_beside else end + size,
            is_holdfast=is_holdfast,
            table_beside=table_beside,
            order=range(len(entries)) if order is None else order,
            by_key={entry.key: entry for entry in entries},
        )

    @property
    def chunks(self) -> int:
        """How many chunks the raw bytes of all entries have."""
        last = self.entries[-1] if self.entries else None
        return 0 if last is None else last.first_chunk + last.chunks


def raw_bytes(dtype: DType, shape: Sequence[int]) -> int:
    """The bytes of a tensor; ``ValueError`` if it has too many dimensions or is too large.

    Dimensions of size 0 count as 1 for the limit, so that no reader's product overflows.
    """
    if len(shape) > MAX_DIMS:
        raise ValueError(f"the shape has {len(shape)} dimensions; at most {MAX_DIMS} are stored")
    size = math.prod(shape) * dtype.itemsize
    if (size or math.prod(extent or 1 for extent in shape) * dtype.itemsize) > MAX_ENTRY_BYTES:
        raise ValueError(f"a tensor of shape {list(shape)} is larger than {MAX_ENTRY_BYTES} bytes")
    return size


def table_bytes(chunks: int, frames: int) -> int:
    """The size of the table of a shard with that many chunks, and frames of compressed ones."""
    return chunks * DIGEST_BYTES + frames * FRAME_SIZE_BYTES
