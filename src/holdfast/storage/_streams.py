"""Buffer between memory and one open file, past the page cache, with several requests in flight.

Knows buffers, blocks and threads; knows no names. Direct I/O wants aligned memory, so bytes go
through a few aligned buffers that are used again and again: the copy costs a tenth of the disk's
time, and the page cache is not filled. What is in it already is read from it. Memory that lies to
its pages as the bytes do to the file's blocks is read to without a buffer.
Where a filesystem refuses direct I/O the same code runs buffered.
"""

import errno
import mmap
import queue
import threading
from collections.abc import Callable, Sequence

import numpy as np

from holdfast._lanes import Lane, join_all, run_all
from holdfast.contracts import ReadRange
from holdfast.storage._disk_threads import DiskThreads
from holdfast.storage._pages import Buffers, address_of
from holdfast.storage._ranges import ReadSpan, read_spans
from holdfast.storage._system import BLOCK_BYTES, System

BUFFER_BYTES = 4 * 1024 * 1024
IN_FLIGHT = 4
"""Requests at once for one stream, and for all that one storage reads past the page cache."""

_BUFFERS = IN_FLIGHT + 2
"""What a stream holds in memory: also what is filled while all requests are in flight. They tend
to end together, and the disk would have nothing to do until the next is filled."""

_GAP_BYTES = 64 * 1024

Buffer = memoryview


def file_buffers() -> Buffers:
    """For streams and reads: ``BUFFER_BYTES``, and a block for what a read that is not aligned
    takes in on the way."""
    return Buffers(BUFFER_BYTES + BLOCK_BYTES)


