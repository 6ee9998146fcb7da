"""Whether a state is one at all: what it is made of, and whether its parts agree. Knows no
optimizer that it might be for."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from holdfast.precision._masters import FLOATS, NARROW, is_cast, is_finite
from holdfast.precision._options import MixedPrecisionOptions
from holdfast.precision._scaler import ScalerState
from holdfast.precision._state_tree import SCHEMA, StateTree

_NUMBERS: Final = {*FLOATS, torch.float64, torch.complex64, torch.complex128}
"""The dtypes that anything can be trained in."""


def kind_problems(tree: StateTree) -> list[str]:
    """What is of a kind that nothing could be done with. The words are those of a checkpoint."""
    kinds: dict[str, tuple[object, type]] = {
        "options": (tree.options, MixedPrecisionOptions),
        "scaler": (tree.scaler, ScalerState),
        "master_weights": (tree.masters, Mapping),
        "training_weights": (tree.training, Mapping),
        "base_optimizer_state": (tree.inner, Mapping),
    }
    found = [
        f"{name} is no {kind.__name__} but {value!r:.200}"
        for name, (value, kind) in kinds.items()
        if not isinstance(value, kind)
    ]
    found += _counts(tree)
    if isinstance(tree.scaler, ScalerState):
        found += [f"the loss scaler cannot be: {each}" for each in tree.scaler.problems()]
    for what, weights in (("master", tree.masters), ("training weight", tree.training)):
        if isinstance(weights, Mapping):
            found += _tensors(what, weights)
    if isinstance(tree.inner, Mapping):
        found += _inner(tree.inner)
    return found


def whole_problems(tree: StateTree) -> list[str]:
    """What keeps a state from being restored anywhere, as far as can be told without reading its
    tensors."""
    found = kind_problems(tree)
    if found:
        return found
    masters, training = tree.masters, tree.training
    if not masters:
        found.append("there are no master weights")
    found += [
        f"the master of {name!r} is of {master.dtype}, and masters are float32"
        for name, master in masters.items()
        if master.dtype in NARROW
    ]
    if training and (missing := sorted(masters.keys() - training.keys())):
        found.append(f"training weights are missing of {', '.join(missing)}")
    if extra := sorted(training.keys() - masters.keys()):
        found.append(f"there are training weights without masters of {', '.join(extra)}")
    for name in masters.keys() & training.keys():
        found += _weight(name, training[name], masters[name])
    if tree.skipped_steps > tree.step_count:
        found.append(f"{tree.skipped_steps} of {tree.step_count} steps were skipped")
    narrow = [name for name, weight in training.items() if weight.dtype in NARROW]
    if tree.has_fallback and narrow:
        found.append(f"it has fallen back to FP32, and the weight {narrow[0]!r} is 16-bit")
    named = [name for group in tree.inner["groups"] for name in group["params"]]
    if sorted(named) != sorted(masters):
        found.append("the groups of base_optimizer_state hold other parameters than the masters")
    found += [
        f"base_optimizer_state has state of {name!r}, which has no master"
        for name in tree.inner["state"]
        if name not in masters
    ]
    return found


def value_problems(tree: StateTree) -> Iterator[str]:
    """Masters that are not finite, and training weights that are not their masters, rounded."""
    half_up = tree.options.master_storage == "remainder"
    yield from unsound(tree.masters)
    for name in tree.masters.keys() & tree.training.keys():
        if not is_cast(tree.masters[name], tree.training[name], half_up=half_up):
            yield f"the training weight of {name!r} is not its master, rounded"


def unsound(masters: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Masters that nothing can be trained from."""
    for name, master in masters.items():
        if not is_finite(master):
            yield f"the master of {name!r} is not finite"


def _counts(tree: StateTree) -> Iterator[str]:
    version: object = tree.version
    if type(version) is not int or not 1 <= version <= SCHEMA:
        yield f"version is {version!r:.60}, and there are versions 1 to {SCHEMA}"
    for name, value in (("step_count", tree.step_count), ("skipped_steps", tree.skipped_steps)):
        if type(value) is not int or value < 0:
            yield f"{name} is {value!r:.60}"
    fallback: object = tree.has_fallback
    if not isinstance(fallback, bool):
        yield f"has_fallback is {fallback!r:.60}"


def _tensors(what: str, weights: Mapping[Any, Any]) -> Iterator[str]:
    for name, value in weights.items():
        if not isinstance(name, str):
            yield f"a {what} is called {name!r:.60}, which is no name"
        elif not isinstance(value, torch.Tensor):
            yield f"the {what} of {name!r} is no tensor but {value!r:.100}"
        elif value.layout is not torch.strided or value.device.type == "meta":
            yield f"the {what} of {name!r} is a {value.layout} tensor on {value.device}"
        elif value.dtype not in _NUMBERS:
            yield f"the {what} of {name!r} is of {value.dtype}"


def _weight(name: str, weight: torch.Tensor, master: torch.Tensor) -> Iterator[str]:
    if weight.dtype not in {*NARROW, master.dtype}:
        yield f"the training weight of {name!r} is of {weight.dtype}"
    elif weight.shape != master.shape:
        yield (
            f"the training weight of {name!r} has shape {tuple(weight.shape)}, its master "
            f"{tuple(master.shape)}"
        )


def _inner(inner: Mapping[str, Any]) -> Iterator[str]:
    """What is in a state or a group is the optimizer's matter."""
    kinds = {"class": str, "state": Mapping, "groups": list}
    for key, kind in kinds.items():
        if not isinstance(inner.get(key), kind):
            yield f"base_optimizer_state[{key!r}] is missing, or no {kind.__name__}"
    groups, state = inner.get("groups"), inner.get("state")
    for number, group in enumerate(groups if isinstance(groups, list) else ()):
        names = group.get("params") if isinstance(group, Mapping) else None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            yield f"group {number} of base_optimizer_state is no dict with a list of params"
    for name, held in state.items() if isinstance(state, Mapping) else ():
        if not isinstance(name, str) or not isinstance(held, Mapping):
            yield f"base_optimizer_state has no dict of state of {name!r:.60}"
