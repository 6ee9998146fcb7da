"""What the compression levels make of weights and Adam's state, and how fast on two threads.

The state is that of a small network after a short training, in float32 and cast to bfloat16 and
float16. Sizes do not depend on the machine; a speed is that of the whole pipeline, frames dropped.
Beside them plain zstd at its default level, on as many threads, which knows nothing of numbers.
"""

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
import zstandard

from _measure import FULL, Extent, Measurement, Place, at_least, interleaved, told
from holdfast.format import CHUNK_BYTES, CompressionLevel, compressed, decompress_chunk

LEVELS = (CompressionLevel.FAST, CompressionLevel.BALANCED, CompressionLevel.MAXIMUM)
THREADS = 2
ZSTD = "zstd"
REPEATS = 9
STEPS = 100
TIMES = 4
"""How often a state is compressed to be timed: it is small."""

CODES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
SPEED_TARGETS = {CompressionLevel.BALANCED: 0.4, CompressionLevel.MAXIMUM: 0.03}

Chunks = list[tuple[str, memoryview]]


def measure(extent: Extent = FULL) -> list[Measurement]:
    found = []
    state = leaves(extent.of(STEPS))
    for name, chunks in state.items():
        sizes = {level: stored_bytes(chunks, level) for level in CompressionLevel}
        found += [ratio(name, level, sizes) for level in LEVELS]
        plain = [plain_zstd(chunks) / raw_bytes(chunks)]
        place = Place(chart=name, series="plain zstd")
        found.append(told(f"stored size of {name}, plain zstd", plain, "of raw", place=place))
    chunks = state["weights bf16"] * TIMES
    repeats = extent.repeats(REPEATS)
    ways = {level.value: partial(drain, chunks, level) for level in LEVELS}
    seconds = interleaved({**ways, ZSTD: partial(plain_zstd, chunks)}, repeats=repeats)
    found += [speed(level, chunks, seconds[level.value]) for level in LEVELS]
    name = f"compressing weights bf16, plain zstd, {THREADS} threads"
    found.append(told(name, speeds(chunks, seconds[ZSTD]), "GB/s"))
    return [*found, decoding(chunks, repeats)]


def leaves(steps: int) -> dict[str, Chunks]:
    """Chunks by what they are of. The same in every run on one machine."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Linear(256, 1536), torch.nn.GELU(), torch.nn.Linear(1536, 1536), torch.nn.GELU(),
        torch.nn.Linear(1536, 64),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    teacher = torch.randn(256, 64)
    for _ in range(steps):
        inputs = torch.randn(64, 256)
        loss = torch.nn.functional.mse_loss(network(inputs), torch.tanh(inputs @ teacher))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    weights = [p for p in network.parameters() if p.ndim > 1]
    tensors = {"weights": weights} | {
        key: [optimizer.state[p][key] for p in weights] for key in ("exp_avg", "exp_avg_sq")
    }
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    found = {
        f"{name} {kind}": chunks_of(torch.cat([t.detach().flatten() for t in parts]).to(dtype))
        for name, parts in tensors.items()
        for kind, dtype in kinds.items()
        if name == "weights" or kind != "fp16"
    }
    noise = memoryview(np.random.default_rng(0).bytes(16 * CHUNK_BYTES))
    return found | {"random bytes": list(cut(noise, "BF16"))}


def chunks_of(tensor: torch.Tensor) -> Chunks:
    raw = memoryview(tensor.contiguous().view(torch.uint8).numpy())
    return list(cut(raw, CODES[tensor.dtype]))


def cut(raw: memoryview, dtype: str) -> Iterable[tuple[str, memoryview]]:
    return ((dtype, raw[at : at + CHUNK_BYTES]) for at in range(0, len(raw), CHUNK_BYTES))


def stored_bytes(chunks: Chunks, level: CompressionLevel) -> int:
    return sum(len(item) for item in compressed(chunks, level=level, threads=THREADS))


def raw_bytes(chunks: Chunks) -> int:
    return sum(len(chunk) for _, chunk in chunks)


def plain_zstd(chunks: Chunks) -> int:
    """Every chunk as a frame of its own, as the levels do it; returns their size."""
    own = threading.local()  # a compressor is one thread's

    def size(chunk: memoryview) -> int:
        if not hasattr(own, "zstd"):
            own.zstd = zstandard.ZstdCompressor()
        return len(own.zstd.compress(chunk))

    with ThreadPoolExecutor(THREADS) as pool:
        return sum(pool.map(size, (chunk for _, chunk in chunks)))


def speeds(chunks: Chunks, seconds: list[float]) -> list[float]:
    return [raw_bytes(chunks) / each / 1e9 for each in seconds]


def drain(chunks: Chunks, level: CompressionLevel) -> None:
    for _ in compressed(chunks, level=level, threads=THREADS):
        pass


def ratio(name: str, level: CompressionLevel, sizes: dict[CompressionLevel, int]) -> Measurement:
    raw = sizes[CompressionLevel.NONE]
    lower = sizes[list(CompressionLevel)[list(CompressionLevel).index(level) - 1]]
    limit, target = lower / raw, "<= the level below"
    if level is CompressionLevel.BALANCED and name == "weights bf16":
        limit, target = min(limit, 0.70), "<= 0.70 and the level below"
    value = sizes[level] / raw
    return Measurement(
        name=f"stored size of {name}, {level.value}",
        value=value,
        unit="of raw",
        target=target,
        met=value <= limit,
        spread="exact",
        place=Place(chart=name, series=level.value),
    )


def speed(level: CompressionLevel, chunks: Chunks, seconds: list[float]) -> Measurement:
    least = SPEED_TARGETS.get(level, SPEED_TARGETS[CompressionLevel.BALANCED])
    name = f"compressing weights bf16, {level.value}, {THREADS} threads"
    return at_least(name, speeds(chunks, seconds), "GB/s", least)


def decoding(chunks: Chunks, repeats: int) -> Measurement:
    frames = [bytes(item) for item in compressed(chunks, level=CompressionLevel.BALANCED)]
    into = memoryview(bytearray(CHUNK_BYTES))

    def decode() -> None:
        for (_, chunk), frame in zip(chunks, frames, strict=True):
            decompress_chunk(memoryview(frame), into[: len(chunk)], codec="planes-zstd")

    seconds = interleaved({"decode": decode}, repeats=repeats)["decode"]
    name = "decompressing weights bf16, balanced, 1 thread"
    return at_least(name, speeds(chunks, seconds), "GB/s", 0.4)
