"""Recipes of operations that work on each element alone. Knows how their nodes name things.

Left out, because the node lacks a number: a number added or subtracted (``x + 1.0``, ``1 - x``),
``masked_fill`` and ``threshold`` (the value), ``nan_to_num`` (its three), ``where`` with a number.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch

from holdfast.activation._recipes.reading import Settings, named, of_edge, of_saved, with_dtype
from holdfast.activation._recipes.recipe import Arg, Recipe

aten = torch.ops.aten


def _as(dtype: Any, result: Any) -> Any:
    """An operation in place rounds to the dtype of the tensor it writes to."""
    return result if result.dtype is dtype else result.to(dtype)


def _typed(run: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: _as(given[-1], run(*given[:-1]))


def _of_two(
    run: Callable[..., Any], one: str | None, other: str | None, settings: Settings
) -> Recipe:
    return Recipe((Arg(one, 0), Arg(other, 1)), _typed(run), settings)


_RESULTS: dict[str, Recipe] = {  # their nodes keep the result, or nothing
    "NegBackward0": of_edge(torch.neg),
    "SqrtBackward0": of_edge(torch.sqrt),
    "RsqrtBackward0": of_edge(torch.rsqrt),
    "ReciprocalBackward0": of_edge(torch.reciprocal),
    "ExpBackward0": of_edge(torch.exp),
    "Exp2Backward0": of_edge(torch.exp2),
    "Expm1Backward0": of_edge(torch.expm1),
    "TanBackward0": of_edge(torch.tan),
    "TanhBackward0": of_edge(torch.tanh),
    "SigmoidBackward0": of_edge(torch.sigmoid),
    "ReluBackward0": of_edge(torch.relu),
    "EluBackward1": of_edge(aten.elu.default, "alpha", "scale", "input_scale"),
    "CeluBackward1": of_edge(torch.celu, "alpha"),
    "LeakyReluBackward1": of_edge(aten.leaky_relu.default, "negative_slope"),
    "TrilBackward0": of_edge(torch.tril, "diagonal"),
    "TriuBackward0": of_edge(torch.triu, "diagonal"),
}

_INPUTS: dict[str, Recipe] = {  # their nodes keep what they were given
    "AbsBackward0": of_saved(torch.abs),
    "LogBackward0": of_saved(torch.log),
    "Log2Backward0": of_saved(torch.log2),
    "Log10Backward0": of_saved(torch.log10),
    "Log1PBackward0": of_saved(torch.log1p),
    "SinBackward0": of_saved(torch.sin),
    "CosBackward0": of_saved(torch.cos),
    "SinhBackward0": of_saved(torch.sinh),
    "CoshBackward0": of_saved(torch.cosh),
    "AtanBackward0": of_saved(torch.atan),
    "ErfBackward0": of_saved(torch.erf),
    "ErfcBackward0": of_saved(torch.erfc),
    "PowBackward0": of_saved(torch.pow, "exponent"),
    "ClampBackward1": of_saved(torch.clamp, "min", "max"),
    "ClampMinBackward0": of_saved(torch.clamp_min, "min"),
    "ClampMaxBackward0": of_saved(torch.clamp_max, "max"),
    "LogitBackward0": of_saved(torch.logit, "eps"),
    "GeluBackward0": of_saved(lambda x, how: aten.gelu.default(x, approximate=how), "approximate"),
    "SiluBackward0": of_saved(aten.silu.default),
    "MishBackward0": of_saved(aten.mish.default),
    "EluBackward0": of_saved(aten.elu.default, "alpha", "scale", "input_scale"),
    "CeluBackward0": of_saved(torch.celu, "alpha"),
    "LeakyReluBackward0": of_saved(aten.leaky_relu.default, "negative_slope"),
    "SoftplusBackward0": of_saved(aten.softplus.default, "beta", "threshold"),
    "HardswishBackward0": of_saved(aten.hardswish.default),
    "HardsigmoidBackward0": of_saved(aten.hardsigmoid.default),
    "HardtanhBackward0": of_saved(aten.hardtanh.default, "min_val", "max_val"),
    "HardshrinkBackward0": of_saved(torch.hardshrink, "lambd"),
    "SoftshrinkBackward0": of_saved(aten.softshrink.default, "lambd"),
}

_OF_TWO: dict[str, Recipe] = {
    "AddBackward0": _of_two(
        lambda x, y, alpha: torch.add(x, y, alpha=alpha), None, None, with_dtype("alpha")
    ),
    "SubBackward0": _of_two(
        lambda x, y, alpha: torch.sub(x, y, alpha=alpha), None, None, with_dtype("alpha")
    ),
    "MulBackward0": _of_two(torch.mul, "self", "other", with_dtype()),
    "DivBackward0": _of_two(torch.div, "self", "other", with_dtype()),
    "DivBackward2": _of_two(
        lambda x, y, mode: torch.div(x, y, rounding_mode=mode),
        "self",
        "other",
        with_dtype("rounding_mode"),
    ),
    "PowBackward1": _of_two(torch.pow, "self", "exponent", with_dtype()),
    "Atan2Backward0": _of_two(torch.atan2, "self", "other", with_dtype()),
    "LerpBackward0": _of_two(torch.lerp, None, None, with_dtype("weight")),
}

_OTHERS: dict[str, Recipe] = {  # without a form in place that anyone uses
    "RsubBackward0": Recipe(
        (Arg(None, 0), Arg(None, 1)),
        lambda x, y, alpha: torch.rsub(x, y, alpha=alpha),
        named("alpha"),
    ),
    "MulBackward1": of_edge(aten.mul.Scalar, "other"),
    "DivBackward1": of_edge(aten.div.Scalar, "other"),
    "PowBackward2": Recipe(
        (Arg("exponent", 0),), lambda x, base: torch.pow(base, x), named("self")
    ),
    "MaximumBackward0": Recipe((Arg("self", 0), Arg("other", 1)), torch.maximum),
    "MinimumBackward0": Recipe((Arg("self", 0), Arg("other", 1)), torch.minimum),
    "FmaxBackward0": Recipe((Arg("self", 0), Arg("other", 1)), torch.fmax),
    "FminBackward0": Recipe((Arg("self", 0), Arg("other", 1)), torch.fmin),
    "ClampBackward0": Recipe(
        (Arg("self", 0), Arg("min", 1, optional=True), Arg("max", 2, optional=True)), torch.clamp
    ),
    "WhereBackward0": Recipe((Arg("condition"), Arg(None, 0), Arg(None, 1)), torch.where),
    "MaskedFillBackward1": Recipe(
        (Arg(None, 0), Arg("mask"), Arg(None, 1)), aten.masked_fill.Tensor
    ),
    "LerpBackward1": Recipe((Arg("self", 0), Arg("end", 1), Arg("weight", 2)), torch.lerp),
    "AddcmulBackward0": Recipe(
        (Arg(None, 0), Arg("tensor1", 1), Arg("tensor2", 2)),
        lambda x, y, z, value: torch.addcmul(x, y, z, value=value),
        named("value"),
    ),
    "AddcdivBackward0": Recipe(
        (Arg(None, 0), Arg("tensor1", 1), Arg("tensor2", 2)),
        lambda x, y, z, value: torch.addcdiv(x, y, z, value=value),
        named("value"),
    ),
    "LogSigmoidBackward0": of_saved(torch.nn.functional.logsigmoid),
    "GluBackward0": of_saved(aten.glu.default, "dim"),
    "PreluKernelBackward0": Recipe((Arg("self", 0), Arg("weight", 1)), torch._prelu_kernel),  # noqa: SLF001 -- what F.prelu calls
    "ComplexBackward0": Recipe((Arg("real", 0), Arg("imag", 1)), torch.complex),
    "NativeDropoutBackward0": Recipe(
        (Arg(None, 0), Arg("result1")),
        lambda x, mask, p: x * mask.to(x.dtype).mul_(0.0 if p == 1 else 1 / (1 - p)),
        named("p"),
    ),
}

POINTWISE: Final[dict[str, Recipe]] = {
    **{
        kind: replace(recipe, in_place=True)
        for table in (_RESULTS, _INPUTS, _OF_TWO)
        for kind, recipe in table.items()
    },
    **_OTHERS,
}
