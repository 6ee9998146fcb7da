"""Reads the header of a safetensors file that may be anything. Trusts nothing it says.

Work and memory are bounded by the header's length, which is checked first: memory is at most
about 15 times as much, for a header that lists many tiny entries.
"""

from collections.abc import Mapping

from holdfast.contracts import Data
from holdfast.errors import CheckpointError, CorruptedError, IncompatibleVersionError
from holdfast.format._digest import chunk_count
from holdfast.format._dtypes import DTYPES, DType
from holdfast.format._entry_names import SHOWN_CHARS, box_shape, parse_entry_name
from holdfast.format._shard_json import About, Encoding, Listed, decode_about, decode_header
from holdfast.format._shard_layout import (
    DATA_ALIGNMENT,
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    METADATA_KEY,
    TABLE_ENTRY,
    PlacedEntry,
    ShardEntry,
    ShardLayout,
    raw_bytes,
)


def header_bytes_needed(first_8: Data, file_bytes: int, *, path: str) -> int:
    """How many bytes from the file's start ``parse_shard_header`` wants.

    ``CorruptedError`` if a file of that size cannot begin like this.
    """
    first = bytes(first_8[:LENGTH_BYTES])
    length = int.from_bytes(first, "little")
    if len(first) < LENGTH_BYTES or file_bytes < LENGTH_BYTES:
        problem = f"it has {min(len(first), file_bytes)} bytes"
    elif length > MAX_HEADER_BYTES:
        problem = f"its header would be {length} bytes long, more than {MAX_HEADER_BYTES}"
    elif LENGTH_BYTES + length > file_bytes:
        problem = f"its header of {length} bytes does not fit in its {file_bytes} bytes"
    else:
        return LENGTH_BYTES + length
    raise CorruptedError(f"the file is cut short or is no safetensors file: {problem}", path=path)


def parse_shard_header(header: Data, file_bytes: int, *, path: str) -> ShardLayout:
    """The layout that a header describes, holdfast's or any safetensors file's.

    ``header`` is as many bytes as ``header_bytes_needed`` said. ``CorruptedError`` if it is not
    a header, or does not describe a file of exactly that size; ``IncompatibleVersionError`` if a
    newer version wrote it, or if it has a dtype that this one does not know.
    """
    head = bytes(header)
    if len(head) != header_bytes_needed(head, file_bytes, path=path):
        raise CorruptedError(f"the header has {len(head)} bytes, not as many as it says", path=path)
    try:
        return _parse(head, file_bytes)
    except CheckpointError as error:
        raise type(error)(
            f"the header of the shard is wrong: {error.message}", path=path
        ) from error
    except ValueError as error:
        raise CorruptedError(f"the header of the shard is wrong: {error}", path=path) from error


def _parse(head: bytes, file_bytes: int) -> ShardLayout:
    metadata, listed = decode_header(head)
    about_text = metadata.pop(METADATA_KEY, None)
    if about_text is not None:
        return _holdfast_layout(head, file_bytes, metadata, listed, decode_about(about_text))
    if TABLE_ENTRY in listed:
        raise CorruptedError("it lists a chunk table, but says nothing of holdfast")
    # Other writers may list entries in another order than that of the file.
    in_order = sorted(listed.items(), key=lambda item: item[1].data_offsets)
    placed = _placed(in_order, len(head), None)
    layout = ShardLayout.of(placed, header=head, metadata=metadata, is_holdfast=False)
    return _of_size(layout, file_bytes)


def _holdfast_layout(
    head: bytes,
    file_bytes: int,
    metadata: Mapping[str, str],
    listed: Mapping[str, Listed],
    about: About,
) -> ShardLayout:
    if len(head) % DATA_ALIGNMENT:
        raise CorruptedError(f"it is {len(head)} bytes long, no multiple of {DATA_ALIGNMENT}")
    items = list(listed.items())
    if about.table is not None and TABLE_ENTRY in listed:
        raise CorruptedError("it lists a chunk table, but says that it is beside the file")
    if about.table is None and (not items or items[-1][0] != TABLE_ENTRY):
        raise CorruptedError("its last entry is not the chunk table")
    if unknown := about.encoded.keys() - listed.keys():
        raise CorruptedError(
            f"it encodes an entry {min(unknown)[:SHOWN_CHARS]!r} that it does not list"
        )
    if TABLE_ENTRY in about.encoded:
        raise CorruptedError("it encodes the chunk table")
    table = items.pop()[1] if about.table is None else None
    layout = ShardLayout.of(
        _placed(items, len(head), about.encoded),
        header=head,
        metadata=metadata,
        is_holdfast=True,
        table_beside=table is None,
    )
    if table is not None:
        _check_table(layout, table)
    return _of_size(layout, file_bytes)


