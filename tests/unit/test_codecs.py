"""Codecs: no bit is lost, no level is worse than a lower one, no frame does harm."""

import itertools
import random
import struct
import subprocess
import sys
import threading
import tracemalloc

import numpy as np
import pytest
import zstandard
from hostile_frames import BOMBS, one_plane
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.errors import CorruptedError, IncompatibleVersionError
from holdfast.format import CHUNK_BYTES, CompressionLevel, codec_for, compressed, decompress_chunk
from holdfast.format._codecs import check_codec, compress_chunk
from holdfast.format._dtypes import DTYPES

LEVELS = (CompressionLevel.FAST, CompressionLevel.BALANCED, CompressionLevel.MAXIMUM)
CODEC = codec_for("balanced", "F32")
RNG = np.random.default_rng(7)


def stored(raw: bytes, dtype: str, level: CompressionLevel | str) -> bytes:
    frame = compress_chunk(memoryview(raw), dtype=dtype, level=level)
    return raw if frame is None else frame


def restored(frame: bytes, size: int) -> bytes:
    into = bytearray(size)
    decompress_chunk(memoryview(frame), memoryview(into), codec=CODEC)
    return bytes(into)


def weights(dtype: str, nbytes: int = CHUNK_BYTES) -> bytes:
    """Normal weights; those of bfloat16 are the upper halves of float32."""
    values = RNG.normal(0, 0.02, nbytes // 2).astype("<f4")
    if dtype == "BF16":
        return values.view("<u2")[1::2].tobytes()[:nbytes]
    return values.astype({"F16": "<f2", "F32": "<f4", "F64": "<f8"}[dtype]).tobytes()[:nbytes]


@st.composite
def chunks(draw):
    """Bytes of many makes: noise, one value, few values, repeats, and joints of these."""
    seed = draw(st.integers(0, 2**32 - 1))
    makes = draw(st.lists(st.sampled_from("znfbr"), min_size=0, max_size=3))
    rng, parts = random.Random(seed), [draw(st.binary(max_size=40))]
    for make in makes:
        size = rng.choice([1, 7, 100, 1_000, 20_001])
        parts.append(
            {
                "z": lambda n: bytes([rng.randrange(256)]) * n,
                "n": rng.randbytes,
                "f": lambda n: bytes(rng.choices([0, 3, 200], [80, 15, 5], k=n)),
                "b": lambda n: bytes(rng.choices([0, 1], k=n)),
                "r": lambda n: (rng.randbytes(13) * n)[:n],
            }[make](size)
        )
    return b"".join(parts)


@settings(deadline=None)
@given(raw=chunks(), dtype=st.sampled_from(sorted(DTYPES)))
@example(raw=b"", dtype="BF16")
@example(raw=bytes(15), dtype="C128")
@example(raw=bytes(CHUNK_BYTES), dtype="F32")
@example(raw=bytes(CHUNK_BYTES - 1), dtype="BF16")
def test_every_chunk_comes_back_and_no_level_is_worse_than_a_lower_one(raw, dtype):
    sizes = [len(raw)]
    for level in LEVELS:
        frame = compress_chunk(memoryview(raw), dtype=dtype, level=level)
        assert frame is None or len(frame) < len(raw)
        kept = raw if frame is None else frame
        assert restored(kept, len(raw)) == raw
        sizes.append(len(kept))
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F64"])
@pytest.mark.parametrize("values", [[0.0, -0.0], [np.nan, np.inf, -np.inf, 5e-324, -1.5]])
def test_special_numbers_keep_their_bits(dtype, values):
    name = {"BF16": "<f4", "F16": "<f2", "F32": "<f4", "F64": "<f8"}[dtype]
    with np.errstate(all="ignore"):
        raw = np.resize(np.array(values), 5_000).astype(name)
    raw = raw.view("<u2")[1::2].tobytes() if dtype == "BF16" else raw.tobytes()
    for level in LEVELS:
        frame = stored(raw, dtype, level)
        assert len(frame) < len(raw) / 10
        assert restored(frame, len(raw)) == raw


@pytest.mark.parametrize(
    ("dtype", "most"), [("BF16", 0.67), ("F16", 0.85), ("F32", 0.84), ("F64", 0.84)]
)
@pytest.mark.parametrize("level", LEVELS)
def test_normal_weights_shrink_to_about_their_entropy(dtype, most, level):
    raw = weights(dtype)
    if dtype == "F64":
        raw = RNG.normal(0, 0.02, CHUNK_BYTES // 8).tobytes()
        most = 0.95
    assert len(raw) == CHUNK_BYTES
    assert len(stored(raw, dtype, level)) <= most * len(raw)


def test_zeros_and_masks_almost_vanish():
    assert len(stored(bytes(CHUNK_BYTES), "F32", "fast")) < 150
    mask = (RNG.random(CHUNK_BYTES) < 0.1).tobytes()
    assert len(stored(mask, "BOOL", "fast")) < 0.065 * len(mask)


@pytest.mark.parametrize("dtype", ["U8", "BF16", "F32", "I64", "C128"])
@pytest.mark.parametrize("level", LEVELS)
def test_noise_is_stored_as_it_is(dtype, level):
    assert compress_chunk(memoryview(RNG.bytes(CHUNK_BYTES)), dtype=dtype, level=level) is None


def test_maximum_finds_repeats_that_the_others_do_not():
    row = RNG.bytes(999)
    raw = (row * 300)[:CHUNK_BYTES]
    assert len(stored(raw, "F32", "maximum")) < 1_200
    assert len(stored(raw, "F32", "maximum")) < len(stored(raw, "F32", "fast"))


def test_no_level_means_no_frame_and_no_codec():
    assert compress_chunk(memoryview(bytes(100)), dtype="F32", level="none") is None
    assert codec_for("none", "F32") is None
    assert codec_for(CompressionLevel.FAST, "BF16") == "planes-zstd"


def test_arguments_that_cannot_be_are_refused():
    raw = memoryview(bytes(CHUNK_BYTES + 1))
    with pytest.raises(ValueError, match="raw must be at most 262144 bytes, not 262145"):
        compress_chunk(raw, dtype="F32", level="fast")
    with pytest.raises(ValueError, match="'best' is not a valid CompressionLevel"):
        compress_chunk(raw[:4], dtype="F32", level="best")
    with pytest.raises(ValueError, match="there is no dtype 'F33'"):
        compress_chunk(raw[:4], dtype="F33", level="fast")
    with pytest.raises(ValueError, match="there is no dtype 'F33'"):
        codec_for("fast", "F33")
    with pytest.raises(ValueError, match="into must be writable"):
        decompress_chunk(raw[:4], raw[:4], codec=CODEC)
    with pytest.raises(ValueError, match="into must be at most"):
        decompress_chunk(raw[:4], memoryview(bytearray(CHUNK_BYTES + 1)), codec=CODEC)


def test_views_of_wider_elements_and_read_only_memory_are_taken():
    values = np.arange(10_000, dtype="<f4")
    values.flags.writeable = False
    frame = compress_chunk(values.data, dtype="F32", level="balanced")
    into = np.empty_like(values)
    decompress_chunk(memoryview(frame), into.data, codec=CODEC)
    assert np.array_equal(into, values)
    assert frame == stored(values.tobytes(), "F32", "balanced")


def test_an_unknown_codec_is_another_version():
    with pytest.raises(IncompatibleVersionError, match="'planes-lzma' is unknown") as caught:
        check_codec("planes-lzma", path="shard-0")
    assert caught.value.path == "shard-0"
    with pytest.raises(IncompatibleVersionError):
        decompress_chunk(memoryview(b"x"), memoryview(bytearray(9)), codec="planes-lzma")


def decode_or_refuse(frame: bytes, size: int) -> bool:
    """Whether the frame decodes; anything but ``CorruptedError`` fails the test."""
    try:
        restored(frame, size)
    except CorruptedError:
        return False
    return True


SOME_FRAMES = {
    (dtype, level): (stored(raw, dtype, level), len(raw))
    for dtype, raw in {
        "BF16": weights("BF16", 4_001),
        "F32": bytes(3_000) + weights("F32", 6_000),
        "BOOL": (np.arange(5_003) % 7 == 0).tobytes(),
        "I64": np.arange(700).tobytes() + b"end",
    }.items()
    for level in LEVELS
}


@pytest.mark.parametrize("key", SOME_FRAMES, ids=str)
def test_damaged_frames_are_refused_or_decode_to_something_else(key):
    frame, size = SOME_FRAMES[key]
    assert len(frame) < size
    rng = random.Random(str(key))
    for _ in range(600):
        damaged = bytearray(frame)
        for _ in range(rng.choice([1, 1, 2, 8])):
            damaged[rng.randrange(min(len(frame), rng.choice([30, 90, len(frame)])))] = (
                rng.randrange(256)
            )
        decode_or_refuse(bytes(damaged), size)


@pytest.mark.parametrize("key", SOME_FRAMES, ids=str)
def test_frames_of_another_length_are_refused(key):
    frame, size = SOME_FRAMES[key]
    cuts = {*range(min(len(frame), 60)), *range(0, len(frame), 97), len(frame) - 1}
    assert not any(decode_or_refuse(frame[:cut], size) for cut in cuts)
    assert not decode_or_refuse(frame + b"\0", size)
    assert not decode_or_refuse(frame + bytes(size), size)
    for other in (len(frame) - 1, len(frame) + 1, size - 16, size + 16, 2 * size, 1, CHUNK_BYTES):
        assert not decode_or_refuse(frame, other)


@settings(deadline=None)
@given(frame=st.binary(max_size=300), size=st.integers(0, 5_000))
def test_any_bytes_are_refused_or_decode(frame, size):
    decode_or_refuse(frame, size)


@settings(deadline=None)
@given(
    head=st.sampled_from([1, 2, 4, 8, 0x82, 0x84, 0x88]),
    planes=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 60)), min_size=8, max_size=8),
    body=st.binary(max_size=200),
    size=st.integers(1, 2_000),
)
def test_well_formed_heads_over_any_bytes_are_refused_or_decode(head, planes, body, size):
    width = head & 0x7F
    table = b"".join(bytes([mode]) + n.to_bytes(4, "little") for mode, n in planes[:width])
    decode_or_refuse(bytes([head]) + table + body, size)


