"""Where in memory a tensor lies, and how it is made again over a copy of that memory. Knows
storages, strides and kinds of tensors; not where copies are kept.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch

_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
_ALIGNED_BYTES: Final = 64
"""Stretches start at multiples of this, so that any dtype can be laid over a copy of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """How a tensor lies over its storage."""

    dtype: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset_bytes: int
    conjugated: bool
    negated: bool

    @classmethod
    def of(cls, tensor: Any) -> "Geometry":
        return cls(
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            strides=tuple(tensor.stride()),
            offset_bytes=tensor.storage_offset() * tensor.element_size(),
            conjugated=tensor.is_conj(),
            negated=tensor.is_neg(),
        )

    def over(self, copied: Any, start: int) -> Any:
        """The tensor again, as a view of ``copied``: bytes, the first of which lay at ``start`` of
        the storage. The view shares the version counter of the bytes."""
        with torch.inference_mode(False), torch.no_grad():
            item = self.dtype.itemsize
            typed = copied[: copied.numel() // item * item].view(self.dtype)
            offset_bytes = copied.storage_offset() + self.offset_bytes - start
            tensor = typed.as_strided(self.shape, self.strides, offset_bytes // item)
            if self.conjugated:
                tensor = tensor.conj()
            return torch._neg_view(tensor) if self.negated else tensor  # noqa: SLF001


def plain_storage(tensor: Any) -> Any:
    """The storage a tensor is nothing but a view of; ``None`` for all others: sparse, quantized,
    nested and opaque ones, wrappers such as DTensor, other subclasses, and those without data."""
    if (
        type(tensor) not in _PLAIN
        or tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.is_meta
        or not torch._C._has_storage(tensor)  # noqa: SLF001 -- as those that torch.func wraps
    ):
        return None
    return tensor.untyped_storage()


def stretch(tensor: Any, storage_bytes: int) -> tuple[int, int]:
    """The bytes of its storage to keep for a tensor, from and to: those between its first and its
    last element, or all if these are most of them. So overlapping views have one copy, and a
    small view does not bring along a large storage."""
    if not tensor.numel():
        return 0, 0
    item = tensor.element_size()
    start = tensor.storage_offset() * item
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    stop = start + (1 + sum((length - 1) * stride for length, stride in steps)) * item
    if (stop - start) * 2 >= storage_bytes:
        return 0, storage_bytes
    return start // _ALIGNED_BYTES * _ALIGNED_BYTES, stop


def stretch_bytes(storage: Any, start: int, stop: int) -> Any:
    """A stretch of a storage as a tensor of bytes, without copying; ``None`` if the storage is too
    small for it by now, as those are that FSDP frees for a while."""
    if storage.nbytes() < stop:  # torch would enlarge it
        return None
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, start, (stop - start,), (1,))


def version_of(tensor: Any) -> int:
    """A number that every change in place moves; -1 for inference tensors, which have none."""
    return -1 if tensor.is_inference() else tensor._version  # noqa: SLF001


def probe_of(tensor: Any) -> Any:
    """A tensor without memory whose version moves with that of ``tensor``; ``None`` if it has
    none. Setting ``data`` is documented to keep the version counter."""
    if tensor.is_inference():
        return None
    probe = tensor.detach()
    probe.data = tensor.new_empty(0)
    return probe