class WriteStream:
    """Appends to an open, empty file. Used by one thread; its own threads do the writing.

    The first buffer that fills starts the threads, so small files cost none. An error of theirs
    is raised by the next call.

    The threads are daemons, or a writer that somebody forgot would keep the interpreter from
    ending. Whoever finishes waits for them, so none is stopped in the middle of its work.
    """

    def __init__(self, system: System, fd: int, *, direct: bool, buffers: Buffers) -> None:
        self._system = system
        self._fd = fd
        self._direct = direct
        self._buffers = buffers
        self._current: Buffer | None = None
        self._filled = 0
        self._offset = 0
        self._most = _BUFFERS
        self._room = threading.Semaphore(self._most)
        self._work: queue.SimpleQueue[tuple[Buffer, int] | None] = queue.SimpleQueue()
        self._threads: list[Lane] = []
        self._started = 0
        self._errors: list[BaseException] = []
        self._last_will: tuple[Lane, Callable[[], None]] | None = None

    def append(self, data: memoryview) -> None:
        taken = 0
        while taken < len(data):
            if self._current is None:
                self._current = self._take_buffer()
                self._filled = 0
            part = data[taken : taken + BUFFER_BYTES - self._filled]
            copy(part, self._current[self._filled : self._filled + len(part)])
            self._filled += len(part)
            taken += len(part)
            if self._filled == BUFFER_BYTES:
                self._hand_over()

    def finish(self) -> int:
        """Write what is left and wait for the threads. Returns the number of bytes appended."""
        self._raise_error()
        size = self._offset
        if self._current is not None:
            size += self._filled
            self._write_tail(self._current)
        self._stop_threads()
        self._raise_error()
        return size

    def close(self) -> None:
        """Stop the threads; what was not written is dropped. Idempotent."""
        self.refuse()
        self._stop_threads()
        self._current = None

    def refuse(self) -> None:
        """Write nothing more, without waiting for what is being written."""
        self._errors.append(OSError(errno.ECANCELED, "the writer was given up"))

    def abandon(self, then: Callable[[], None]) -> None:
        """``close`` a stream that nobody uses any more, and do ``then``.

        Garbage is collected in any thread, in one of the stream's own too. That one cannot wait
        for itself: it ends what it is writing, and does ``then`` as its last.
        """
        this = threading.current_thread()
        if not isinstance(this, Lane) or this not in self._threads:
            self.close()
            then()
            return
        self.refuse()
        self._last_will = this, then
        for _ in self._threads:
            self._work.put(None)

    def _take_buffer(self) -> Buffer:
        """Where there is no memory for one more, the next whose bytes are written."""
        while True:
            self._room.acquire()
            self._raise_error()
            try:
                return self._buffers.take()
            except MemoryError:
                if self._most == 1:  # so none is being written
                    raise
            self._most -= 1  # what was acquired is not released: it holds one less from here on

    def _hand_over(self) -> None:
        buffer, self._current = self._current, None
        assert buffer is not None  # noqa: S101 -- for mypy
        if len(self._threads) < IN_FLIGHT:
            self._start_thread()
        if self._started:
            self._work.put((buffer, self._offset))
        else:
            self._write_buffer(buffer, self._offset)
        self._offset += BUFFER_BYTES

    def _start_thread(self) -> None:
        thread = Lane(self._write_from_queue, name="holdfast-write", daemon=True)
        self._threads.append(thread)  # first: it may begin although its start is interrupted
        try:
            thread.start()
        except (RuntimeError, MemoryError):  # none is to be had, as while the interpreter exits
            return
        self._started += 1

    def _write_from_queue(self) -> None:
        while (work := self._work.get()) is not None:
            self._write_buffer(*work)
        if self._last_will is not None and self._last_will[0] is threading.current_thread():
            self._threads.remove(self._last_will[0])
            self._stop_threads()
            self._last_will[1]()

    def _write_buffer(self, buffer: Buffer, offset: int) -> None:
        try:
            if not self._errors:
                data = buffer[:BUFFER_BYTES]
                write_all(self._system, self._fd, data, offset, direct=self._direct)
        except BaseException as error:  # noqa: BLE001 -- raised by the thread that appends
            self._errors.append(error)
        finally:
            self._buffers.give(buffer)
            self._room.release()

    def _write_tail(self, buffer: Buffer) -> None:
        size = self._filled
        if self._direct:
            size = -(-self._filled // BLOCK_BYTES) * BLOCK_BYTES
            buffer[self._filled : size] = bytes(size - self._filled)
        try:
            data = buffer[:size]
            write_all(self._system, self._fd, data, self._offset, direct=self._direct)
        finally:
            self._current = None
            self._buffers.give(buffer)

    def _stop_threads(self) -> None:
        try:
            self._end_threads()
        finally:
            try:
                self._end_threads()  # again: an interrupt may have come before it had begun to wait
            finally:
                self._threads.clear()

    def _end_threads(self) -> None:
        for _ in self._threads:
            self._work.put(None)
        join_all(self._threads)

    def _raise_error(self) -> None:
        if self._errors:
            raise self._errors[0]


def copy(source: memoryview, target: memoryview) -> None:
    """Copy bytes without holding the interpreter up, as a slice assignment would."""
    np.frombuffer(target, dtype=np.uint8)[:] = np.frombuffer(source, dtype=np.uint8)


def _undirected(
    system: System,
    fd: int,
    call: Callable[[int, memoryview, int], int],
    memory: memoryview,
    offset: int,
    *,
    direct: bool,
) -> int:
    """Do one request; buffered, from here on, if the file was opened for direct I/O but does not
    take it."""
    try:
        return call(fd, memory, offset)
    except OSError as error:
        if not direct or error.errno != errno.EINVAL:
            raise
    system.make_buffered(fd)
    return call(fd, memory, offset)


def write_all(
    system: System, fd: int, data: memoryview, offset: int, *, direct: bool = False
) -> None:
    """Write all of it: a short write is followed by the rest, no progress is an error."""
    while data:
        written = _undirected(system, fd, system.write, data, offset, direct=direct)
        if direct and written < len(data) and written % BLOCK_BYTES:
            system.make_buffered(fd)  # direct I/O can only go on at a block's start
            direct = False
        if written <= 0:
            raise OSError(errno.EIO, "the disk took no bytes and gave no reason")
        data, offset = data[written:], offset + written


def read_ranges(
    system: System,
    fd: int,
    ranges: Sequence[ReadRange],
    *,
    past_cache: bool,
    uncached: bool,
    buffers: Buffers,
    disk: DiskThreads,
) -> None:
    """Fill every range, which must lie inside the file. Neighbours are read together, long ones
    in parts, and several requests are in flight if there is work for them.

    With ``past_cache`` only what is in the page cache comes from there, and with ``uncached`` not
    even that; where a filesystem refuses direct I/O, all of it does.
    """
    spans = read_spans(ranges, max_gap=_GAP_BYTES, max_bytes=BUFFER_BYTES)
    on_disk: list[ReadSpan] = []
    if past_cache or uncached:
        cached: list[ReadSpan] = []
        for span in spans:
            found = not uncached and system.is_cached(fd, span.start, span.stop - span.start)
            (cached if found else on_disk).append(span)
        spans = cached
    run_all(
        spans,
        lambda span: _read_span(system, fd, span, direct=False, buffers=buffers)(),
        lanes=max(1, min(IN_FLIGHT, len(spans) // 2)),
    )
    if on_disk:
        direct = system.make_direct(fd)
        disk.run_all(
            on_disk,
            lambda span: _read_span(system, fd, span, direct=direct, buffers=buffers),
            lambda _, finish: finish(),
        )


def _read_span(
    system: System, fd: int, span: ReadSpan, *, direct: bool, buffers: Buffers
) -> Callable[[], None]:
    """Read it. Returns what is left to do: to copy it to where it belongs, if it is not there."""
    size = span.stop - span.start
    if not direct and len(span.targets) == 1:
        _read_exactly(system, fd, span.targets[0][1], span.start, enough=size, direct=False)
        return _nothing
    if direct and len(span.targets) == 1:
        ((_, into),) = span.targets
        if _read_straight(system, fd, span.start, into, buffers):
            return _nothing
    skipped = span.start % BLOCK_BYTES if direct else 0
    wanted = skipped + size
    aligned = -(-wanted // BLOCK_BYTES) * BLOCK_BYTES if direct else wanted
    buffer = buffers.take()
    _read_exactly(system, fd, buffer[:aligned], span.start - skipped, enough=wanted, direct=direct)

    def finish() -> None:
        for at, into in span.targets:
            copy(buffer[skipped + at : skipped + at + len(into)], into)
        buffers.give(buffer)

    return finish


def _nothing() -> None:
    pass


def _read_straight(system: System, fd: int, start: int, into: memoryview, buffers: Buffers) -> bool:
    """Read it all to where it belongs, but for what it has of its first and last block, if that
    memory lies right. ``False`` if it does not, or if the system refuses or gives less: then it is
    to be read by way of a buffer."""
    stop = start + len(into)
    head, tail = -start % BLOCK_BYTES, stop % BLOCK_BYTES
    if (address_of(into) - start) % BLOCK_BYTES or len(into) < head + tail + BLOCK_BYTES:
        return False
    if mmap.PAGESIZE != BLOCK_BYTES:  # a page would be written by two requests at once
        return False
    edges = buffers.take() if head or tail else into
    try:
        before = [edges[:BLOCK_BYTES]] if head else []
        behind = [edges[BLOCK_BYTES : 2 * BLOCK_BYTES]] if tail else []
        first = start // BLOCK_BYTES * BLOCK_BYTES
        try:
            parts = [*before, into[head : len(into) - tail], *behind]
            got = system.read_parts(fd, parts, first)
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.EFAULT}:
                raise
            return False
        if got < stop - first:
            return False
        for block in before:
            into[:head] = block[-head:]
        for block in behind:
            into[-tail:] = block[:tail]
    finally:
        if edges is not into:
            buffers.give(edges)
    return True


def _read_exactly(
    system: System, fd: int, into: memoryview, offset: int, *, enough: int, direct: bool
) -> None:
    """Read at least ``enough`` bytes. A direct read that is not a whole number of blocks met the
    end of the file, so asking for the rest fails as it should."""
    done = 0
    while done < enough:
        memory, start = into[done:], offset + done
        got = _undirected(system, fd, system.read, memory, start, direct=direct)
        if got <= 0:
            raise EOFError(f"the file ends at byte {offset + done}")
        done += got
