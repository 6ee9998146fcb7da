"""Compresses a stream of chunks on several threads, in order. Knows how many are under way, not
what a codec does."""

import queue
import threading
from collections import deque
from collections.abc import Generator, Iterable

from holdfast import _checks
from holdfast._lanes import Lane, join_all
from holdfast.format._codecs import CompressionLevel, compress_chunk


class _Job:
    """One chunk, and what became of it once ``done`` is set."""

    __slots__ = ("chunk", "done", "dtype", "error", "frame")

    def __init__(self, dtype: str, chunk: memoryview) -> None:
        self.dtype = dtype
        self.chunk = chunk
        self.frame: bytes | None = None
        self.error: BaseException | None = None
        self.done = threading.Event()


def compressed(
    chunks: Iterable[tuple[str, memoryview]],
    *,
    level: CompressionLevel | str,
    threads: int = 2,
) -> Generator[bytes | memoryview, None, None]:
    """What to store for each ``(dtype, chunk)``, in order: its frame, or the chunk itself if it
    does not shrink or ``level`` is NONE.

    Takes at most ``2 * threads`` chunks ahead of the one it yields, which bounds the memory. A
    chunk's memory may be reused when the iterator is asked for what follows it, not before. An
    error is raised in its chunk's turn; an error of ``chunks`` at once. When the iterator ends,
    fails or is closed, its threads have ended: close it if you stop early.
    """
    level = CompressionLevel(level)
    _checks.count("threads", threads, least=1)
    return _run(chunks, level, threads)


def _run(
    chunks: Iterable[tuple[str, memoryview]], level: CompressionLevel, threads: int
) -> Generator[bytes | memoryview, None, None]:
    if level is CompressionLevel.NONE:
        for _, chunk in chunks:
            yield chunk
        return
    work: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
    stop = threading.Event()
    workers: list[Lane] = []
    ahead: deque[_Job] = deque()
    try:
        for dtype, chunk in chunks:
            job = _Job(dtype, chunk)
            ahead.append(job)
            work.put(job)
            if len(workers) < threads:
                name = f"holdfast-compress-{len(workers)}"
                worker = Lane(_serve, work, stop, level, name=name, daemon=True)
                workers.append(worker)  # first: an interrupt may come while it starts
                worker.start()
            if len(ahead) > 2 * threads:
                yield _result(ahead.popleft())
        while ahead:
            yield _result(ahead.popleft())
    finally:
        stop.set()
        for _ in workers:
            work.put(None)
        join_all(workers)


def _result(job: _Job) -> bytes | memoryview:
    job.done.wait()
    if job.error is not None:
        raise job.error
    return job.chunk if job.frame is None else job.frame


def _serve(
    work: queue.SimpleQueue[_Job | None], stop: threading.Event, level: CompressionLevel
) -> None:
    while (job := work.get()) is not None:
        if not stop.is_set():
            try:
                job.frame = compress_chunk(job.chunk, dtype=job.dtype, level=level)
            except BaseException as error:  # noqa: BLE001 -- raised where the result is awaited
                job.error = error
        job.done.set()
