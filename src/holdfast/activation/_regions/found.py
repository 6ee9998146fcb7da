"""A tensor as it was found, so that it can be told later whether it is still the same. Knows
version counters and storages; not where tensors come from."""

import ctypes
import functools
from typing import Any, NamedTuple

import torch

UNWATCHED = -1  # a version that is not compared
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


class Parameter(NamedTuple):
    """A tensor that must not change between the forward and its replay, as it was found."""

    tensor: Any
    owner: Any  # the module's dict it was found in, or None
    key: str
    version: int
    storage: int
    requires_grad: bool


class Buffer(NamedTuple):
    owner: Any  # the module's dict it was found in
    key: str
    tensor: Any


def storage_of(tensor: Any) -> int:
    """The identity of the memory behind a tensor: it survives a resize (FSDP frees and fills the
    memory of a parameter between forward and backward), but not ``.data = other``. 0 where
    there is none to compare: wrapper subclasses such as DTensor, sparse tensors, and empty
    placeholders."""
    if tensor.__class__ in _PLAIN_TENSORS and tensor.layout is torch.strided and tensor.numel():
        try:
            cdata: int = tensor.untyped_storage()._cdata  # noqa: SLF001
        except (NotImplementedError, RuntimeError):  # an impl without storage, such as vmap's
            return 0
        return cdata
    return 0


def version_of(tensor: Any) -> int:
    """The tensor's version counter; tensors of inference mode have none."""
    version: int = 0 if tensor.is_inference() else tensor._version  # noqa: SLF001
    return version


def as_found(tensor: Any, owner: Any = None, key: str = "") -> Parameter:
    requires_grad = tensor.requires_grad
    if (
        requires_grad
        and tensor.__class__ is torch.nn.Parameter
        and tensor.layout is torch.strided
        and tensor.numel()
    ):
        # What almost all are: in no inference mode, dense, with memory.
        storage = tensor.untyped_storage()._cdata  # noqa: SLF001
        return _parameter((tensor, owner, key, tensor._version, storage, True))  # noqa: SLF001
    return Parameter(tensor, owner, key, version_of(tensor), storage_of(tensor), requires_grad)


_parameter = functools.partial(tuple.__new__, Parameter)  # half the time of Parameter()


_compared = ctypes.CDLL(None).memcmp
_compared.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def same_memory(one: Any, other: Any) -> bool:
    """Whether two contiguous tensors of the same size on the CPU hold the same bits."""
    return bool(_compared(one.data_ptr(), other.data_ptr(), one.nbytes) == 0)
