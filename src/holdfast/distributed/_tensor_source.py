"""The bytes of a tensor on their way to a shard. Knows its memory on this rank, and no layouts."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

from holdfast.distributed._tensors import bytes_view, memory_of
from holdfast.format import CHUNK_BYTES, ShardEntry
from holdfast.reshard import Box

_BLOCK_BYTES: Final = 8 * 1024 * 1024
"""How much of a tensor is copied at a time where it cannot be written from its own memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSource:
    """A box of a tensor on its way to a shard: ``catalog``'s ``Source``. What is not contiguous
    memory of this process is copied block by block."""

    entry: ShardEntry
    tensor: torch.Tensor

    def chunks(self) -> Iterator[memoryview]:
        tensor = self.tensor
        if not tensor.numel():
            return
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            data = memory_of(tensor)
            if len(data) <= CHUNK_BYTES:
                yield data
                return
            for start in range(0, len(data), CHUNK_BYTES):
                yield data[start : start + CHUNK_BYTES]
            return
        yield from rechunked(memoryview(block.numpy()) for block in _blocks(tensor))


def box_of(local: torch.Tensor, box: Box) -> torch.Tensor:
    """The elements of a box of a local tensor, without a copy."""
    if box.shape == tuple(local.shape):
        return local
    return local[tuple(map(slice, box.start, box.stop))]


def _blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The elements in row-major order, as contiguous bytes in this process's memory."""
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes <= _BLOCK_BYTES or not tensor.dim():
        # A view of memory that may change is not enough: chunks are valid until they are written.
        yield bytes_view(tensor.contiguous().cpu())
        return
    rows = max(1, _BLOCK_BYTES * tensor.shape[0] // nbytes)
    for start in range(0, tensor.shape[0], rows):
        if rows > 1:
            yield bytes_view(tensor[start : start + rows].contiguous().cpu())
        else:
            yield from _blocks(tensor[start])


def rechunked(blocks: Iterable[memoryview]) -> Iterator[memoryview]:
    """Blocks cut anew into chunks; one that spans two of them is joined."""
    rest: Any = b""
    for block in blocks:
        data = block
        if rest:
            need = min(CHUNK_BYTES - len(rest), len(data))
            rest = b"".join((rest, data[:need]))
            data = data[need:]
            if len(rest) < CHUNK_BYTES:
                continue
            yield memoryview(rest)
            rest = b""
        whole = len(data) // CHUNK_BYTES * CHUNK_BYTES
        for start in range(0, whole, CHUNK_BYTES):
            yield data[start : start + CHUNK_BYTES]
        rest = bytes(data[whole:])
    if rest:
        yield memoryview(rest)
