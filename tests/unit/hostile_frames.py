"""Payloads of compressed chunks that ask for far more memory than a chunk has. Used by tests and by
the campaign of hostile files."""

import zstandard

from holdfast.format import CHUNK_BYTES


def one_plane(mode: int, payload: bytes) -> bytes:
    return bytes([1, mode]) + len(payload).to_bytes(4, "little") + payload


def skippable(size: int) -> bytes:
    return bytes.fromhex("502a4d18") + size.to_bytes(4, "little") + bytes(size)


def bomb(**parameters: int) -> bytes:
    """A valid Zstandard frame of 64 MiB of zeros, a few thousand bytes long."""
    options = zstandard.ZstdCompressionParameters.from_level(3, window_log=26, **parameters)
    writer = zstandard.ZstdCompressor(compression_params=options).compressobj()
    return writer.compress(bytes(64 << 20)) + writer.flush()


def lying_header(content_size: int) -> bytes:
    """A single-segment frame that announces ``content_size`` bytes and has one empty block."""
    return bytes.fromhex("28b52ffd") + b"\xe0" + content_size.to_bytes(8, "little") + b"\1\0\0"


def wide_window(content_size: int, window_byte: int) -> bytes:
    """A frame with the right content size, an enormous window, and a block that never ends."""
    head = bytes.fromhex("28b52ffd") + b"\x80" + bytes([window_byte])
    return head + content_size.to_bytes(4, "little") + b"\xff\xff\x03" + bytes(20)


BOMBS = {
    "a bomb": bomb(),
    "a bomb that does not say so": bomb(write_content_size=0),
    "64 MiB of zeros": zstandard.compress(bytes(64 << 20)),
    "an announcement of 2**62 bytes": lying_header(1 << 62),
    "an announcement of a chunk": lying_header(CHUNK_BYTES),
    "an announcement of 2**64-1 bytes": lying_header(2**64 - 1),
    "a wide window": wide_window(CHUNK_BYTES, 0x88),
    "the widest window": wide_window(CHUNK_BYTES, 0xFF),
    "a frame to be skipped": skippable(50),
    "bytes behind a frame": zstandard.compress(bytes(CHUNK_BYTES)) + b"more",
    "two frames": zstandard.compress(bytes(CHUNK_BYTES)) * 2,
}
