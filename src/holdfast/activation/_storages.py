"""The memory behind a tensor. Knows storages and where torch hides them, not who keeps them."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_PLAIN = (torch.Tensor, torch.nn.Parameter)

_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def storages(tensor: Any) -> list[Any]:
    """Each storage that holds values of ``tensor``, once.

    Those of the inner tensors of a wrapper such as DTensor, and of the parts of a sparse tensor.
    None for a tensor without memory (meta, fake) or with memory that torch does not show (mkldnn).
    """
    if type(tensor) in _PLAIN:
        return _storages(tensor)
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 -- torch has no other name for it
        return _storages(tensor)


def memory_bytes(value: object) -> int:
    """The memory behind all tensors in ``value``, each storage once: a tensor, or lists, tuples
    and dicts of them."""
    found = {storage._cdata: storage for each in _tensors(value) for storage in storages(each)}  # noqa: SLF001 -- the identity of a storage
    return sum(int(storage.nbytes()) for storage in found.values())


def _tensors(value: object) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple | Mapping):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(each)


def _storages(tensor: Any) -> list[Any]:
    if is_traceable_wrapper_subclass(tensor):
        # The wrapper's own storage has a size, but no memory.
        return _once(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    if torch._C._has_storage(tensor):  # noqa: SLF001 -- the only question that does not raise
        storage = tensor.untyped_storage()
        return [] if storage.device.type == "meta" else [storage]
    return _once(getattr(tensor, name)() for name in _PARTS.get(tensor.layout, ()))


def _once(tensors: Any) -> list[Any]:
    found = {
        storage._cdata: storage  # noqa: SLF001 -- the identity of a storage
        for tensor in tensors
        if isinstance(tensor, torch.Tensor)
        for storage in _storages(tensor)
    }
    return list(found.values())
