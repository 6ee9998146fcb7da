"""torch's fused kernels, called on parts of tensors. Knows Adam, AdamW and SGD as torch has them.

Each of them works element by element, so that a step of a part is bit for bit a part of the step.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from holdfast.precision._blocks import is_dense, laid_as
from holdfast.precision._masters import Pair, local_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The state of one parameter: what is as large as it is, and the count of its steps.
    ``is_first``: there was none before this step."""

    buffers: tuple[torch.Tensor, ...]
    step: torch.Tensor | None = None
    is_first: bool = False

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.buffers if self.step is None else (*self.buffers, self.step)


Kernel = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], Sequence[Held]], None]
"""Steps parts of masters by parts of gradients, which it may divide in place."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of optimizer that has a kernel. ``hold`` finds the state of a pair, or makes it if
    this ``is_first`` step; ``kernel`` steps parts that have all had a step before, or none, by
    gradients that are to be divided by a divisor."""

    is_first: Callable[[Optimizer, dict[str, Any], Pair], bool]
    hold: Callable[[Optimizer, dict[str, Any], Pair], Held]
    kernel: Callable[[dict[str, Any], torch.Tensor | None], Kernel]


def kind_of(inner: Optimizer) -> Kind | None:
    """``None`` if ``inner`` must step by itself: it is another optimizer or a subclass, is not
    fused, has hooks of its own, or parameters that are not FP32 or lie in memory with gaps.

    BF16 ones are there only if their masters are made of remainders."""
    kind = _KINDS.get(type(inner))
    if kind is None or has_hooks(inner) or not are_fused(inner.param_groups):
        return None
    for group in inner.param_groups:
        for parameter in group["params"]:
            local = local_of(parameter)
            if local.dtype not in {torch.float32, torch.bfloat16} or not is_dense(local):
                return None
    return kind


def are_fused(groups: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a kernel steps all of these groups, if their optimizer has one."""
    return all(group.get("fused") and not group.get("differentiable") for group in groups)


def has_hooks(inner: Optimizer) -> bool:
    """Whether its own ``step()`` does something besides: calls hooks of its own, or was replaced by
    something else than a scheduler, which only counts."""
    hooks = (inner._optimizer_step_pre_hooks, inner._optimizer_step_post_hooks)  # noqa: SLF001
    own = vars(inner).get("step")
    return any(hooks) or not (
        own is None or inspect.unwrap(own) is inspect.unwrap(type(inner).step)
    )


def _hold_adam(inner: Optimizer, group: dict[str, Any], pair: Pair) -> Held:
    if not inner.state.get(pair.master):
        _begin_adam(inner, group, pair)
    state = inner.state[pair.master]
    names = ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else []))
    return Held(buffers=_laid_out(state, names, pair), step=state["step"])


def _begin_adam(inner: Optimizer, group: dict[str, Any], pair: Pair) -> None:
    """Have torch make the state, as it would before a first step, without an FP32 gradient."""
    stand_in = pair.master
    if pair.remainder is not None:
        # Of one element: what is as large as the master for a moment leaves a hole in memory.
        one = torch.zeros((), dtype=torch.float32, device=pair.master.device)
        stand_in = nn.Parameter(one.expand(pair.master.shape))
    gradient, stand_in.grad = stand_in.grad, stand_in.detach()  # it is only asked whether it is
    inner._init_group({**group, "params": [stand_in]}, *([] for _ in range(6)))  # noqa: SLF001
    stand_in.grad = gradient
    inner.state[pair.master] = inner.state.pop(stand_in)


def _is_never_first(_inner: Optimizer, _group: dict[str, Any], _pair: Pair) -> bool:
    return False


def _adam(group: dict[str, Any], divisor: torch.Tensor | None) -> Kernel:
    beta1, beta2 = (float(beta) for beta in group["betas"])
    settings = {
        "lr": group["lr"],
        "beta1": beta1,
        "beta2": beta2,
        "weight_decay": group["weight_decay"],
        "eps": group["eps"],
        "amsgrad": group["amsgrad"],
        "maximize": group["maximize"],
        "grad_scale": divisor,
    }
    kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_

    def step(
        masters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], held: Sequence[Held]
    ) -> None:
        averages, squares, *largest = zip(*[each.buffers for each in held], strict=True)
        steps = [each.step for each in held]
        most = largest[0] if largest else []
        kernel(masters, gradients, averages, squares, most, steps, **settings)

    return step


def _is_first_of_sgd(inner: Optimizer, group: dict[str, Any], pair: Pair) -> bool:
    """Its momentum begins as the gradient, not as 0."""
    if not group["momentum"]:
        return False
    return inner.state.get(pair.master, {}).get("momentum_buffer") is None


def _hold_sgd(inner: Optimizer, group: dict[str, Any], pair: Pair) -> Held:
    if not group["momentum"]:
        return Held(buffers=())
    is_first = _is_first_of_sgd(inner, group, pair)
    state = inner.state[pair.master]
    if is_first:
        state["momentum_buffer"] = torch.empty_like(pair.master, dtype=torch.float32).detach()
    return Held(buffers=_laid_out(state, ("momentum_buffer",), pair), is_first=is_first)


def _sgd(group: dict[str, Any], divisor: torch.Tensor | None) -> Kernel:
    settings = {
        "weight_decay": group["weight_decay"],
        "momentum": group["momentum"],
        "lr": group["lr"],
        "dampening": group["dampening"],
        "nesterov": group["nesterov"],
        "maximize": group["maximize"],
        "grad_scale": divisor,
    }

    def step(
        masters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], held: Sequence[Held]
    ) -> None:
        averages = [buffer for each in held for buffer in each.buffers]
        is_first = held[0].is_first
        torch._fused_sgd_(masters, gradients, averages, is_first_step=is_first, **settings)

    return step


def _laid_out(state: dict[str, Any], names: Sequence[str], pair: Pair) -> tuple[torch.Tensor, ...]:
    """This rank's parts of state, which from now on lies in memory as the master does."""
    pattern = local_of(pair.master)
    for name in names:
        if local_of(state[name]).stride() != pattern.stride():
            state[name] = laid_as(state[name], pattern)
    return tuple(local_of(state[name]) for name in names)


_ADAM: Final = Kind(is_first=_is_never_first, hold=_hold_adam, kernel=_adam)
_KINDS: Final[dict[type, Kind]] = {
    Adam: _ADAM,
    AdamW: _ADAM,
    SGD: Kind(is_first=_is_first_of_sgd, hold=_hold_sgd, kernel=_sgd),
}
