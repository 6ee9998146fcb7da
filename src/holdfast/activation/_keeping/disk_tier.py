"""Keeps bytes of tensors in a scratch file. Knows places in the file and digests; not whose bytes
they are, nor when they move.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
import xxhash

from holdfast.activation._keeping.extents import Extents
from holdfast.activation._keeping.scratch import REQUEST_BYTES, ScratchFile
from holdfast.errors import CorruptedError
from holdfast.storage._pages import aligned_memory
from holdfast.storage._system import BLOCK_BYTES

_CPU: Final = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskPlace:
    """Where in the file something lies. ``room`` is what it takes there, ``size_bytes`` what it
    is."""

    offset: int
    room: int
    size_bytes: int
    digest: bytes
    device: Any


class DiskStore:
    """Copies of bytes in one file. Thread-safe, but only one thread may write.

    A digest goes with every copy: bytes that came back changed are an error, not a gradient.
    """

    word = "disk"

    def __init__(self, file: ScratchFile) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._extents = Extents()
        self._staging: memoryview | None = None

    def refusal(self, device: Any) -> str | None:  # noqa: ARG002 -- the host tier looks at it
        """Why tensors of a device are not for this tier; ``None`` if they are."""
        return None

    def mark(self, device: Any) -> Any:
        """A point in the device's work, after which what is held now is computed."""
        if device.type == "cpu":
            return None
        event = torch.Event(device=device)
        event.record(torch.accelerator.current_stream(device))
        return event

    def write(self, source: Any, mark: Any, wanted: Callable[[], bool]) -> DiskPlace | None:
        """Copy bytes to the file; ``None`` if they were not wanted to the end. ``OSError`` if the
        disk did not take them; then nothing is kept of them."""
        if mark is not None:
            mark.synchronize()
        size_bytes = source.numel()
        room = -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
        with self._lock:
            offset = self._extents.take(room)
        digest = None
        try:
            digest = self._copy(source, offset, wanted)
        finally:
            if digest is None:
                with self._lock:
                    self._extents.give(offset, room)
        if digest is None:
            return None
        return DiskPlace(
            offset=offset, room=room, size_bytes=size_bytes, digest=digest, device=source.device
        )

    def read(self, place: DiskPlace) -> Any:
        """The bytes again, with up to a block of others behind them, on the device they came
        from. ``OSError`` or ``CorruptedError`` if they cannot be had."""
        with torch.inference_mode(False):
            slack = torch.empty(place.room + BLOCK_BYTES, dtype=torch.uint8, device=_CPU)
            start = -slack.data_ptr() % BLOCK_BYTES
            found = slack[start : start + place.room]
        memory = memoryview(found.numpy())
        for at in range(0, place.room, REQUEST_BYTES):
            self._file.read(memory[at : at + REQUEST_BYTES], place.offset + at)
        self._file.uncache(place.offset, place.room, written=False)
        if xxhash.xxh3_128_digest(memory[: place.size_bytes]) != place.digest:
            raise CorruptedError(
                f"{place.size_bytes} bytes of the disk tier's scratch file are not what was "
                "written there"
            )
        return found if place.device == _CPU else found.to(place.device)

    def is_same(self, place: DiskPlace, source: Any) -> bool:
        """Whether what was written is what ``source`` holds now. Looks at all of it."""
        if source.device != _CPU or source.numel() != place.size_bytes:
            return False
        return bool(xxhash.xxh3_128_digest(memoryview(source.numpy())) == place.digest)

    def hand_out(self, found: Any) -> None:
        """Tell the device's allocator that the caller's stream uses what ``read`` gave."""
        if found.device != _CPU:
            found.record_stream(torch.accelerator.current_stream(found.device))

    def free(self, place: DiskPlace) -> None:
        """Let the room be used again. Never waits for the disk."""
        with self._lock:
            self._extents.give(place.offset, place.room)

    def trim(self) -> None:
        """Give the room behind the last place in use back to the disk. Not while writing."""
        with self._lock:
            end = self._extents.end
        self._file.shorten(end)  # outside the lock: freeing must not wait for the disk

    def close(self) -> None:
        """The file is gone. Idempotent; nobody may be reading or writing."""
        self._file.close()
        self._staging = None

    def _copy(self, source: Any, offset: int, wanted: Callable[[], bool]) -> bytes | None:
        if self._staging is None:
            self._staging = aligned_memory(REQUEST_BYTES)
        staging = self._staging
        digest = xxhash.xxh3_128()
        for at in range(0, source.numel(), REQUEST_BYTES):
            if not wanted():
                return None
            part = source[at : at + REQUEST_BYTES]
            size = part.numel()
            room = -(-size // BLOCK_BYTES) * BLOCK_BYTES
            # NumPy's copy lets other Python threads run and starts no threads of its own.
            np.frombuffer(staging, dtype=np.uint8)[:size] = part.to(_CPU).numpy()
            staging[size:room] = bytes(room - size)
            digest.update(staging[:size])
            self._file.write(staging[:room], offset + at)
        self._file.uncache(offset, source.numel(), written=True)
        return digest.digest()
