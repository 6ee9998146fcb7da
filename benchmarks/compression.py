"""What the compression levels make of weights and Adam's state, and how fast on two threads.

The state is that of a small network after a short training, in float32 and cast to bfloat16 and
float16. Sizes do not depend on the machine; a speed is that of the whole pipeline, frames dropped.
"""

from collections.abc import Iterable
from functools import partial

import numpy as np
import torch

from _measure import Measurement, interleaved, median, spread
from holdfast.format import CHUNK_BYTES, CompressionLevel, compressed, decompress_chunk

LEVELS = (CompressionLevel.FAST, CompressionLevel.BALANCED, CompressionLevel.MAXIMUM)
THREADS = 2
REPEATS = 9
STEPS = 100
CODES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
SPEED_TARGETS = {CompressionLevel.BALANCED: 0.4, CompressionLevel.MAXIMUM: 0.03}

Chunks = list[tuple[str, memoryview]]


def measure() -> list[Measurement]:
    found = []
    state = leaves()
    for name, chunks in state.items():
        sizes = {level: stored_bytes(chunks, level) for level in CompressionLevel}
        found += [ratio(name, level, sizes) for level in LEVELS]
    chunks = state["weights bf16"]
    seconds = interleaved(
        {level.value: partial(drain, chunks, level) for level in LEVELS}, repeats=REPEATS
    )
    found += [speed(level, chunks, seconds[level.value]) for level in LEVELS]
    return [*found, decoding(chunks)]


def leaves() -> dict[str, Chunks]:
    """Chunks by what they are of. The same in every run on one machine."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Linear(256, 1536), torch.nn.GELU(), torch.nn.Linear(1536, 1536), torch.nn.GELU(),
        torch.nn.Linear(1536, 64),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    teacher = torch.randn(256, 64)
    for _ in range(STEPS):
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
    )


def speed(level: CompressionLevel, chunks: Chunks, seconds: list[float]) -> Measurement:
    rates = [raw_bytes(chunks) / each / 1e9 for each in seconds]
    least = SPEED_TARGETS.get(level, SPEED_TARGETS[CompressionLevel.BALANCED])
    return Measurement(
        name=f"compressing weights bf16, {level.value}, {THREADS} threads",
        value=median(rates),
        unit="GB/s",
        target=f">= {least:g} GB/s",
        met=median(rates) >= least,
        spread=spread(rates),
    )


def decoding(chunks: Chunks) -> Measurement:
    frames = [bytes(item) for item in compressed(chunks, level=CompressionLevel.BALANCED)]
    into = memoryview(bytearray(CHUNK_BYTES))

    def decode() -> None:
        for (_, chunk), frame in zip(chunks, frames, strict=True):
            decompress_chunk(memoryview(frame), into[: len(chunk)], codec="planes-zstd")

    seconds = interleaved({"decode": decode}, repeats=REPEATS)["decode"]
    rates = [raw_bytes(chunks) / each / 1e9 for each in seconds]
    return Measurement(
        name="decompressing weights bf16, balanced, 1 thread",
        value=median(rates),
        unit="GB/s",
        target=">= 0.4 GB/s",
        met=median(rates) >= 0.4,
        spread=spread(rates),
    )
