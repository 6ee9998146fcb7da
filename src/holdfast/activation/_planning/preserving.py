"""A model as it was before steps were tried on it. Knows parameters, gradients, buffers and random
streams: of the model, of its sample, and of what the loss function can be seen to use. Parameters
are watched, not copied: nothing that a plan is made for may change them in a step."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from holdfast.activation._layers.layer_forward import installed
from holdfast.activation._planning.sampling import Sample
from holdfast.activation._regions.found import version_of
from holdfast.activation._regions.inputs import leaves
from holdfast.activation._regions.reach import Reach, reach
from holdfast.activation._regions.streams import default_streams, marks
from holdfast.errors import PlanError


@contextlib.contextmanager
def preserved(model: Any, sample: Sample) -> Iterator[Callable[[], None]]:
    """What is run within leaves all as it was: the same tensors, with the same values. The copies
    for that lie on the same devices. Gives a call that raises ``PlanError`` if a parameter was
    changed since. ``PlanError`` also if there are gradients that cannot be given back, or an
    optimizer steps in backward."""
    _refuse_hidden_gradients(model)
    _refuse_steps_in_backward(model)
    given = leaves((sample.args, sample.kwargs))
    found = reach(sample.loss, given, (model,))
    weights = [each.tensor for each in found.parameters]
    gradients = [(each, each.grad, _copy(each.grad)) for each in weights if each.is_leaf]
    buffers = [(each, _copy(each.tensor)) for each in found.buffers]
    # An embedding with max_norm scales rows of its weight by itself: those are given back too.
    scaled = [(each, _copy(each)) for each in found.renormed]
    others = {*map(id, given), *map(id, found.renormed)}
    versions = [(each, version_of(each)) for each in weights if id(each) not in others]
    accelerators = {each.device for each in weights if each.device.type not in {"cpu", "meta"}}
    stood = marks(default_streams(accelerators))
    # A copy of a checkpointed model has stand-ins of its own, which give way to those of a plan.
    copied = [(each, had) for each in model.modules() if (had := installed(each))]

    def refuse_changes() -> None:
        for weight, version in versions:
            if version_of(weight) != version:
                raise _changed(found, weight)

    try:
        yield refuse_changes
    finally:
        sample.give_back()
        for weight, gradient, values in gradients:
            weight.grad = gradient
            _give_back(gradient, values)
        for buffer, values in buffers:
            buffer.owner[buffer.key] = buffer.tensor
            _give_back(buffer.tensor, values)
        for weight, values in scaled:
            _give_back(weight, values)
        for module, stand_in in copied:
            module.__dict__["forward"] = stand_in
        for mark in stood:
            mark.stream.write(mark.state)


def _changed(found: Reach, weight: Any) -> PlanError:
    return PlanError(
        f"{found.name_of(weight) or 'a parameter that the loss uses'} was changed while a step was "
        "tried on the model, by its forward or by a hook in its backward: planning would train it. "
        "Nothing gives that parameter back; gradients, buffers and the sample are as they were. "
        "Load the parameters again, and have them changed after the step"
    )


def _refuse_steps_in_backward(model: Any) -> None:
    """Whatever is called with a parameter whose gradient has just been added up may step it. DDP
    and FSDP hang their own work elsewhere."""
    for name, parameter in model.named_parameters():
        if parameter._post_accumulate_grad_hooks or hasattr(parameter, "_in_backward_optimizers"):  # noqa: SLF001 -- torch has no other name for it
            raise PlanError(
                f"parameter {name!r} has a hook that is called in backward when its gradient is "
                "there, as for an optimizer that steps in backward: the steps that are tried would "
                "train the model. Plan first and register such hooks then, or remove them "
                "meanwhile. The model is as it was"
            )


def _refuse_hidden_gradients(model: Any) -> None:
    """FSDP adds up gradients where nobody sees them while their exchange is switched off: those of
    steps that were only tried would be among them."""
    for name, module in model.named_modules():
        state = getattr(module, "_get_fsdp_state", lambda: None)()
        for group in getattr(state, "_fsdp_param_groups", ()):
            if not (group.reduce_grads and group.all_reduce_grads):
                raise PlanError(
                    f"FSDP does not exchange the gradients of {name or 'the model'!r} now "
                    "(set_requires_gradient_sync(False)), so steps cannot be tried on it. Plan "
                    "before that, or switch it on"
                )


def _copy(tensor: Any) -> Any:
    return None if tensor is None else tensor.detach().clone()


def _give_back(tensor: Any, values: Any) -> None:
    if tensor is not None:
        tensor.detach().copy_(values)
