"""Recipes of normalisations and softmaxes. Knows which statistics their nodes keep.

A layer norm's epsilon is not in its node. It is looked for among those that people use, and
whatever is taken must give the mean and the deviation that the node kept, to the last bit: the
result is made from these alone. Where they were rounded more than the arithmetic was (bfloat16
throughout, on a CPU), that says nothing and the output is kept.
"""

from typing import Any, Final

import torch

from holdfast.activation._recipes.bits import same_bits
from holdfast.activation._recipes.reading import dtype_of, named, setting
from holdfast.activation._recipes.recipe import Arg, Recipe

aten = torch.ops.aten

_USUAL = (1e-5, 1e-6, 1e-12, 1e-8)
_EPSILONS: Final = (
    *_USUAL,
    *(
        each
        for power in range(1, 16)
        for digit in (1, 2, 5)
        if (each := float(f"{digit}e-{power}")) not in _USUAL
    ),
    0.0,
)
_CHECKABLE = (torch.float32, torch.float64)


def _layer_norm_settings(node: Any) -> tuple[Any, ...] | None:
    if node._saved_result2.dtype not in _CHECKABLE:  # noqa: SLF001 -- the node's
        return None
    return (setting(node, "normalized_shape"),)


def _layer_norm(  # noqa: PLR0917 -- as a recipe is run
    given: Any, weight: Any, bias: Any, mean: Any, deviation: Any, shape: Any, likely: float
) -> Any:
    for epsilon in (likely, *_EPSILONS):
        result, *statistics = aten.native_layer_norm.default(given, shape, weight, bias, epsilon)
        if same_bits(statistics[0], mean) and same_bits(statistics[1], deviation):
            return result
    return None


def _layer_norm_epsilon(node: Any) -> float | None:
    given, mean, deviation = node._saved_input, node._saved_result1, node._saved_result2  # noqa: SLF001
    shape = setting(node, "normalized_shape")
    for epsilon in _EPSILONS:
        _, *statistics = aten.native_layer_norm.default(given, shape, None, None, epsilon)
        if same_bits(statistics[0], mean) and same_bits(statistics[1], deviation):
            return epsilon
    return None


def _bias_is_lost(node: Any) -> bool:
    """A bias that needs no gradient is neither saved nor has it an edge: where there is a weight,
    there may have been one."""
    return node._saved_weight is not None and node.next_functions[2][0] is None  # noqa: SLF001


def _batch_norm_settings(node: Any) -> tuple[Any, ...] | None:
    if _bias_is_lost(node):
        return None
    training, epsilon = setting(node, "training"), setting(node, "eps")
    if training:  # without the running statistics: they have been updated, once
        return None, None, True, epsilon
    # They are as they were now; a later forward in training writes to them, unseen by autograd.
    mean, variance = node._saved_running_mean, node._saved_running_var  # noqa: SLF001
    if mean is None or variance is None:
        return None
    return mean.clone(), variance.clone(), False, epsilon


def _batch_norm(  # noqa: PLR0917 -- as a recipe is run
    given: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, epsilon: float
) -> Any:
    return torch.native_batch_norm(given, weight, bias, mean, variance, training, 0.0, epsilon)[0]


def _group_norm_settings(node: Any) -> tuple[Any, ...] | None:
    if _bias_is_lost(node):
        return None
    return tuple(setting(node, name) for name in ("N", "C", "HxW", "group", "eps"))


def _softmax_settings(node: Any) -> tuple[Any, ...]:
    return setting(node, "dim"), dtype_of(node)


def _softmax(given: Any, dim: int, dtype: Any) -> Any:
    return aten._softmax.default(given, dim, given.dtype != dtype)  # noqa: SLF001 -- what softmax calls


def _log_softmax(given: Any, dim: int, dtype: Any) -> Any:
    return aten._log_softmax.default(given, dim, given.dtype != dtype)  # noqa: SLF001


def _safe_softmax(given: Any, dim: int, dtype: Any) -> Any:
    return torch._safe_softmax(given, dim, dtype=None if given.dtype == dtype else dtype)  # noqa: SLF001 -- as above


_AFFINE = (Arg("input", 0), Arg("weight", 1, optional=True))

NORMS: Final[dict[str, Recipe]] = {
    "NativeLayerNormBackward0": Recipe(
        (*_AFFINE, Arg("bias", 2, optional=True), Arg("result1"), Arg("result2")),
        _layer_norm,
        _layer_norm_settings,
        found=_layer_norm_epsilon,
    ),
    "NativeBatchNormBackward0": Recipe(
        (*_AFFINE, Arg(None, 2, optional=True)), _batch_norm, _batch_norm_settings
    ),
    "NativeGroupNormBackward0": Recipe(
        (*_AFFINE, Arg(None, 2, optional=True)),
        torch.native_group_norm,
        _group_norm_settings,
        outputs=True,
    ),
    "SoftmaxBackward0": Recipe((Arg(None, 0),), _softmax, _softmax_settings),
    "SafeSoftmaxBackward0": Recipe((Arg(None, 0),), _safe_softmax, _softmax_settings),
    "LogSoftmaxBackward0": Recipe((Arg(None, 0),), _log_softmax, _softmax_settings),
    "LogsumexpBackward0": Recipe((Arg("self", 0),), torch.logsumexp, named("dim", "keepdim")),
}
