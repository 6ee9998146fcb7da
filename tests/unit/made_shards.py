"""Whole shard files from plain bytes, for the tests of the format."""

from collections.abc import Mapping, Sequence

from holdfast.format import (
    ShardEntry,
    ShardLayout,
    chunk_digests,
    encode_table,
    file_digest,
    header_bytes_needed,
    parse_shard_header,
    parse_table,
    plan_shard,
)


def make_shard(
    entries: Sequence[ShardEntry],
    contents: Sequence[bytes],
    *,
    metadata: Mapping[str, str] | None = None,
    frames: Mapping[int, Sequence[bytes]] | None = None,
) -> bytes:
    """A shard of ``entries`` with raw bytes ``contents``; ``frames`` are what stands in the file
    for those that are compressed (by an imaginary codec)."""
    compressed = frames or {}
    layout = plan_shard(
        entries,
        metadata=metadata,
        stored={i: ("made-up", [len(f) for f in parts]) for i, parts in compressed.items()},
    )
    data = bytearray(layout.header)
    digests = []
    sizes = {}
    for placed, index in zip(layout.entries, layout.order, strict=True):
        assert len(data) == placed.offset
        digests.append(chunk_digests(contents[index]))
        if index in compressed:
            parts = compressed[index]
            sizes[placed.key] = [len(part) for part in parts]
            data += b"".join(parts)
        else:
            data += contents[index]
    assert len(data) == layout.table_offset
    data += encode_table(layout, digests, sizes)
    assert len(data) == layout.file_bytes
    return bytes(data)


def open_shard(data: bytes, path: str = "a/shard-0-x") -> ShardLayout:
    """Parse header and table as a reader of an untrusted file does."""
    needed = header_bytes_needed(data[:8], len(data), path=path)
    layout = parse_shard_header(data[:needed], len(data), path=path)
    if layout.is_holdfast:
        parse_table(layout, data[layout.table_offset :], path=path)
    return layout


def digest_of(data: bytes) -> bytes:
    """The file digest as the writer of ``data`` would have recorded it."""
    layout = open_shard(data)
    return file_digest(layout.header, data[layout.table_offset :])


def contents_of(data: bytes) -> dict[str, bytes]:
    """The stored bytes of every entry, by key."""
    return {
        placed.key: data[placed.offset : placed.offset + placed.stored_bytes]
        for placed in open_shard(data).entries
    }
