"""A model as it was before steps were tried on it. Knows parameters, gradients, buffers and random
streams: of the model, of its sample, and of what the loss function can be seen to use. What a hook
steps in backward, and what a model writes into its batch, is not undone."""

import contextlib
from collections.abc import Iterator
from typing import Any

from holdfast.activation._layers.layer_forward import installed
from holdfast.activation._planning.sampling import Sample
from holdfast.activation._regions.inputs import leaves
from holdfast.activation._regions.reach import reach
from holdfast.activation._regions.streams import default_streams, marks
from holdfast.errors import PlanError


@contextlib.contextmanager
def preserved(model: Any, sample: Sample) -> Iterator[None]:
    """Give gradients, buffers and random streams back as they were: the same tensors, with the same
    values. ``PlanError`` if there are gradients that cannot be."""
    _refuse_hidden_gradients(model)
    found = reach(sample.loss, leaves((sample.args, sample.kwargs)), (model,))
    weights = [each.tensor for each in found.parameters]
    gradients = [(each, each.grad, _copy(each.grad)) for each in weights if each.is_leaf]
    buffers = [(each, _copy(each.tensor)) for each in found.buffers]
    accelerators = {each.device for each in weights if each.device.type not in {"cpu", "meta"}}
    stood = marks(default_streams(accelerators))
    # A copy of a checkpointed model has stand-ins of its own, which give way to those of a plan.
    copied = [(each, had) for each in model.modules() if (had := installed(each))]
    try:
        yield
    finally:
        for weight, gradient, values in gradients:
            weight.grad = gradient
            _give_back(gradient, values)
        for buffer, values in buffers:
            buffer.owner[buffer.key] = buffer.tensor
            _give_back(buffer.tensor, values)
        for module, stand_in in copied:
            module.__dict__["forward"] = stand_in
        for mark in stood:
            mark.stream.write(mark.state)


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
