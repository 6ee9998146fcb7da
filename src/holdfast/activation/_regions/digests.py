"""Digests of tensors as autograd saves them. Knows when their values are there to be read."""

from collections import deque
from typing import Any

import torch
import xxhash

from holdfast.activation._storages import storages

LATE = 8  # tensors; more than one operator saves


def digest(tensor: Any) -> int:
    """Of the values, whatever the layout."""
    with torch.no_grad():
        plain = tensor.detach()
        if hasattr(plain, "to_local"):
            plain = plain.to_local()
        if plain.layout is not torch.strided:
            plain = plain.to_dense()
        # A copy: NumPy must not get hold of memory that FSDP frees and fills again.
        plain = plain.resolve_conj().resolve_neg().to("cpu", copy=True).contiguous()
        raw = plain.reshape(-1).view(torch.uint8).numpy()
    value: int = xxhash.xxh3_64_intdigest(raw)
    return value


class Digests:
    """Of saved tensors, in the order they are saved.

    A digest is taken a few tensors late: an operator may save a tensor and fill it then, as
    RReLU does with its noise. What has no memory any more by then, as the whole parameters of
    FSDP, has no digest.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, Any, Any]] = deque()
        self._taken: dict[int, tuple[int, Any]] = {}

    def add(self, index: int, tensor: Any, note: Any = None) -> None:
        self._waiting.append((index, tensor.detach(), note))
        if len(self._waiting) > LATE:
            self._take()

    def all(self) -> dict[int, tuple[int, Any]]:
        """By index, with what was noted."""
        while self._waiting:
            self._take()
        return self._taken

    def _take(self) -> None:
        index, tensor, note = self._waiting.popleft()
        if all(storage.nbytes() for storage in storages(tensor)) or not tensor.numel():
            self._taken[index] = (digest(tensor), note)
