"""A 2 GiB state to disk and back: holdfast beside the bare disk, torch.save, safetensors and DCP.

Everything is timed until it is durable, and read from a cold cache into memory that is already
there. The bare disk is read and written with direct I/O by 1, 2 and 4 threads, and the best of the
three is what the others are compared with: a disk's speed swings, so all of them take turns.
"""

import ctypes
import mmap
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from _measure import Measurement, interleaved, median, spread
from holdfast.catalog import Catalog

GIB = 2**30
STATE_BYTES = 2 * GIB
LEAF_BYTES = 64 * 2**20
BLOCK_BYTES = 4 * 2**20
THREADS = (1, 2, 4)
REPEATS = 9
EXTRA_MEMORY_BYTES = 128 * 2**20


def measure() -> list[Measurement]:
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=".") as folder:
        return _measure(Path(folder))


def _measure(folder: Path) -> list[Measurement]:
    random = np.random.default_rng(0)
    count = LEAF_BYTES // 4
    state = {
        f"layer{n}": random.integers(-(2**30), 2**30, count, dtype=np.int32)
        for n in range(STATE_BYTES // LEAF_BYTES)
    }
    tensors = {name: torch.from_numpy(array) for name, array in state.items()}
    into = {name: np.ones_like(array) for name, array in state.items()}
    tensors_into = {name: torch.from_numpy(array) for name, array in into.items()}
    catalog = Catalog(folder / "holdfast")
    raw = folder / "raw"
    files = {"torch.save": folder / "torch.pt", "safetensors": folder / "state.safetensors"}

    writes: dict[str, Callable[[], object]] = {
        f"raw{n}": partial(raw_write, raw, n) for n in THREADS
    }
    writes |= {
        "holdfast": lambda: catalog.write("state", state),
        "torch.save": lambda: torch_save(tensors, files["torch.save"]),
        "safetensors": lambda: safetensors_save(tensors, files["safetensors"]),
        "DCP": lambda: dcp_save(tensors, folder / "dcp"),
    }
    reads: dict[str, Callable[[], object]] = {f"raw{n}": partial(raw_read, raw, n) for n in THREADS}
    reads |= {
        "holdfast": lambda: catalog.open("state").read_into(into),
        "DCP": lambda: dcp_load(tensors_into, folder / "dcp"),
    }

    def empty(name: str) -> None:
        if name == "holdfast":
            catalog.rollback("state")
        elif name == "DCP":
            shutil.rmtree(folder / "dcp", ignore_errors=True)
        else:
            files.get(name, raw).unlink(missing_ok=True)
        os.sync()

    def cold(name: str) -> None:
        os.sync()
        for path in folder.rglob("*"):
            drop_from_cache(path)

    for call in writes.values():
        call()
    catalog.rollback("state")
    written = interleaved(writes, repeats=REPEATS, prepare=empty)
    for array in into.values():
        array[:] = 0
    read = interleaved(reads, repeats=REPEATS, prepare=cold)
    for name, array in state.items():
        if not np.array_equal(array, into[name]):
            raise AssertionError(f"{name} was not read back as it was written")
    write_extra, _ = extra_memory(lambda: catalog.write("again", state))
    read_extra, _ = extra_memory(lambda: catalog.open("again").read_into(into))

    return [
        _ratio("durable write, of the bare disk's speed", written, "raw", 0.85),
        _ratio("durable write, times as fast as torch.save + fsync", written, "torch.save", 1.0),
        _ratio("durable write, times as fast as safetensors + fsync", written, "safetensors", 1.0),
        _ratio("durable write, times as fast as DCP", written, "DCP", 1.0),
        _speed("durable write, holdfast", written["holdfast"]),
        _speed("durable write, bare disk", written[best_raw(written)]),
        _ratio("verified cold read, of the bare disk's speed", read, "raw", 0.85),
        _ratio("verified cold read, times as fast as DCP (which verifies nothing)", read, "DCP", 3),
        _speed("verified cold read, holdfast", read["holdfast"]),
        _speed("cold read, bare disk", read[best_raw(read)]),
        _memory("extra memory of the write", write_extra),
        _memory("extra memory of the read", read_extra),
    ]


def best_raw(seconds: dict[str, list[float]]) -> str:
    """The number of threads that was fastest by its median."""
    return min((f"raw{n}" for n in THREADS), key=lambda name: median(seconds[name]))


def _ratio(name: str, seconds: dict[str, list[float]], peer: str, least: float) -> Measurement:
    peer = best_raw(seconds) if peer == "raw" else peer
    pairs = [b / a for a, b in zip(seconds["holdfast"], seconds[peer], strict=True)]
    value = median(pairs)
    target = f"\N{GREATER-THAN OR EQUAL TO} {least:g}" if least != 1 else "> 1"
    return Measurement(
        name=name, value=value, unit="x", target=target, met=value >= least, spread=spread(pairs)
    )


def _speed(name: str, seconds: list[float]) -> Measurement:
    speeds = [STATE_BYTES / taken / 1e9 for taken in seconds]
    return Measurement(
        name=name, value=median(speeds), unit="GB/s", target="-", met=True, spread=spread(speeds)
    )


def _memory(name: str, extra_bytes: int) -> Measurement:
    return Measurement(
        name=name,
        value=extra_bytes / 2**20,
        unit="MiB",
        target=f"\N{LESS-THAN OR EQUAL TO} {EXTRA_MEMORY_BYTES // 2**20}",
        met=extra_bytes <= EXTRA_MEMORY_BYTES,
        spread="-",
    )


def on_threads(count: int, work: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=work, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def raw_write(path: Path, threads: int) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        os.posix_fallocate(fd, 0, STATE_BYTES)
        block = mmap.mmap(-1, BLOCK_BYTES)
        block.write(np.random.default_rng(0).bytes(BLOCK_BYTES))

        def work(first: int) -> None:
            for at in range(first * BLOCK_BYTES, STATE_BYTES, threads * BLOCK_BYTES):
                if os.pwrite(fd, block, at) != BLOCK_BYTES:
                    raise OSError("short write")

        on_threads(threads, work)
        os.fsync(fd)
    finally:
        os.close(fd)


def raw_read(path: Path, threads: int) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:

        def work(first: int) -> None:
            block = mmap.mmap(-1, BLOCK_BYTES)
            for at in range(first * BLOCK_BYTES, STATE_BYTES, threads * BLOCK_BYTES):
                if os.preadv(fd, [block], at) != BLOCK_BYTES:
                    raise OSError("short read")

        on_threads(threads, work)
    finally:
        os.close(fd)


def torch_save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())


def safetensors_save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    safetensors.torch.save_file(tensors, path)
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def dcp_save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(path), no_dist=True)


def dcp_load(tensors: dict[str, torch.Tensor], path: Path) -> None:
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(path), no_dist=True)


def drop_from_cache(path: Path) -> None:
    if path.is_file():
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def extra_memory(call: Callable[[], object]) -> tuple[int, object]:
    """How far the process's memory rose over what it was, while the call ran; and its result."""
    ctypes.CDLL(None).malloc_trim(0)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the peak so far
    result = call()
    return status("VmHWM") - before, result


def status(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)
