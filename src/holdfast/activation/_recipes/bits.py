"""Tensors to the last bit: NaNs, and the sign of a zero, included. Knows no graph."""

from typing import Any

import torch

from holdfast.activation._regions.found import same_memory

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_integers(tensor: Any) -> Any:
    """The bits of a tensor's elements, as integers, in the same memory."""
    tensor = tensor.detach()
    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype.is_floating_point:
        return tensor.view(_INTEGERS[tensor.itemsize])
    return tensor


def same_bits(one: Any, other: Any) -> bool:
    if one.dtype is not other.dtype or one.size() != other.size():
        return False
    if _is_plain(one) and _is_plain(other):
        return same_memory(one, other)
    return bool(torch.equal(as_integers(one), as_integers(other)))


def _is_plain(tensor: Any) -> bool:
    """Whether its elements are in memory, as they are, one after another."""
    return bool(
        tensor.__class__ in _PLAIN
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.data_ptr()  # sharded parameters give theirs away after the forward
    )


def two_values(tensor: Any) -> tuple[Any, Any] | None:
    """Where a tensor is not 0, and what it is there, if that is the same everywhere."""
    bits = as_integers(tensor)
    mask = bits.ne(0)
    value = bits.max() if bits.numel() else None
    if value is None or not torch.equal(mask, bits.eq(value)):
        return None
    return mask, value.view(tensor.dtype)
