"""Recipes of operations that put elements elsewhere, or into another dtype, and compute nothing.

A copy's memory format is not in its node. The values are right in any; the strides of what autograd
saved tell which it was. Left out: padding with a constant (the node lacks it), and indexing with
several tensors.
"""

from typing import Any, Final

import torch

from holdfast.activation._recipes.reading import dtype_of, named, of_edge
from holdfast.activation._recipes.recipe import Arg, Recipe

aten = torch.ops.aten


def _cast_settings(node: Any) -> tuple[Any, ...]:
    return dtype_of(node), node._input_metadata[0].device  # noqa: SLF001 -- torch has no other name


def _cast(given: Any, dtype: Any, device: Any, form: Any = torch.preserve_format) -> Any:
    return aten._to_copy.default(given, dtype=dtype, device=device, memory_format=form)  # noqa: SLF001 -- what Tensor.to calls


def _clone(given: Any, form: Any = torch.contiguous_format) -> Any:
    return torch.clone(given, memory_format=form)


MOVING: Final[dict[str, Recipe]] = {
    "CloneBackward0": Recipe((Arg(None, 0),), _clone, copies=True, base_only=True),
    "ToCopyBackward0": Recipe((Arg(None, 0),), _cast, _cast_settings, copies=True),
    "CatBackward0": Recipe(
        (), lambda *given: torch.cat(given[:-1], given[-1]), named("dim"), variadic=True
    ),
    "StackBackward0": Recipe(
        (), lambda *given: torch.stack(given[:-1], given[-1]), named("dim"), variadic=True
    ),
    "RepeatBackward0": of_edge(torch.Tensor.repeat, "repeats"),
    "RollBackward0": of_edge(torch.roll, "shifts", "dims"),
    "FlipBackward0": of_edge(torch.flip, "dims"),
    "PixelShuffleBackward0": of_edge(torch.pixel_shuffle, "upscale_factor"),
    "PixelUnshuffleBackward0": of_edge(torch.pixel_unshuffle, "downscale_factor"),
    "Im2ColBackward0": of_edge(aten.im2col.default, "kernel_size", "dilation", "padding", "stride"),
    "EmbeddingBackward0": Recipe(
        (Arg(None, 0), Arg("indices")),
        aten.embedding.default,
        named("padding_idx", "scale_grad_by_freq", "sparse"),
    ),
    "IndexSelectBackward0": Recipe(
        (Arg(None, 0), Arg("index")),
        lambda x, index, dim: torch.index_select(x, dim, index),
        named("dim"),
    ),
    "GatherBackward0": Recipe(
        (Arg("self", 0), Arg("index")),
        lambda x, index, dim: torch.gather(x, dim, index),
        named("dim"),
    ),
    "ReflectionPad1DBackward0": of_edge(aten.reflection_pad1d.default, "padding"),
    "ReflectionPad2DBackward0": of_edge(aten.reflection_pad2d.default, "padding"),
    "ReflectionPad3DBackward0": of_edge(aten.reflection_pad3d.default, "padding"),
    "ReplicationPad1DBackward0": of_edge(aten.replication_pad1d.default, "padding"),
    "ReplicationPad2DBackward0": of_edge(aten.replication_pad2d.default, "padding"),
    "ReplicationPad3DBackward0": of_edge(aten.replication_pad3d.default, "padding"),
}
