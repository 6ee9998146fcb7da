"""Lays out a shard file: where every entry goes, and the header that says so. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from holdfast import _checks
from holdfast.format._digest import CHUNK_BYTES, chunk_count, last_chunk_bytes
from holdfast.format._dtypes import DType, dtype_of
from holdfast.format._entry_names import SHOWN_CHARS, box_shape, entry_name
from holdfast.format._shard_layout import (
    DATA_ALIGNMENT,
    LENGTH_BYTES,
    MAX_CODEC_CHARS,
    MAX_ENTRIES,
    MAX_FILE_BYTES,
    MAX_FRAME_BYTES,
    MAX_HEADER_BYTES,
    METADATA_ENTRY,
    METADATA_KEY,
    SHARD_VERSION,
    TABLE_BESIDE,
    TABLE_ENTRY,
    PlacedEntry,
    ShardEntry,
    ShardLayout,
    raw_bytes,
    table_bytes,
)


def plan_shard(
    entries: Sequence[ShardEntry],
    *,
    metadata: Mapping[str, str] | None = None,
    stored: Mapping[int, tuple[str, Sequence[int]]] | None = None,
    table_beside: bool = False,
) -> ShardLayout:
    """Lay out a shard. Pure; linear in the number of entries.

    ``stored`` gives, by place in ``entries``, the codec and the frame sizes of those that are
    compressed. With ``table_beside`` the file lists nothing but the entries, and its chunk table
    is to be kept in an object of its own. The file's order is by falling alignment.
    ``ValueError`` for entries that cannot be, for two of one name, and for more than one shard
    holds.
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
    return _lay_out(drafts, given, table_beside=table_beside)


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


def _lay_out(
    drafts: Sequence[_Draft], metadata: Mapping[str, str], *, table_beside: bool
) -> ShardLayout:
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
    about: dict[str, Any] = {"version": SHARD_VERSION, "chunk_bytes": CHUNK_BYTES}
    if table_beside:
        about["table"] = TABLE_BESIDE
    else:
        start, offset = offset, offset + table_bytes(chunks, frames)
        listed[TABLE_ENTRY] = {
            "dtype": "U8",
            "shape": (offset - start,),
            "data_offsets": (start, offset),
        }
    about |= {"encoded": encoded} if encoded else {}
    listed[METADATA_ENTRY] = {METADATA_KEY: msgspec.json.encode(about).decode(), **metadata}
    header = _header(msgspec.json.encode(listed))
    if len(header) + offset > MAX_FILE_BYTES:
        raise ValueError("the entries are larger than any file; use several shards")
    placed = tuple(
        _place(draft, len(header) + start, chunk, frame)
        for draft, (start, chunk, frame) in zip(drafts, starts, strict=True)
    )
    return ShardLayout.of(
        placed,
        header=header,
        metadata=metadata,
        is_holdfast=True,
        table_beside=table_beside,
        order=[draft.index for draft in drafts],
    )


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
