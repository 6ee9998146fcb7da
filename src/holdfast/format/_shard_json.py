"""The JSON inside a shard's header: which fields, of which types. Knows no offsets and no names."""

from typing import Annotated, Final, Literal

import msgspec

from holdfast.errors import CorruptedError, IncompatibleVersionError
from holdfast.format._digest import CHUNK_BYTES
from holdfast.format._entry_names import SHOWN_CHARS
from holdfast.format._shard_layout import (
    LENGTH_BYTES,
    MAX_CODEC_CHARS,
    MAX_ENTRIES,
    MAX_FILE_BYTES,
    METADATA_ENTRY,
    SHARD_VERSION,
)
from holdfast.format._strict_json import scan_json

_HEADER_DEPTH: Final = 3
_ABOUT_DEPTH: Final = 64

_Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_FILE_BYTES)]


class Listed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One entry as safetensors lists it."""

    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


class Encoding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an entry listed as bytes really is."""

    dtype: str
    shape: tuple[_Size, ...]
    codec: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_CODEC_CHARS)] | None = None


class _Version(msgspec.Struct, frozen=True):
    version: Annotated[int, msgspec.Meta(ge=1)]


class About(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What holdfast says in a header's metadata."""

    version: int
    chunk_bytes: int
    table: Literal["beside"] | None = None
    encoded: dict[str, Encoding] = {}


_DECODE_HEADER: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_DECODE_LISTED: Final = msgspec.json.Decoder(Listed).decode
_DECODE_ALL_LISTED: Final = msgspec.json.Decoder(list[Listed]).decode
_DECODE_METADATA: Final = msgspec.json.Decoder(dict[str, str]).decode
_DECODE_VERSION: Final = msgspec.json.Decoder(_Version).decode
_DECODE_ABOUT: Final = msgspec.json.Decoder(About).decode


def decode_header(head: bytes) -> tuple[dict[str, str], dict[str, Listed]]:
    """The metadata and the entries that a header's JSON lists, in its order."""
    if not head.startswith(b"{", LENGTH_BYTES):
        raise CorruptedError("it does not begin with '{'; this is no safetensors file")
    # Every entry has this once, so too many are told before any of them takes memory.
    _check_count(head.count(b'"data_offsets"') - 1)
    text = memoryview(head)[LENGTH_BYTES:]
    try:
        found = _decode(text)
    except (CorruptedError, RecursionError, ValueError):
        scan_json(text, max_depth=_HEADER_DEPTH)
        raise
    if not _is_written(text, *found):
        scan_json(text, max_depth=_HEADER_DEPTH)
    return found


def _decode(text: memoryview) -> tuple[dict[str, str], dict[str, Listed]]:
    raw = _DECODE_HEADER(text)
    metadata = _DECODE_METADATA(raw.pop(METADATA_ENTRY, b"{}"))
    _check_count(len(raw) - 1)
    try:  # all at once, which takes a fifth of the time
        listed = _DECODE_ALL_LISTED(b"[%b]" % b",".join(raw.values()))
    except ValueError:
        return metadata, {key: _listed(key, entry) for key, entry in raw.items()}
    return metadata, dict(zip(raw, listed, strict=True))


def _is_written(text: memoryview, metadata: dict[str, str], listed: dict[str, Listed]) -> bool:
    """Whether the text is what holdfast writes for what was decoded from it, byte for byte, and
    so has nothing that ``scan_json`` refuses. Found out many times as fast: a key that occurs
    twice is decoded once, and so is not written."""
    written = msgspec.json.encode({METADATA_ENTRY: metadata, **listed})
    return text[: len(written)] == written and not bytes(text[len(written) :]).strip(b" ")


def _check_count(entries: int) -> None:
    if entries > MAX_ENTRIES:
        raise CorruptedError(f"it lists {entries} entries; a shard has at most {MAX_ENTRIES}")


def _listed(key: str, entry: msgspec.Raw) -> Listed:
    try:
        return _DECODE_LISTED(entry)
    except ValueError as error:
        raise CorruptedError(f"entry {key[:SHOWN_CHARS]!r}: {error}") from error


def decode_about(text: str) -> About:
    """What ``__metadata__["holdfast"]`` says."""
    data = text.encode()
    scan_json(data, max_depth=_ABOUT_DEPTH)
    version = _DECODE_VERSION(data).version
    if version > SHARD_VERSION:
        raise IncompatibleVersionError(
            f"it is of shard format {version}, and this version of holdfast reads formats up to "
            f"{SHARD_VERSION}; use a newer holdfast"
        )
    about = _DECODE_ABOUT(data)
    if about.chunk_bytes != CHUNK_BYTES:
        raise CorruptedError(
            f"its chunks are of {about.chunk_bytes} bytes; those of format {SHARD_VERSION} "
            f"are of {CHUNK_BYTES}"
        )
    return about