@pytest.mark.parametrize("payload", BOMBS.values(), ids=BOMBS)
def test_bombs_are_refused_without_the_memory_they_ask_for(payload):
    for mode in (1, 3):
        into = memoryview(bytearray(CHUNK_BYTES))
        frame = one_plane(mode, payload)
        tracemalloc.start()
        try:
            with pytest.raises(CorruptedError, match="cannot be decoded to its 262144") as caught:
                decompress_chunk(memoryview(frame), into, codec=CODEC, path="shard-7")
            assert tracemalloc.get_traced_memory()[1] < 4 * CHUNK_BYTES
        finally:
            tracemalloc.stop()
        assert caught.value.path == "shard-7"


def test_frames_are_decoded_as_the_format_document_says():
    exponents, signs = b"\x7f" * 50 + b"\x80" * 50, bytes([0, 1] * 50)
    packed = bytes([0b01010101] * 12 + [0b01010000])
    top = zstandard.compress(exponents)
    head = b"\x82" + struct.pack("<BIBI", 2, len(packed), 1, len(top))
    raw = restored(head + packed + top + b"!", 201)
    assert raw[-1:] == b"!"
    turned = np.frombuffer(bytes(itertools.chain(*zip(signs, exponents, strict=True))), "<u2")
    assert raw[:-1] == ((turned >> 1) | (turned << 15)).astype("<u2").tobytes()


