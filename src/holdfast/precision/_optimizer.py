"""An optimizer that keeps FP32 masters of a model's 16-bit weights. Knows the order of things; what
they are is in the modules it puts together.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, final

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.errors import ValidationError
from holdfast.precision._accepting import check_arguments, refuse_ddp
from holdfast.precision._accumulating import add_up_in_fp32, refuse_ddp_when_called
from holdfast.precision._blocked_step import BlockedStep
from holdfast.precision._boundaries import Boundaries
from holdfast.precision._fallback import Rewrap, fall_back, refusal, to_fp32, to_training
from holdfast.precision._gradients import Measured, divisor_of, gradients_of
from holdfast.precision._kernels import kind_of
from holdfast.precision._masters import Masters, Pair
from holdfast.precision._naming import names_of, unwrapped
from holdfast.precision._options import MixedPrecisionOptions
from holdfast.precision._plain_step import PlainStep
from holdfast.precision._result import MixedPrecisionStats, StepResult
from holdfast.precision._scaler import DynamicLossScaler
from holdfast.precision._state import (
    MastersFrom,
    StateTree,
    apply_tree,
    listed,
    problems_of,
    tree_of,
)
from holdfast.precision._wrappers import check_sharded, is_sharded


@final
class MixedPrecisionOptimizer(Optimizer):  # type: ignore[misc]  # torch is Any here
    """Takes over a torch optimizer: its groups hold FP32 masters from now on, and the weights they
    were made for become FP16 or BF16. Schedulers take it for the optimizer it is.

    ``model`` gives names to parameters, its norms stay FP32, its buffers and frozen parameters get
    the dtype too, and what it is called with is cast. ``rewrap`` is called if a wrapped model must
    go on in FP32: it is given the model without its wrapper, and returns it wrapped anew.

    A model is wrapped in DDP afterwards. Under FSDP2 its FP32 parameters are the masters, and its
    ``MixedPrecisionPolicy`` casts them. Every rank makes the same calls. Not thread-safe.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        options: MixedPrecisionOptions | None = None,
        *,
        model: nn.Module | None = None,
        rewrap: Rewrap | None = None,
    ) -> None:
        self.options = MixedPrecisionOptions() if options is None else options
        check_arguments(optimizer, self.options, model)
        self.inner = optimizer
        self.model = model
        self.scaler = DynamicLossScaler(self.options)
        self.step_count = 0
        self.skipped_steps = 0
        self.has_fallback = False
        self._rewrap = rewrap
        self._is_unscaled = False
        self.masters = Masters(optimizer, self.options.precision.dtype, self.options.master_storage)
        self._boundaries: Boundaries | None = None
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        self._is_sharded = is_sharded(weights)
        if self._is_sharded:
            check_sharded(weights, model, self.options)
        elif model is not None:
            self._boundaries = Boundaries(unwrapped(model), self.options)
        self._adopt(names_of(optimizer.param_groups, model))
        self._refuse_ddp(self.masters.pairs)
        self._split()
        if self._boundaries is not None:
            self._boundaries.install()
            if self.options.grad_accumulation == "fp32":
                refuse_ddp_when_called(unwrapped(model), self.masters.pairs)
        # As an optimizer that is unpickled: hooks and the wrapped step, and no groups of its own.
        self.__setstate__({"defaults": optimizer.defaults})

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer inside, which hold the masters."""
        groups: list[dict[str, Any]] = self.inner.param_groups
        return groups

    @property
    def state(self) -> Any:
        """The state of the optimizer inside, by master."""
        return self.inner.state

    @property
    def master_weights(self) -> Mapping[str, torch.Tensor]:
        """The masters by name: the live ones, or, of remainders, copies."""
        return {pair.name: pair.value for pair in self.masters}

    @property
    def training_weights(self) -> Mapping[str, torch.Tensor]:
        """The model's parameters by name."""
        return {pair.name: pair.weight for pair in self.masters}

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call ``backward`` of."""
        return self.scaler.scale_loss(loss)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def unscale_(self) -> None:
        """Give the masters FP32 gradients without the loss scale (``master_weights[name].grad``),
        to be looked at, clipped or changed before ``step``. Once per step.

        A weight that is its own master has its gradient divided in place, as has one with a
        remainder.
        """
        if self._is_unscaled:
            raise RuntimeError("unscale_() was called already since the last step() or zero_grad()")
        for pair in self.masters:
            gradient = pair.weight.grad
            if gradient is None:
                continue
            if not pair.is_split:
                gradient.div_(self.scaler.scale)
            elif gradient.is_sparse:
                pair.master.grad = gradient.float().coalesce() / self.scaler.scale
            else:
                pair.master.grad = gradient.float() / self.scaler.scale
        self._is_unscaled = True

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: None = None) -> StepResult:
        """Step the masters and cast them into the weights, unless a gradient is not finite: then
        nothing is changed but the loss scale and the counts.

        The result says which. Gradients stay until ``zero_grad``; those that are FP32 are divided
        in place. Raises ``FallbackRequiresRewrapError`` if the model should go on in FP32 and
        cannot.
        """
        if closure is not None:
            raise ValueError(
                "closures are refused: step() could not undo what a closure did if its gradients "
                "overflow; call scale_loss(loss).backward() and then step()"
            )
        gradients = gradients_of(self.masters, unscaled=self._is_unscaled)
        scale = 1.0 if self._is_unscaled else self.scaler.scale
        found = self._stepping.measure(gradients, self.masters.pairs)
        result = self._result(found, scale)
        if result.applied:
            divisor = divisor_of(found.norm, scale, self.options.max_grad_norm)
            self._stepping.apply(gradients, divisor)
        self._forget_unscaled()
        self.step_count += 1
        self.skipped_steps += not result.applied
        self.scaler.update(overflow=not result.applied)
        if not self._must_fall_back():
            return result
        overflows = self.scaler.state.consecutive_overflows
        self.model = fall_back(self.masters, self._boundaries, self.model, self._rewrap, overflows)
        self._fallen_back()
        return dataclasses.replace(result, fell_back=True)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of the model's parameters, and of the masters."""
        self._forget_unscaled()
        for pair in self.masters:
            if set_to_none or pair.weight.grad is None:
                pair.weight.grad = None
            else:
                pair.weight.grad.zero_()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Raises ``ValueError`` with nothing added if the dtype of the new weights
        cannot be changed."""
        self.inner.add_param_group(param_group)
        before = len(self.masters.pairs)
        try:
            new = self.inner.param_groups[-1]
            if is_sharded(new["params"]) != self._is_sharded:
                raise ValueError("parameters are sharded by FSDP2 all of them, or none")  # noqa: TRY301
            taken = [pair.name for pair in self.masters]
            first = len(self.inner.param_groups) - 1
            names = names_of([new], self.model, taken=taken, first=first)
            self._adopt(names)
            self._refuse_ddp(self.masters.pairs[before:])
        except ValueError:
            del self.inner.param_groups[-1], self.masters.pairs[before:]
            raise
        self._split()

    def get_stats(self) -> MixedPrecisionStats:
        return MixedPrecisionStats(
            step_count=self.step_count,
            skipped_steps=self.skipped_steps,
            has_fallback=self.has_fallback,
            loss_scaler=self.scaler.get_stats(),
        )

    def state_dict(self) -> dict[str, Any]:
        """Masters, the state of the optimizer inside, scaler, counts, options, by the names of
        parameters. Tensors are the live ones. Training weights are left out: they are the masters'
        casts."""
        return {**tree_of(self).plain(), "training": {}}

    def load_state_dict(
        self, state_dict: Mapping[str, Any], *, masters_from: MastersFrom = "checkpoint"
    ) -> None:
        """Become what ``state_dict`` says, weights of the model included. All or nothing.

        ``masters_from="model"``: keep the model's weights and make the masters of them. Raises
        ``ValidationError`` with all that does not fit.
        """
        try:
            tree = StateTree.from_plain(state_dict)
        except ValueError as error:
            raise ValidationError(
                f"cannot load this state: {error}. Nothing was changed"
            ) from error
        problems = problems_of(self, tree, masters_from=masters_from)
        if problems:
            raise ValidationError(
                f"this state does not fit the optimizer; nothing was changed:{listed(problems)}"
            )
        apply_tree(self, tree, masters_from=masters_from)

    def set_fallback(self, *, fallback: bool) -> None:
        """Give the model the dtypes it has after a fallback, or before, for a state that was saved
        so. Values stay. Raises ``ValidationError`` if the model's dtype cannot change."""
        why = refusal(self.masters)
        if why is not None:
            raise ValidationError(f"the model's dtype must change, as it was when saved, but {why}")
        if fallback:
            to_fp32(self.masters, self._boundaries)
        else:
            to_training(self.masters, self._boundaries, self.options.precision.dtype)
        self.has_fallback = fallback
        self.choose_step()

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a MixedPrecisionOptimizer cannot be copied or pickled, as it is tied to its model; "
            "use state_dict() or holdfast.precision.create_checkpoint"
        )

    def _adopt(self, names: list[list[str]]) -> None:
        kept = set() if self._boundaries is None else self._boundaries.kept()
        self.masters.adopt(names, lambda weight: self._is_sharded or id(weight) in kept)

    def _refuse_ddp(self, pairs: Sequence[Pair]) -> None:
        own = {id(pair.weight) for pair in self.masters}
        rest = () if self._boundaries is None else self._boundaries.rest(own)
        if any(self.masters.changes(pair) for pair in pairs) or any(rest):
            refuse_ddp([pair.weight for pair in pairs])

    def _split(self) -> None:
        if not self.has_fallback:
            self.masters.split()
        if self._boundaries is not None:
            self._boundaries.cast_rest({id(pair.weight) for pair in self.masters})
        if self.options.grad_accumulation == "fp32":
            add_up_in_fp32(self.masters.pairs)
        self.choose_step()

    def choose_step(self) -> None:
        """Look again at how the optimizer inside is stepped, as its groups or state are others."""
        kind = kind_of(self.inner)
        self._stepping = PlainStep(self.inner) if kind is None else BlockedStep(self.inner, kind)

    def _fallen_back(self) -> None:
        self.has_fallback = True
        self.scaler.retire()
        self.choose_step()

    def _must_fall_back(self) -> bool:
        most = self.options.max_consecutive_overflows
        if most is None or self.has_fallback:
            return False
        is_narrow = self.options.precision.dtype is not torch.float32
        return is_narrow and self.scaler.state.consecutive_overflows >= most

    def _result(self, found: Measured, scale: float) -> StepResult:
        return StepResult(
            applied=not found.is_overflow,
            scale=self.scaler.scale,
            grad_norm=found.norm / scale,
            nonfinite=found.nonfinite,
        )

    def _forget_unscaled(self) -> None:
        for pair in self.masters if self._is_unscaled else ():
            if pair.is_split:
                pair.master.grad = None
        self._is_unscaled = False