def _check_table(layout: ShardLayout, table: Listed) -> None:
    size, end = layout.table_bytes, layout.table_offset - len(layout.header)
    if table.dtype != "U8" or table.shape != (size,) or table.data_offsets != (end, end + size):
        raise CorruptedError(
            f"its chunk table is not the {size} bytes after the last entry that its "
            f"{layout.chunks} chunks need"
        )


def _of_size(layout: ShardLayout, file_bytes: int) -> ShardLayout:
    if layout.file_bytes != file_bytes:
        raise CorruptedError(
            f"it describes {layout.file_bytes} bytes, but the file has {file_bytes}"
        )
    return layout


def _placed(
    listed: list[tuple[str, Listed]], start: int, encoded: Mapping[str, Encoding] | None
) -> tuple[PlacedEntry, ...]:
    placed: list[PlacedEntry] = []
    offset = chunks = frames = 0
    for key, found in listed:
        try:
            encoding = None if encoded is None else encoded.get(key)
            dtype, shape, size = _contents(found, encoding)
            first, stop = found.data_offsets
            if first != offset:
                raise ValueError(f"it starts at byte {first} of the data, not at {offset}")  # noqa: TRY301
            if encoded is None:
                entry = ShardEntry(name=key, dtype=dtype.code, shape=shape)
            else:
                entry = _entry(key, dtype, shape)
        except IncompatibleVersionError:
            raise
        except ValueError as error:
            raise CorruptedError(f"entry {key[:SHOWN_CHARS]!r}: {error}") from error
        codec = None if encoding is None else encoding.codec
        placed.append(
            PlacedEntry(
                entry=entry,
                key=key,
                offset=start + first,
                stored_bytes=stop - first,
                raw_bytes=size,
                codec=codec,
                first_chunk=chunks,
                first_frame=frames,
            )
        )
        offset = stop
        count = chunk_count(size)
        chunks += count
        frames += count if codec is not None else 0
    return tuple(placed)


def _contents(found: Listed, encoding: Encoding | None) -> tuple[DType, tuple[int, ...], int]:
    first, stop = found.data_offsets
    dtype, shape = _dtype(found.dtype, found.shape)
    size = raw_bytes(dtype, shape)
    if size != stop - first:
        raise ValueError(
            f"{dtype.code} of shape {list(shape)} are {size} bytes, but it has bytes {first} to "
            f"{stop} of the data"
        )
    if encoding is None:
        return dtype, shape, size
    if dtype.code != "U8" or len(shape) != 1:
        raise ValueError("it is encoded, but not stored as U8 of one dimension")
    raw_dtype = _known(encoding.dtype)
    raw_size = raw_bytes(raw_dtype, encoding.shape)
    if encoding.codec is None and (raw_size != size or raw_dtype.stored == raw_dtype.code):
        raise ValueError(
            f"{encoding.dtype} of shape {list(encoding.shape)} cannot be encoded in {size} bytes "
            "without a codec"
        )
    if size > raw_size:
        raise ValueError(f"it is compressed, from {raw_size} bytes to {size}, which are more")
    return raw_dtype, encoding.shape, raw_size


def _entry(key: str, dtype: DType, shape: tuple[int, ...]) -> ShardEntry:
    name, box = parse_entry_name(key)
    if box is not None and box_shape(box) != shape:
        raise ValueError(f"its name says shape {list(box_shape(box))}, not {list(shape)}")
    return ShardEntry(name=name, dtype=dtype.code, shape=shape, box=box)


def _dtype(code: str, shape: tuple[int, ...]) -> tuple[DType, tuple[int, ...]]:
    # safetensors counts half bytes here, torch and NumPy pairs of them.
    if code == "F4" and shape and shape[-1] % 2 == 0:
        return DTYPES["F4_E2M1_X2"], (*shape[:-1], shape[-1] // 2)
    dtype = _known(code)
    if dtype.stored != code:
        raise ValueError(f"{code} is no dtype of safetensors")
    return dtype, shape


def _known(code: str) -> DType:
    dtype = DTYPES.get(code)
    if dtype is None:
        raise IncompatibleVersionError(
            f"this version of holdfast has no dtype {code[:SHOWN_CHARS]!r}; use a newer one"
        )
    return dtype
