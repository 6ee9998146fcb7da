"""A live optimizer as a ``StateTree``, and one made what a tree says. Knows no file.

``problems_of`` says all that keeps a tree from being applied, and changes nothing; ``apply_tree``
makes whatever needs memory first and then only writes, so that it does not end half way.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from holdfast.errors import SaveError
from holdfast.precision._fallback import refusal
from holdfast.precision._hyperparameters import new_values, set_values
from holdfast.precision._masters import Pair
from holdfast.precision._options import Precision
from holdfast.precision._problems import state_problems, takes, weight_problems
from holdfast.precision._state_tree import SCHEMA, StateTree
from holdfast.precision._structure import kind_problems
from holdfast.precision._uninterrupted import uninterrupted

if TYPE_CHECKING:
    from holdfast.precision._optimizer import MixedPrecisionOptimizer

MastersFrom = Literal["checkpoint", "model"]


def tree_of(optimizer: "MixedPrecisionOptimizer", *, live: bool = False) -> StateTree:
    """What ``optimizer`` is now; ``live``: whatever something else has written to its weights.
    ``SaveError`` if it has state of something that is no parameter, which nobody could find again.
    """
    inner = optimizer.inner
    known = {id(pair.master) for pair in optimizer.masters}
    strange = [key for key in inner.state if id(key) not in known]
    if strange:
        raise SaveError(
            f"{type(inner).__name__} keeps state under {strange[0]!r:.60}, which is none of its "
            "parameters; such state cannot be saved"
        )
    names = {pair.place: pair.name for pair in optimizer.masters}
    state = {
        pair.name: dict(inner.state[pair.master])
        for pair in optimizer.masters
        if inner.state.get(pair.master)
    }
    groups = [
        {
            **{key: value for key, value in group.items() if key not in {"params", "param_names"}},
            "params": [names[index, position] for position in range(len(group["params"]))],
        }
        for index, group in enumerate(inner.param_groups)
    ]
    return StateTree(
        version=SCHEMA,
        options=optimizer.options,
        masters={p.name: _master(p, live=live).detach() for p in optimizer.masters},
        training={pair.name: pair.training for pair in optimizer.masters},
        inner={"class": type(inner).__name__, "state": state, "groups": groups},
        scaler=optimizer.scaler.state,
        step_count=optimizer.step_count,
        skipped_steps=optimizer.skipped_steps,
        has_fallback=optimizer.has_fallback,
    )


def _master(pair: Pair, *, live: bool) -> torch.Tensor:
    return pair.master if live and pair.is_split else pair.value


def problems_of(
    optimizer: "MixedPrecisionOptimizer",
    tree: StateTree,
    *,
    weights: bool = True,
    state: bool = True,
    masters_from: MastersFrom = "checkpoint",
) -> list[str]:
    """All that keeps ``tree`` from being applied to ``optimizer``; empty if nothing does."""
    found = kind_problems(tree)
    if found:
        return found
    if state and not takes(optimizer.options.precision, tree.options.precision):
        found.append(
            f"it was trained in {tree.options.precision.value}, and the optimizer trains in "
            f"{optimizer.options.precision.value}"
        )
    pairs = {pair.name: pair for pair in optimizer.masters}
    now = tree_of(optimizer, live=True)
    if weights:
        found += weight_problems(pairs, tree, now, with_masters=masters_from == "checkpoint")
    if state:
        found += state_problems(pairs, tree, now)
        why = refusal(optimizer.masters) if _changes_dtype(optimizer, tree) else None
        if why is not None:
            when = "after a fallback" if tree.has_fallback else "before any fallback"
            found.append(
                f"it was saved {when}, so the model's dtype must change, but {why}; an optimizer "
                "of Precision.FP32 takes any state"
            )
    return found


@torch.inference_mode(False)  # type: ignore[untyped-decorator]  # or nothing could be stepped
@torch.no_grad()  # type: ignore[untyped-decorator]
def apply_tree(
    optimizer: "MixedPrecisionOptimizer",
    tree: StateTree,
    *,
    weights: bool = True,
    state: bool = True,
    masters_from: MastersFrom = "checkpoint",
) -> None:
    """Make ``optimizer`` what ``tree`` says, after ``problems_of`` found nothing. Tensors are
    copied."""
    optimizer.before_change()
    optimizer.unscaling.end(optimizer.masters)  # gradients are those of what it was
    new = _new_state(optimizer, tree) if state else {}
    groups = [new_values(group) for group in tree.inner["groups"]] if state else []
    values = tree.masters if masters_from == "checkpoint" else tree.training
    if weights and not values:
        # The weights as they are now, before a change of dtype makes them of their masters.
        values = {pair.name: pair.weight.detach().clone() for pair in optimizer.masters}
    with uninterrupted():
        if state and _changes_dtype(optimizer, tree):
            optimizer.set_fallback(fallback=tree.has_fallback)
        for pair in optimizer.masters if weights else ():
            pair.fill(_as(values[pair.name], pair.weight))
        if state:
            _set_state(optimizer, tree, new, groups)


def _set_state(
    optimizer: "MixedPrecisionOptimizer",
    tree: StateTree,
    new: Mapping[str, dict[str, Any]],
    groups: Sequence[Mapping[str, Any]],
) -> None:
    inner = optimizer.inner
    inner.state.clear()
    inner.state.update({p.master: new[p.name] for p in optimizer.masters if p.name in new})
    for group, found in zip(inner.param_groups, groups, strict=True):
        set_values(group, found)
    optimizer.choose_step()  # what the former one knew of memory is no longer so
    optimizer.scaler.state = tree.scaler
    if tree.options.precision is not optimizer.options.precision:
        optimizer.scaler.retire()  # as FP32 needs no scale
    optimizer.step_count = tree.step_count
    optimizer.skipped_steps = tree.skipped_steps
    optimizer.has_fallback = tree.has_fallback


def _changes_dtype(optimizer: "MixedPrecisionOptimizer", tree: StateTree) -> bool:
    """Whether the model had another dtype when ``tree`` was saved. One of FP32 never has."""
    is_narrow = optimizer.options.precision is not Precision.FP32
    return is_narrow and tree.has_fallback != optimizer.has_fallback


def _new_state(optimizer: "MixedPrecisionOptimizer", tree: StateTree) -> dict[str, dict[str, Any]]:
    weights = {pair.name: pair.weight for pair in optimizer.masters}
    groups = {name: group for group in tree.inner["groups"] for name in group["params"]}
    return {
        name: {key: _copied(key, value, weights[name], groups[name]) for key, value in held.items()}
        for name, held in tree.inner["state"].items()
    }


def _copied(key: str, value: Any, weight: torch.Tensor, group: Mapping[str, Any]) -> Any:
    """A copy of state, which lies in memory as the weight if it is as large, and where the
    optimizer wants it if it is not."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    if key == "step":  # as torch's load_state_dict has it
        on_device = group.get("capturable") is True or group.get("fused") is True
        return value.detach().to(weight.device if on_device else value.device, copy=True)
    if value.shape != weight.shape:
        return value.detach().to(weight.device, copy=True)
    value = _as(value, weight)
    return torch.empty_like(weight, dtype=value.dtype).detach().copy_(value)


def _as(value: torch.Tensor, pattern: torch.Tensor) -> torch.Tensor:
    """A value sharded as ``pattern`` is; nothing is sent, every rank has all of it."""
    if isinstance(pattern, DTensor) and not isinstance(value, DTensor):
        mesh, placements = pattern.device_mesh, pattern.placements
        return distribute_tensor(value, mesh, placements, src_data_rank=None)
    if isinstance(value, DTensor) and not isinstance(pattern, DTensor):
        return value.full_tensor()
    return value
