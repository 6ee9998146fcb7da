"""Recipes of operations that only look at the same memory in another way. Knows no arithmetic.

Left out: ``as_strided``, which sees the memory and not the values, so that it would be wrong where
a tensor is made again in another layout. Views whose base was written to in place have nodes that
are in no table.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from holdfast.activation._recipes.reading import Settings, named, shape_of
from holdfast.activation._recipes.recipe import Arg, Recipe


def _view(run: Callable[..., Any], settings: Settings, *, outputs: bool = False) -> Recipe:
    return Recipe((Arg(None, 0),), run, settings, is_view=True, outputs=outputs)


def its_shape(node: Any) -> tuple[Any, ...]:
    """The shape of the result, for views that are told nothing else."""
    return (shape_of(node),)


VIEWS: Final[dict[str, Recipe]] = {
    "ViewBackward0": _view(Tensor.view, its_shape),
    "UnsafeViewBackward0": _view(Tensor.view, its_shape),
    "ExpandBackward0": _view(Tensor.expand, its_shape),
    "TBackward0": _view(Tensor.t, named()),
    "TransposeBackward0": _view(Tensor.transpose, named("dim0", "dim1")),
    "PermuteBackward0": _view(Tensor.permute, named("dims")),
    "SqueezeBackward0": _view(Tensor.squeeze, named()),
    "SqueezeBackward1": _view(Tensor.squeeze, named("dim")),
    "SqueezeBackward2": _view(Tensor.squeeze, named("dim")),
    "UnsqueezeBackward0": _view(Tensor.unsqueeze, named("dim")),
    "SliceBackward0": _view(torch.ops.aten.slice.Tensor, named("dim", "start", "end", "step")),
    "SelectBackward0": _view(torch.select, named("dim", "index")),
    "DiagonalBackward0": _view(torch.diagonal, named("offset", "dim1", "dim2")),
    "UnfoldBackward0": _view(Tensor.unfold, named("dimension", "size", "step")),
    "AliasBackward0": _view(torch.ops.aten.alias.default, named()),
    "ViewAsComplexBackward0": _view(torch.view_as_complex, named()),
    "ViewAsRealBackward0": _view(torch.view_as_real, named()),
    "UnbindBackward0": _view(torch.unbind, named("dim"), outputs=True),
    "SplitBackward0": _view(torch.split, named("split_size", "dim"), outputs=True),
    "SplitWithSizesBackward0": _view(
        torch.split_with_sizes, named("split_sizes", "dim"), outputs=True
    ),
    "UnsafeSplitBackward0": _view(torch.unsafe_split, named("split_size", "dim"), outputs=True),
}
