"""How torch's tensors lie on this rank: dtype, layout over a mesh, local memory.

The only module that looks into DTensors. Knows no names, no files and no other ranks.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import placement_types as theirs

from holdfast.distributed._fresh import in_large_pages
from holdfast.format import DType, dtype_of
from holdfast.format._dtypes import DTYPES
from holdfast.reshard import (
    Box,
    IndexRuns,
    Layout,
    Part,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    mesh_grid,
)

_SHAPES: Final = 1024
_DEVICES: Final = 64
_PLAIN: Final = {torch.Tensor, torch.nn.Parameter}

_BY_TORCH: Final = {
    getattr(torch, dtype.torch_name): dtype
    for dtype in DTYPES.values()
    if dtype.torch_name is not None and hasattr(torch, dtype.torch_name)
}

_BY_CODE: Final = {dtype.code: torch_dtype for torch_dtype, dtype in _BY_TORCH.items()}


class Unstorable(Exception):  # noqa: N818 -- told to the caller, who knows the place
    """Why a tensor cannot be stored, in words that follow its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Like:
    """How a tensor lies on this rank: on a device, and over a mesh if there is one."""

    device: torch.device
    mesh: DeviceMesh | None = None
    placements: tuple[theirs.Placement, ...] = ()

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self:
        if isinstance(tensor, DTensor):
            return cls(
                device=local_of(tensor).device,
                mesh=tensor.device_mesh,
                placements=tuple(tensor.placements),
            )
        return cls.on(tensor.device)

    @classmethod
    @functools.lru_cache(maxsize=_DEVICES)
    def on(cls, device: torch.device) -> Self:
        """All of a tensor on one device. There are very many, so they are one."""
        return cls(device=device)

    def layout(self, dims: int, rank_of: Callable[[int], int]) -> Layout | None:
        """The same for a tensor of that many dimensions in words of ``reshard``; ``None`` if every
        rank holds all of it. ``rank_of`` numbers the mesh's ranks as the coordinator does."""
        if self.mesh is None:
            return None
        ranks = [rank_of(rank) for rank in self.mesh.mesh.flatten().tolist()]
        return Layout(
            mesh_shape=tuple(self.mesh.mesh.shape),
            ranks=IndexRuns.of(ranks),
            placements=tuple(_placement(placement, dims) for placement in self.placements),
        )

    def shard_coordinate(self) -> tuple[int, ...]:
        """Where this rank is along the mesh dimensions that cut: equal for ranks that hold the
        same."""
        at = None if self.mesh is None else self.mesh.get_coordinate()
        return tuple(
            index
            for index, placement in zip(at or (), self.placements, strict=False)
            if not isinstance(placement, theirs.Replicate)
        )

    def parts(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[Part, ...]]:
        """The shape of this rank's array, and the parts of the tensor that are in it; those without
        an element are left out."""
        if self.mesh is None:
            return shape, _whole(shape)
        coordinate = self.mesh.get_coordinate()
        if coordinate is None:
            return (0,), ()
        grid = mesh_grid(
            shape,
            tuple(self.mesh.mesh.shape),
            tuple(_placement(placement, len(shape)) for placement in self.placements),
        )
        parts = tuple(part for part in grid.parts(coordinate) if not part.box.is_empty)
        return tuple(grid.local_shape(tuple(coordinate))), parts


@functools.lru_cache(maxsize=_SHAPES)
def _whole(shape: tuple[int, ...]) -> tuple[Part, ...]:
    """All of a tensor. Of the same few shapes there may be very many."""
    box = Box.whole(shape)
    return () if box.is_empty else (Part(box=box, local=box, array_shape=shape),)


def address(value: Any) -> int:
    """Where the memory of a tensor on this rank begins, or that of an array; 0 if it has none."""
    if isinstance(value, np.ndarray):
        return int(value.__array_interface__["data"][0]) if value.size else 0
    local = value._local_tensor if isinstance(value, DTensor) else value  # noqa: SLF001 -- as local_of
    try:
        return local.data_ptr()  # type: ignore[no-any-return]
    except (NotImplementedError, RuntimeError):  # a tensor without storage
        return 0


def home(value: Any) -> int:
    """Where the memory begins that a tensor is in, and others may be in; 0 if it has none."""
    local = value._local_tensor if isinstance(value, DTensor) else value  # noqa: SLF001 -- as local_of
    try:
        return local.untyped_storage().data_ptr()  # type: ignore[no-any-return]
    except (NotImplementedError, RuntimeError):  # a tensor without storage
        return 0


def identity(value: Any) -> tuple[Any, ...]:
    """Equal for two tensors or arrays that are the same memory seen in the same way."""
    if isinstance(value, np.ndarray):
        start = value.__array_interface__["data"][0] if value.size else id(value)
        return (start, value.shape, value.strides, value.dtype)
    local = getattr(value, "_local_tensor", value)
    try:
        start = local.data_ptr()
        if not local.numel():  # an empty part of a tensor may be tied, too
            start = local.untyped_storage()._cdata  # noqa: SLF001 -- there even where there is no data
    except (NotImplementedError, RuntimeError):  # a tensor without storage: it is refused later
        return (id(value),)
    return (
        start,
        local.is_conj(),
        local.is_neg(),
        value.dtype,
        value.shape,
        local.stride(),
        getattr(value, "placements", None),
    )


