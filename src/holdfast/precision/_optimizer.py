"""An optimizer that keeps FP32 masters of a model's 16-bit weights. Knows the order of things; what
they are is in the modules it puts together."""

import dataclasses
import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn, final

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.errors import ValidationError
from holdfast.precision._accepting import (
    check_arguments,
    refuse_closure,
    refuse_ddp,
    refuse_other_model,
    warn,
)
from holdfast.precision._accumulating import add_up_in_fp32, refuse_ddp_when_called
from holdfast.precision._boundaries import Boundaries
from holdfast.precision._fallback import Rewrap, is_due, must_rewrap, refusal, to_fp32, to_training
from holdfast.precision._gradients import divisor_of, gradients_of
from holdfast.precision._loading import load_state, state_of
from holdfast.precision._masters import Masters, Pair
from holdfast.precision._naming import names_of, unwrapped
from holdfast.precision._options import MixedPrecisionOptions
from holdfast.precision._result import MixedPrecisionStats, StepResult, stats_of
from holdfast.precision._scaler import DynamicLossScaler
from holdfast.precision._state import MastersFrom
from holdfast.precision._stepping import Stepping, stepping_of
from holdfast.precision._unscaling import Unscaling
from holdfast.precision._wrappers import check_sharded, is_sharded, share_masters

if TYPE_CHECKING:
    from holdfast.precision._moment import Moment

_log: Final = logging.getLogger("holdfast.precision")