def pairs(raw: bytes, dtype: str = "BF16", size: int = 10_000):
    view = memoryview(raw)
    return [(dtype, view[at : at + size]) for at in range(0, len(raw), size)]


def compressing_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("holdfast-compress")]


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("level", list(CompressionLevel))
def test_a_stream_keeps_its_order_and_equals_chunk_by_chunk(threads, level):
    mixed = pairs(weights("BF16", 60_000)) + pairs(RNG.bytes(30_000)) + pairs(bytes(25_000), "F32")
    found = list(compressed(iter(mixed), level=level, threads=threads))
    assert [bytes(item) for item in found] == [stored(bytes(c), d, level) for d, c in mixed]
    assert not compressing_threads()


def test_chunks_stored_as_they_are_come_back_as_themselves():
    noise = pairs(RNG.bytes(30_000))
    for (_, chunk), item in zip(noise, compressed(noise, level="maximum"), strict=True):
        assert item is chunk


def test_without_compression_every_chunk_of_a_list_comes_once():
    chunks = [("F32", memoryview(bytes([n] * 8))) for n in range(3)]
    assert [*compressed(chunks, level="none")] == [chunk for _, chunk in chunks]


def test_an_empty_stream_starts_no_thread():
    assert list(compressed([], level="fast")) == []
    assert not compressing_threads()