def code_of(dtype: torch.dtype) -> DType:
    """The format's type for a torch dtype; ``Unstorable`` if it has none."""
    try:
        return _BY_TORCH[dtype]
    except KeyError:
        raise Unstorable(f"is of dtype {dtype}, which the format does not have") from None


def torch_dtype(code: str) -> torch.dtype | None:
    """The torch dtype of a code; ``None`` where the installed torch has none."""
    dtype_of(code)
    return _BY_CODE.get(code)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor on this rank, without its history: that of a DTensor may be empty."""
    if isinstance(tensor, DTensor):
        return tensor._local_tensor.detach()  # noqa: SLF001 -- to_local() may wait for collectives
    if type(tensor) is torch.Tensor and not tensor.requires_grad:
        return tensor
    return tensor.detach()


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether its memory here may be a part of it."""
    return isinstance(tensor, DTensor)


def global_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def check_storable(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's memory of a tensor that is to be saved, or ``Unstorable``."""
    if tensor.is_quantized:
        raise Unstorable("is a quantized tensor; store its dequantize() or int_repr()")
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise Unstorable(f"is a {tensor.layout} tensor; only dense ones are stored, as to_dense()")
    local = local_of(tensor)
    if local.device.type == "meta":
        raise Unstorable("is on the meta device: it has no values to store")
    if type(local) is not torch.Tensor:
        raise Unstorable(
            f"is a {type(local).__module__}.{type(local).__qualname__}, whose values only its own "
            "library can tell; convert it to a plain tensor first"
        )
    if isinstance(tensor, DTensor):
        shape, _ = Like.of(tensor).parts(global_shape(tensor))
        if tensor.device_mesh.get_coordinate() is not None and tuple(local.shape) != shape:
            raise Unstorable(
                f"has a local part of shape {tuple(local.shape)} where its placements "
                f"{tensor.placements} make {shape}"
            )
    if not has_memory(local):
        raise Unstorable("has no values: its memory was given back (untyped_storage().resize_(0))")
    if local.is_conj() or local.is_neg():
        local = local.resolve_conj().resolve_neg()
    return local


def unfillable(tensor: torch.Tensor) -> str | None:
    """Why no values can be put into a tensor, after its name."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return f"is a {tensor.layout} tensor; only dense ones are loaded, as to_dense()"
    if not tensor.is_meta and not has_memory(local_of(tensor)):
        return "has no memory: it was given back (untyped_storage().resize_(0))"
    return None


def has_memory(local: torch.Tensor) -> bool:
    """Whether all elements are there. To read what was given back could end the process. Of other
    layouts and kinds of tensors only they themselves know: ``True``."""
    if local.layout is not torch.strided or type(local) not in _PLAIN or not local.numel():
        return True
    last = local.storage_offset()
    for length, stride in zip(local.shape, local.stride(), strict=True):
        last += (length - 1) * stride
    return bool((last + 1) * local.element_size() <= local.untyped_storage().nbytes())


def memory_of(local: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in this process's memory."""
    if not local.numel():
        return memoryview(b"")
    return memoryview(local.reshape(-1).view(torch.uint8).numpy())


def bytes_view(local: torch.Tensor) -> torch.Tensor:
    """The same as a tensor of bytes."""
    return local.reshape(-1).view(torch.uint8)


def known_dtype(code: str) -> torch.dtype:
    """The torch dtype of a stored type; ``Unstorable`` if the installed torch has none."""
    dtype = torch_dtype(code)
    if dtype is None:
        raise Unstorable(
            f"is stored as {code}, which the installed torch {torch.__version__} lacks"
        )
    return dtype


def empty_local(shape: Sequence[int], code: str) -> torch.Tensor:
    """Memory of this process for an array of a stored type."""
    return in_large_pages(torch.empty(tuple(shape), dtype=known_dtype(code), device="cpu"))


def wrap(local: torch.Tensor, like: Like, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of that whole shape whose part on this rank is ``local``."""
    if like.mesh is None:
        return local
    stride = tuple(_row_major(shape))
    return DTensor.from_local(
        local,
        like.mesh,
        like.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=stride,
    )


def _placement(placement: theirs.Placement, dims: int) -> Placement:
    match placement:
        case theirs.Replicate():
            return Replicate()
        case theirs._StridedShard():  # noqa: SLF001 -- what FSDP2 over TP makes; it has no other name
            return StridedShard(placement.dim % dims, int(placement.split_factor))
        case theirs.Shard():
            return Shard(placement.dim % dims)
    raise Unstorable(
        f"is a DTensor with placement {placement}: no rank holds its values; redistribute it first"
    )


def _row_major(shape: Sequence[int]) -> list[int]:
    strides = [1, *itertools.accumulate((max(n, 1) for n in reversed(shape[1:])), int.__mul__)]
    return strides[::-1] if shape else []