@final
class MixedPrecisionOptimizer(Optimizer):  # type: ignore[misc]  # torch is Any here
    """Takes over a torch optimizer: its groups hold FP32 masters from now on, and the weights they
    were made for become FP16 or BF16. Schedulers take it for the optimizer it is.

    ``model`` gives names to parameters, its norms stay FP32, its buffers and frozen parameters get
    the dtype too, and what it is called with is cast. ``rewrap`` is called if a model under DDP
    must go on in FP32: it is given the model without its wrapper, and returns it wrapped anew.

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
        self.moments: weakref.WeakSet[Moment] = weakref.WeakSet()
        self._rewrap = rewrap
        self.unscaling = Unscaling()
        self._has_shared = False
        self.masters = Masters(optimizer, self.options.precision.dtype, self.options.master_storage)
        self._boundaries: Boundaries | None = None
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        self._is_sharded = is_sharded(weights)
        refuse_other_model(weights, model)
        if self._is_sharded:
            check_sharded(weights, model, self.options)
        elif model is not None:
            self._boundaries = Boundaries(unwrapped(model), self.options)
        self._adopt(names_of(optimizer.param_groups, model))
        self._refuse_ddp(self.masters.pairs)
        warn(weights, self.options)
        self._split()
        if self._boundaries is not None:
            self._boundaries.install()
            if self.options.grad_accumulation == "fp32":
                refuse_ddp_when_called(unwrapped(model), self.masters.pairs)
        optimizer._is_taken_over = True  # noqa: SLF001
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
        """The masters by name: the live ones, or copies, of remainders and of weights that
        something else than a step has written to."""
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
        """Make the gradients of the model's parameters FP32, without the loss scale, to be looked
        at, clipped or changed before ``step``. Once per step. Those of the masters are the same."""
        self.unscaling.show(self.masters, self.scaler.scale)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: None = None) -> StepResult:
        """Step the masters and cast them into the weights, unless a gradient is not finite: then
        nothing is changed but the loss scale and the counts.

        The result says which. Gradients stay until ``zero_grad``; those that are FP32 are divided
        in place. Raises ``FallbackRequiresRewrapError`` if the model should go on in FP32 and
        cannot.
        """
        refuse_closure(closure)
        gradients = gradients_of(self.masters, self.unscaling.gradient)
        self.before_change()
        for pair in self.masters:
            pair.follow()
        if not self._has_shared:  # a model is wrapped after the optimizer was made
            share_masters(self.masters.pairs)
        self._has_shared = True
        if gradients:
            self.scaler.check_heeded()
        scale = 1.0 if self.unscaling.is_done else self.scaler.scale
        if not self._stepping.is_right():
            self.choose_step()
        found = self._stepping.measure(gradients, self.masters.pairs)
        result = StepResult(
            applied=not found.is_overflow,
            scale=self.scaler.scale,
            grad_norm=found.norm / scale,
            nonfinite=found.nonfinite,
        )
        if result.applied:
            divisor = divisor_of(found.norm, scale, self.options.max_grad_norm)
            self._stepping.apply(gradients, divisor)
        self.unscaling.end(self.masters)
        self.step_count += 1
        self.skipped_steps += not result.applied
        self.scaler.update(overflow=not result.applied)
        if self.has_fallback or not is_due(self.options, self.scaler.state):
            return result
        self._fall_back()
        return dataclasses.replace(result, fell_back=True)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of the model's parameters, and of the masters."""
        self.unscaling.end(self.masters)
        for pair in self.masters:
            if set_to_none or pair.weight.grad is None:
                pair.weight.grad = None
            else:
                pair.weight.grad.zero_()
            if pair.is_split:
                pair.master.grad = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Raises ``ValueError`` with nothing added if the dtype of the new weights
        cannot be changed."""
        self.inner.add_param_group(param_group)
        before = len(self.masters.pairs)
        try:
            new = self.inner.param_groups[-1]
            if is_sharded(new["params"]) != self._is_sharded:
                raise ValueError("parameters are sharded by FSDP2 all of them, or none")  # noqa: TRY301
            taken, first = [*self.training_weights], len(self.inner.param_groups) - 1
            self._adopt(names_of([new], self.model, taken=taken, first=first))
            self._refuse_ddp(self.masters.pairs[before:])
            remainders = self.options.master_storage == "remainder" and not self.has_fallback
            stepping_of(self.inner, remainders=remainders)
        except ValueError:
            del self.inner.param_groups[-1], self.masters.pairs[before:]
            raise
        self._split()

    def get_stats(self) -> MixedPrecisionStats:
        return stats_of(self)

    def state_dict(self) -> dict[str, Any]:
        """Masters, the state of the optimizer inside, scaler, counts, options, by the names of
        parameters. Tensors are the live ones. Training weights are left out: they are the masters'
        casts."""
        return state_of(self)

    def live_state_dict(self) -> dict[str, Any]:
        """The same, but with the masters as they are, whatever was written to the weights."""
        return state_of(self, live=True)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], *, masters_from: MastersFrom = "checkpoint"
    ) -> None:
        """Become what ``state_dict`` says, weights of the model included. All or nothing.

        ``masters_from="model"``: keep the model's weights and make the masters of them. Raises
        ``ValidationError`` with all that does not fit.
        """
        load_state(self, state_dict, masters_from)

    def set_fallback(self, *, fallback: bool) -> None:
        """Give the model the dtypes it has after a fallback, or before, for a state that was saved
        so. Values stay. Raises ``ValidationError`` if the model's dtype cannot change."""
        why = refusal(self.masters)
        if why is not None:
            raise ValidationError(f"the model's dtype must change, as it was when saved, but {why}")
        self.before_change()
        if fallback:
            to_fp32(self.masters, self._boundaries)
        else:
            to_training(self.masters, self._boundaries, self.options.precision.dtype)
        self.has_fallback = fallback
        self._accumulate()
        self.choose_step()

    def choose_step(self) -> None:
        """Look again at how the optimizer inside is stepped, as its groups or state are others."""
        remainders = any(pair.remainder is not None for pair in self.masters)
        self._stepping: Stepping = stepping_of(self.inner, remainders=remainders)

    def before_change(self) -> None:
        """Masters, weights or state are about to change: whoever keeps them as they are copies
        them now."""
        for moment in [*self.moments]:
            moment.copy()
        self.moments.clear()

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
        if self.has_fallback:
            self.masters.merge()
        else:
            self.masters.split()
        if self._boundaries is not None:
            self._boundaries.cast_rest({id(pair.weight) for pair in self.masters})
        self._accumulate()
        self.choose_step()

    def _accumulate(self) -> None:
        if self.options.grad_accumulation == "fp32":
            add_up_in_fp32(self.masters.pairs)

    def _fall_back(self) -> None:
        overflows = self.scaler.state.consecutive_overflows
        rewrap = None if self.model is None else self._rewrap
        is_wrapped = must_rewrap(self.masters, overflows, can_rewrap=rewrap is not None)
        to_fp32(self.masters, self._boundaries)
        self.has_fallback = True
        self.scaler.retire()
        self.choose_step()
        _log.warning("%d steps in a row overflowed: the model goes on in FP32", overflows)
        if is_wrapped and rewrap is not None:
            self.model = rewrap(unwrapped(self.model))
