"""Keeps bytes of an accelerator's tensors in pinned memory of the host. Knows streams and copies;
not whose bytes they are, nor when they move.
"""

from collections.abc import Callable
from typing import Any

import torch


class HostStore:
    """Copies of bytes in pinned memory, made on a stream of their own beside the computation.
    Thread-safe.

    Written to the documented behaviour of ``torch.Stream`` and ``torch.Event``.
    """

    word = "host"

    def __init__(self) -> None:
        self._streams: dict[Any, Any] = {}

    def refusal(self, device: Any) -> str | None:
        """Why tensors of a device are not for this tier; ``None`` if they are."""
        if device.type == "cpu":
            return "a CPU tensor is in the host's memory already, so moving it would save nothing"
        return None

    def mark(self, device: Any) -> Any:
        """A point in the device's work, after which what is held now is computed."""
        event = torch.Event(device=device)
        event.record(torch.accelerator.current_stream(device))
        return event

    def write(self, source: Any, mark: Any, wanted: Callable[[], bool]) -> Any:
        """Copy bytes to the host and wait until they are there; ``None`` if they are not wanted."""
        if not wanted():
            return None
        stream = self._stream(source.device)
        place = torch.empty(source.numel(), dtype=torch.uint8, device="cpu", pin_memory=True)
        with stream:
            stream.wait_event(mark)
            place.copy_(source, non_blocking=True)
        stream.synchronize()
        return place, source.device

    def read(self, place: Any) -> Any:
        """The bytes again on their device, complete when this returns."""
        kept, device = place
        stream = self._stream(device)
        with stream:
            found = kept.to(device, non_blocking=True)
        stream.synchronize()
        return found

    def is_same(self, place: Any, source: Any) -> bool:  # noqa: ARG002
        """Never known without waiting for the device, so never."""
        return False

    def hand_out(self, found: Any) -> None:
        """Tell the device's allocator that the caller's stream uses what ``read`` gave."""
        found.record_stream(torch.accelerator.current_stream(found.device))

    def free(self, place: Any) -> None:
        """Nothing to do: the memory goes with its last reference."""

    def trim(self) -> None:
        """Nothing to do: torch keeps pinned memory for the next copy."""

    def close(self) -> None:
        self._streams.clear()

    def _stream(self, device: Any) -> Any:
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.Stream(device=device)
        return stream
