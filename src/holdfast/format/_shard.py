"""Where everything stands in a shard file, and the header that says so. Reads and writes nothing.

A shard is a valid safetensors file: header, entries back to back, and as the last entry the chunk
table. Data starts on a page so that direct I/O can write and read it where it stands.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

import msgspec

from holdfast import _checks
from holdfast.format._digest import CHUNK_BYTES, DIGEST_BYTES, chunk_count, last_chunk_bytes
from holdfast.format._dtypes import DType, dtype_of
from holdfast.format._entry_names import MAX_DIMS, SHOWN_CHARS, Bounds, box_shape, entry_name

SHARD_VERSION: Final = 1
TABLE_ENTRY: Final = "__holdfast_chunks__"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """A box of a tensor: its name, dtype code and shape; ``box`` is ``None`` for a whole one."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Bounds | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedEntry:
    """Where an entry's bytes stand.

    ``key`` is its name in the header, ``offset`` counts from the file's first byte. Its chunks
    are those from ``first_chunk`` on of the file's; if it is compressed (``codec``), its frames
    are those from ``first_frame`` on. ``index`` is its place in what was given to ``plan_shard``,
    or in the file if it was parsed.
    """

    entry: ShardEntry
    key: str
    offset: int
    stored_bytes: int
    raw_bytes: int
    codec: str | None
    first_chunk: int
    first_frame: int
    index: int = field(compare=False)

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

    ``entries`` are in file order. ``header`` is all that stands before the data, its length
    included. ``metadata`` is the writer's own. A file that another program wrote is not
    ``is_holdfast``: it has no table (``table_bytes`` is 0), so its bytes cannot be verified.
    """

    entries: tuple[PlacedEntry, ...]
    header: bytes = field(repr=False)
    metadata: Mapping[str, str]
    table_offset: int
    table_bytes: int
    file_bytes: int
    is_holdfast: bool
    by_key: Mapping[str, PlacedEntry] = field(repr=False, compare=False)

    @classmethod
    def of(
        cls,
        entries: tuple[PlacedEntry, ...],
        *,
        header: bytes,
        metadata: Mapping[str, str],
        is_holdfast: bool,
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
            table_offset=end,
            table_bytes=size,
            file_bytes=end + size,
            is_holdfast=is_holdfast,
            by_key={entry.key: entry for entry in entries},
        )

    @property
    def chunks(self) -> int:
        """How many chunks the raw bytes of all entries have."""
        last = self.entries[-1] if self.entries else None
        return 0 if last is None else last.first_chunk + last.chunks


def plan_shard(
    entries: Sequence[ShardEntry],
    *,
    metadata: Mapping[str, str] | None = None,
    stored: Mapping[int, tuple[str, Sequence[int]]] | None = None,
) -> ShardLayout:
    """Lay out a shard. Pure; linear in the number of entries.

    ``stored`` gives, by place in ``entries``, the codec and the frame sizes of those that are
    compressed. The file's order is by falling alignment. ``ValueError`` for entries that cannot
    be, for two of one name, and for more than one shard holds.
    """
    encoded = stored or {}
    given = dict(metadata or {})
    _check_metadata(given)
    if len(entries) > MAX_ENTRIES:
        raise ValueError(f"a shard holds at most {MAX_ENTRIES} entries, not {len(entries)}")
    if unknown := [index for index in encoded if not 0 <= index < len(entries)]:
        raise ValueError(f"stored names entries {unknown} of {len(entries)}")
    drafts = [_draft(entry, index, encoded.get(index)) for index, entry in enumerate(entries)]
    drafts.sort(key=lambda draft: -draft.alignment)
    return _lay_out(drafts, given)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    entry: ShardEntry
    key: str
    index: int
    dtype: DType
    raw_bytes: int
    stored_bytes: int
    codec: str | None

    @property
    def alignment(self) -> int:
        return self.dtype.alignment if self.codec is None else 1


def _draft(entry: ShardEntry, index: int, stored: tuple[str, Sequence[int]] | None) -> _Draft:
    try:
        dtype = dtype_of(entry.dtype)
        for extent in entry.shape:
            _checks.count("every dimension", extent, least=0)
        size = raw_bytes(dtype, entry.shape)
        if entry.box is not None and box_shape(entry.box) != entry.shape:
            raise ValueError(f"box {entry.box} is not of shape {entry.shape}")  # noqa: TRY301
        key = entry_name(entry.name, entry.shape, entry.box)
        stored_size = size if stored is None else _stored_bytes(size, *stored)
    except ValueError as error:
        raise ValueError(f"entry {index} ({entry.name[:SHOWN_CHARS]!r}): {error}") from error
    return _Draft(
        entry=entry,
        key=key,
        index=index,
        dtype=dtype,
        raw_bytes=size,
        stored_bytes=stored_size,
        codec=None if stored is None else stored[0],
    )


def _stored_bytes(size: int, codec: str, frame_sizes: Sequence[int]) -> int:
    _checks.text("codec", codec, most=MAX_CODEC_CHARS)
    if len(frame_sizes) != chunk_count(size):
        raise ValueError(f"{len(frame_sizes)} frames for {chunk_count(size)} chunks")
    if frame_sizes and not (
        min(frame_sizes) >= 1
        and max(frame_sizes) <= MAX_FRAME_BYTES
        and frame_sizes[-1] <= last_chunk_bytes(size)
    ):
        raise ValueError("a frame has at least 1 byte, and no more than its chunk")
    return sum(frame_sizes)


def _lay_out(drafts: Sequence[_Draft], metadata: Mapping[str, str]) -> ShardLayout:
    listed: dict[str, Any] = {METADATA_ENTRY: None}
    encoded: dict[str, Any] = {}
    offset = chunks = frames = 0
    starts: list[tuple[int, int, int]] = []
    for draft in drafts:
        starts.append((offset, chunks, frames))
        if draft.key in listed:
            raise ValueError(f"there are two entries {draft.key[:SHOWN_CHARS]!r}")
        blob = draft.codec is not None or draft.dtype.stored != draft.dtype.code
        stop = offset + draft.stored_bytes
        listed[draft.key] = {
            "dtype": "U8" if blob else draft.dtype.stored,
            "shape": (draft.stored_bytes,) if blob else draft.entry.shape,
            "data_offsets": (offset, stop),
        }
        if blob:
            encoded[draft.key] = _encoding(draft)
        count = chunk_count(draft.raw_bytes)
        offset = stop
        chunks += count
        frames += count if draft.codec is not None else 0
    table = table_bytes(chunks, frames)
    listed[TABLE_ENTRY] = {
        "dtype": "U8",
        "shape": (table,),
        "data_offsets": (offset, offset + table),
    }
    about: dict[str, Any] = {"version": SHARD_VERSION, "chunk_bytes": CHUNK_BYTES}
    about |= {"encoded": encoded} if encoded else {}
    listed[METADATA_ENTRY] = {METADATA_KEY: msgspec.json.encode(about).decode(), **metadata}
    header = _header(msgspec.json.encode(listed))
    if len(header) + offset + table > MAX_FILE_BYTES:
        raise ValueError("the entries are larger than any file; use several shards")
    placed = tuple(
        _place(draft, len(header) + start, chunk, frame)
        for draft, (start, chunk, frame) in zip(drafts, starts, strict=True)
    )
    return ShardLayout.of(placed, header=header, metadata=metadata, is_holdfast=True)


def _place(draft: _Draft, offset: int, first_chunk: int, first_frame: int) -> PlacedEntry:
    return PlacedEntry(
        entry=draft.entry,
        key=draft.key,
        offset=offset,
        stored_bytes=draft.stored_bytes,
        raw_bytes=draft.raw_bytes,
        codec=draft.codec,
        first_chunk=first_chunk,
        first_frame=first_frame,
        index=draft.index,
    )


def _encoding(draft: _Draft) -> dict[str, Any]:
    encoding: dict[str, Any] = {"dtype": draft.entry.dtype, "shape": draft.entry.shape}
    return encoding if draft.codec is None else encoding | {"codec": draft.codec}


def _header(listed: bytes) -> bytes:
    padded = -(-(LENGTH_BYTES + len(listed)) // DATA_ALIGNMENT) * DATA_ALIGNMENT - LENGTH_BYTES
    if padded > MAX_HEADER_BYTES:
        raise ValueError(
            f"the header of {len(listed)} bytes is too long, a shard's has at most "
            f"{MAX_HEADER_BYTES}; use several shards"
        )
    return padded.to_bytes(LENGTH_BYTES, "little") + listed.ljust(padded)


def _check_metadata(metadata: Mapping[str, str]) -> None:
    if METADATA_KEY in metadata:
        raise ValueError(f"metadata cannot have the key {METADATA_KEY!r}: it is the format's own")
    for key, value in metadata.items():
        _checks.text("a key of metadata", key, most=MAX_HEADER_BYTES)
        _checks.text(f"metadata[{key!r}]", value or " ", most=MAX_HEADER_BYTES)
