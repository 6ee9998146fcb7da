"""Recipes of matrix products, convolutions, attention and reductions: what adds many numbers up.
Knows which of their tensors are where.

Their last bits depend on how the work is split: on threads and on the library that is used. Both
are as they were when a tensor is made again.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from holdfast.activation._recipes.reading import dtype_of, named, of_saved, setting, with_dtype
from holdfast.activation._recipes.recipe import Arg, Recipe

aten = torch.ops.aten


def _added(run: Callable[..., Any], one: str, other: str) -> Recipe:
    """A product that is added to something, which the node does not save."""
    return Recipe(
        (Arg(None, 0), Arg(one, 1), Arg(other, 2)),
        lambda x, a, b, beta, alpha: run(x, a, b, beta=beta, alpha=alpha),
        named("beta", "alpha"),
    )


_CONVOLUTION = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")


def _convolution_settings(node: Any) -> tuple[Any, ...] | None:
    had_bias = setting(node, "bias_sym_sizes_opt") not in (None, [0])
    if had_bias and node.next_functions[2][0] is None:  # it needs no gradient, and is lost
        return None
    return tuple(setting(node, name) for name in _CONVOLUTION)


def _attention_settings(node: Any) -> tuple[Any, ...] | None:
    if setting(node, "dropout_p"):
        return None
    return setting(node, "is_causal"), setting(node, "scale")


def _attention(  # noqa: PLR0917 -- as a recipe is run
    query: Any, key: Any, value: Any, mask: Any, causal: bool, scale: Any
) -> Any:
    return aten._scaled_dot_product_flash_attention_for_cpu.default(  # noqa: SLF001 -- what it is called
        query, key, value, 0.0, causal, attn_mask=mask, scale=scale
    )


def _total(run: Callable[..., Any]) -> Recipe:
    return Recipe((Arg(None, 0),), lambda x, dtype: run(x, dtype=dtype), with_dtype())


def _along(run: Callable[..., Any]) -> Recipe:
    return Recipe(
        (Arg(None, 0),),
        lambda x, dim, keepdim, dtype: run(x, dim, keepdim=keepdim, dtype=dtype),
        with_dtype("dim", "keepdim"),
    )


def _spread(run: Callable[..., Any], *, outputs: bool = False) -> Recipe:
    return Recipe(
        (Arg("self", 0),),
        lambda x, dim, correction, keepdim: run(x, dim, correction=correction, keepdim=keepdim),
        named("dim", "correction", "keepdim"),
        outputs=outputs,
    )


def _norm(x: Any, order: Any, dim: Any, keepdim: bool, dtype: Any) -> Any:
    return torch.linalg.vector_norm(x, order, dim, keepdim, dtype=dtype)


SUMS: Final[dict[str, Recipe]] = {
    "MmBackward0": Recipe((Arg("self", 0), Arg("mat2", 1)), torch.mm),
    "BmmBackward0": Recipe((Arg("self", 0), Arg("mat2", 1)), torch.bmm),
    "MvBackward0": Recipe((Arg("self", 0), Arg("vec", 1)), torch.mv),
    "AddmmBackward0": _added(torch.addmm, "mat1", "mat2"),
    "BaddbmmBackward0": _added(torch.baddbmm, "batch1", "batch2"),
    "AddmvBackward0": _added(torch.addmv, "mat", "vec"),
    "ConvolutionBackward0": Recipe(
        (Arg("input", 0), Arg("weight", 1), Arg(None, 2, optional=True)),
        aten.convolution.default,
        _convolution_settings,
    ),
    "ScaledDotProductFlashAttentionForCpuBackward0": Recipe(
        (
            Arg("query", 0),
            Arg("key", 1),
            Arg("value", 2),
            Arg("attn_mask", optional=True),
        ),
        _attention,
        _attention_settings,
        outputs=True,
    ),
    "SumBackward0": _total(torch.sum),
    "SumBackward1": _along(torch.sum),
    "MeanBackward0": _total(torch.mean),
    "MeanBackward1": _along(torch.mean),
    "VarBackward0": _spread(torch.var),
    "StdBackward0": _spread(torch.std),
    "VarMeanBackward0": _spread(torch.var_mean, outputs=True),
    "AmaxBackward0": of_saved(torch.amax, "dim", "keepdim"),
    "AminBackward0": of_saved(torch.amin, "dim", "keepdim"),
    "MaxBackward0": Recipe(
        (Arg(None, 0),),
        torch.max,
        named("dim", "keepdim"),
        outputs=True,
        saves=(("indices", 1),),
    ),
    "MinBackward0": Recipe(
        (Arg(None, 0),),
        torch.min,
        named("dim", "keepdim"),
        outputs=True,
        saves=(("indices", 1),),
    ),
    "LinalgVectorNormBackward0": Recipe(
        (Arg("self", 0),),
        _norm,
        lambda node: (
            setting(node, "ord"),
            setting(node, "dim"),
            setting(node, "keepdim"),
            dtype_of(node),
        ),
    ),
    "CumsumBackward0": Recipe(
        (Arg(None, 0),), lambda x, dim, dtype: Tensor.cumsum(x, dim, dtype=dtype), with_dtype("dim")
    ),
    "CumprodBackward0": Recipe(
        (Arg("self", 0),),
        lambda x, dim, dtype: torch.cumprod(x, dim, dtype=dtype),
        with_dtype("dim"),
    ),
    "LogcumsumexpBackward0": of_saved(torch.logcumsumexp, "dim"),
}
