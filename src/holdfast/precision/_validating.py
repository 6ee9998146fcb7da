"""Whether a checkpoint is whole. Knows its fields; knows no optimizer it might be for."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from holdfast.distributed import ValidationResult
from holdfast.distributed._tensors import local_of
from holdfast.precision._checkpoint import MixedPrecisionCheckpoint
from holdfast.precision._options import MixedPrecisionOptions
from holdfast.precision._remainder import rounded
from holdfast.precision._scaler import ScalerState
from holdfast.precision._state import SCHEMA

_NARROW: Final = (torch.float16, torch.bfloat16)


def validate_checkpoint(checkpoint: object) -> ValidationResult:
    """All that keeps a checkpoint from being restored anywhere; nothing if it is whole. True in an
    ``if`` when it is.

    Reads the tensors, too: masters must be finite, and training weights their masters, rounded.
    Training weights may be absent. Never raises for what it is given.
    """
    if not isinstance(checkpoint, MixedPrecisionCheckpoint):
        return ValidationResult(errors=(f"this is no checkpoint but {checkpoint!r:.200}",))
    errors = structure_problems(checkpoint) or _values(checkpoint)
    return ValidationResult(errors=tuple(errors))


def structure_problems(checkpoint: MixedPrecisionCheckpoint) -> list[str]:
    """What is wrong with a checkpoint, as far as it can be told without reading its tensors."""
    found = [*_kinds(checkpoint)]
    if found:
        return found
    masters = checkpoint.master_weights
    found += [*_counts(checkpoint)]
    found += [f"the loss scaler cannot be: {problem}" for problem in checkpoint.scaler.problems()]
    found += [*_weights(masters, checkpoint.training_weights)]
    found += [*_inner(checkpoint.base_optimizer_state, masters)]
    return found


def _kinds(checkpoint: MixedPrecisionCheckpoint) -> Iterator[str]:
    kinds: dict[str, type] = {"options": MixedPrecisionOptions, "scaler": ScalerState}
    names = ("master_weights", "training_weights", "base_optimizer_state", "metadata")
    kinds |= dict.fromkeys(names, Mapping)
    for name, kind in kinds.items():
        if not isinstance(getattr(checkpoint, name), kind):
            yield f"{name} is no {kind.__name__} but {getattr(checkpoint, name)!r:.200}"


def _counts(checkpoint: MixedPrecisionCheckpoint) -> Iterator[str]:
    version: object = checkpoint.version
    if type(version) is not int or not 1 <= version <= SCHEMA:
        yield f"version is {version!r}, and there are versions 1 to {SCHEMA}"
    for name in ("step_count", "skipped_steps"):
        value = getattr(checkpoint, name)
        if type(value) is not int or value < 0:
            yield f"{name} is {value!r}"
    fallback: object = checkpoint.has_fallback
    if not isinstance(fallback, bool):
        yield f"has_fallback is {fallback!r}"


def _weights(masters: Mapping[str, Any], training: Mapping[str, Any]) -> Iterator[str]:
    if not masters:
        yield "there are no master weights"
    for name, master in masters.items():
        if not isinstance(master, torch.Tensor):
            yield f"the master of {name!r} is no tensor but {master!r:.100}"
        elif master.dtype in _NARROW:
            yield f"the master of {name!r} is of {master.dtype}, and masters are float32"
    if training and (missing := sorted(map(str, masters.keys() - training.keys()))):
        yield f"training weights are missing of {', '.join(missing)}"
    if extra := sorted(map(str, training.keys() - masters.keys())):
        yield f"there are training weights without masters of {', '.join(extra)}"
    for name in masters.keys() & training.keys():
        yield from _weight(name, training[name], masters[name])


def _weight(name: str, weight: object, master: object) -> Iterator[str]:
    if not isinstance(weight, torch.Tensor) or not isinstance(master, torch.Tensor):
        yield f"the training weight of {name!r} or its master is no tensor"
    elif weight.dtype not in {*_NARROW, master.dtype}:
        yield f"the training weight of {name!r} is of {weight.dtype}"
    elif weight.shape != master.shape:
        yield (
            f"the training weight of {name!r} has shape {tuple(weight.shape)}, its master "
            f"{tuple(master.shape)}"
        )


def _inner(inner: Mapping[str, Any], masters: Mapping[str, Any]) -> Iterator[str]:
    """The names in it must be those of masters; what is in a state is the optimizer's matter."""
    kinds = {"class": str, "state": Mapping, "groups": list}
    for key, kind in kinds.items():
        if not isinstance(inner.get(key), kind):
            yield f"base_optimizer_state[{key!r}] is missing, or no {kind.__name__}"
            return
    groups, state = inner["groups"], inner["state"]
    if not all(
        isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups
    ):
        yield "a group of base_optimizer_state is no dict with a list of params"
        return
    named = [name for group in groups for name in group["params"]]
    if sorted(map(str, named)) != sorted(map(str, masters)):
        yield "the groups of base_optimizer_state do not have the parameters of the masters"
    for name, held in state.items():
        if name not in masters:
            yield f"base_optimizer_state has state of an unknown parameter {name!r}"
        elif not isinstance(held, Mapping):
            yield f"base_optimizer_state has no dict of state of {name!r}"


def _values(checkpoint: MixedPrecisionCheckpoint) -> Iterator[str]:
    half_up = checkpoint.options.master_storage == "remainder"
    for name, whole in checkpoint.master_weights.items():
        master = local_of(whole)
        if not torch.isfinite(master).all():
            yield f"the master of {name!r} is not finite"
            continue
        if name not in checkpoint.training_weights:
            continue
        weight = local_of(checkpoint.training_weights[name])
        is_half_up = half_up and weight.dtype is torch.bfloat16
        if not torch.equal(rounded(master) if is_half_up else master.to(weight.dtype), weight):
            yield f"the training weight of {name!r} is not its master, rounded"