def test_no_more_chunks_are_taken_than_may_be_under_way():
    taken = 0

    def source():
        nonlocal taken
        for pair in pairs(bytes(400_000)):
            taken += 1
            yield pair

    for done, _ in enumerate(compressed(source(), level="fast", threads=2)):
        assert taken <= done + 1 + 4
    assert taken == 40


def test_a_buffer_may_be_reused_once_the_next_frame_is_asked_for():
    buffers = [bytearray(8_000) for _ in range(5)]
    sent = []

    def source():
        for turn in range(50):
            buffer = buffers[turn % 5]
            buffer[:] = weights("BF16", 8_000) if turn % 3 else RNG.bytes(8_000)
            sent.append(bytes(buffer))
            yield "BF16", memoryview(buffer)

    frames = compressed(source(), level="fast", threads=2)
    assert [restored(bytes(frame), 8_000) for frame in frames] == sent


def test_an_error_of_a_chunk_is_raised_in_its_turn():
    good = pairs(bytes(30_000), "F32")
    frames = compressed([*good, ("F33", good[0][1]), *good], level="fast")
    assert len([next(frames) for _ in good]) == 3
    with pytest.raises(ValueError, match="there is no dtype 'F33'"):
        next(frames)
    assert not compressing_threads()


def test_an_error_of_the_source_ends_the_stream():
    def source():
        yield from pairs(bytes(20_000))
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        list(compressed(source(), level="balanced"))
    assert not compressing_threads()


def test_a_stream_that_is_closed_early_leaves_no_thread():
    frames = compressed(pairs(weights("F32", CHUNK_BYTES)), level="maximum")
    next(frames)
    assert compressing_threads()
    frames.close()
    assert not compressing_threads()


def test_a_stream_that_is_never_closed_does_not_keep_the_interpreter_from_ending():
    program = (
        "from holdfast.format import compressed\n"
        "chunks = [('F32', memoryview(bytes(8)))] * 9\n"
        "frames = compressed(chunks, level='fast', threads=1)\n"
        "next(frames)\n"
    )
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)


def test_impossible_stream_arguments_are_refused_at_once():
    with pytest.raises(ValueError, match="threads must be a whole number, at least 1, not 0"):
        compressed([], level="fast", threads=0)
    with pytest.raises(ValueError, match="'no' is not a valid CompressionLevel"):
        compressed([], level="no")


def test_many_threads_may_compress_and_decompress_at_once():
    raws = [weights("BF16", 50_000), weights("F32", 50_000), bytes(50_000)]
    expected = [stored(raw, "F32", "balanced") for raw in raws]
    wrong = []

    def work():
        for _ in range(10):
            for raw, frame in zip(raws, expected, strict=True):
                if stored(raw, "F32", "balanced") != frame or restored(frame, len(raw)) != raw:
                    wrong.append(raw)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
