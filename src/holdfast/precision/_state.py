"""Everything a MixedPrecisionOptimizer is, as one tree keyed by the names of parameters: read,
compared and applied. Knows no file.

``problems_of`` says all that keeps a tree from being applied, and changes nothing; ``apply_tree``
makes whatever needs memory first and then only writes, so that it does not end half way.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from holdfast.precision._fallback import refusal
from holdfast.precision._options import MixedPrecisionOptions
from holdfast.precision._problems import state_problems, weight_problems
from holdfast.precision._scaler import ScalerState

if TYPE_CHECKING:
    from holdfast.precision._optimizer import MixedPrecisionOptimizer

SCHEMA: Final = 1

MastersFrom = Literal["checkpoint", "model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTree:
    """Everything a ``MixedPrecisionOptimizer`` is. Tensors are the live ones, not copies.

    ``masters``: FP32, whole values; DTensors under FSDP2. ``training``: the weights, or none.
    ``inner``: ``{"class": name, "state": {name: {...}}, "groups": [{..., "params": [names]}]}``.
    """

    version: int
    options: MixedPrecisionOptions
    masters: Mapping[str, torch.Tensor]
    training: Mapping[str, torch.Tensor]
    inner: Mapping[str, Any]
    scaler: ScalerState
    step_count: int
    skipped_steps: int
    has_fallback: bool

    def plain(self) -> dict[str, Any]:
        """As dicts of strings, numbers and tensors; ``from_plain`` makes the same tree of it."""
        return {
            "version": self.version,
            "options": self.options.plain(),
            "masters": dict(self.masters),
            "training": dict(self.training),
            "inner": dict(self.inner),
            "scaler": self.scaler.plain(),
            "step_count": self.step_count,
            "skipped_steps": self.skipped_steps,
            "has_fallback": self.has_fallback,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "StateTree":
        """Raises ``ValueError`` for what is no such tree."""
        version = plain.get("version")
        if not isinstance(version, int):
            raise ValueError("this is no state of a MixedPrecisionOptimizer: it has no version")  # noqa: TRY004
        if version > SCHEMA:
            raise ValueError(f"its version is {version}, and this holdfast knows {SCHEMA}")
        missing = [name for name in cls.__slots__ if name not in plain and name != "training"]
        if missing:
            raise ValueError(f"it has no {', '.join(missing)}")
        for name in ("masters", "inner"):
            if not isinstance(plain[name], Mapping):
                raise ValueError(f"{name} is no dict")  # noqa: TRY004 -- it is the value that is wrong
        return cls(
            version=version,
            options=MixedPrecisionOptions.from_plain(plain["options"]),
            masters=plain["masters"],
            training=plain.get("training", {}),
            inner=plain["inner"],
            scaler=ScalerState.from_plain(plain["scaler"]),
            step_count=int(plain["step_count"]),
            skipped_steps=int(plain["skipped_steps"]),
            has_fallback=bool(plain["has_fallback"]),
        )


def tree_of(optimizer: "MixedPrecisionOptimizer") -> StateTree:
    """What ``optimizer`` is now."""
    inner = optimizer.inner
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
        masters={pair.name: pair.value.detach() for pair in optimizer.masters},
        training={pair.name: pair.weight.detach() for pair in optimizer.masters},
        inner={"class": type(inner).__name__, "state": state, "groups": groups},
        scaler=optimizer.scaler.state,
        step_count=optimizer.step_count,
        skipped_steps=optimizer.skipped_steps,
        has_fallback=optimizer.has_fallback,
    )


def problems_of(
    optimizer: "MixedPrecisionOptimizer",
    tree: StateTree,
    *,
    weights: bool = True,
    state: bool = True,
    masters_from: MastersFrom = "checkpoint",
) -> list[str]:
    """All that keeps ``tree`` from being applied to ``optimizer``; empty if nothing does."""
    if tree.version > SCHEMA:
        return [f"its version is {tree.version}, and this holdfast knows {SCHEMA}"]
    found = []
    if tree.options.precision is not optimizer.options.precision:
        found.append(
            f"it was trained in {tree.options.precision.value}, and the optimizer trains in "
            f"{optimizer.options.precision.value}"
        )
    pairs = {pair.name: pair for pair in optimizer.masters}
    if weights:
        found += weight_problems(pairs, tree, with_masters=masters_from == "checkpoint")
    if state:
        now = tree_of(optimizer)
        found += state_problems(pairs, tree, now)
        why = refusal(optimizer.masters) if tree.has_fallback != now.has_fallback else None
        if why is not None:
            when = "after a fallback" if tree.has_fallback else "before any fallback"
            found.append(f"it was saved {when}, so the model's dtype must change, but {why}")
    return found


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
    new = _new_state(optimizer, tree) if state else {}
    if state and tree.has_fallback != optimizer.has_fallback:
        optimizer.set_fallback(fallback=tree.has_fallback)
    if weights:
        for pair in optimizer.masters:
            if masters_from == "checkpoint":
                value = tree.masters[pair.name]
            else:
                value = tree.training.get(pair.name, pair.weight.detach())
            pair.fill(_as(value, pair.weight))
    if state:
        _set_inner(optimizer, tree, new)
        optimizer.choose_step()  # what the former one knew of memory is no longer so
        optimizer.scaler.state = tree.scaler
        optimizer.step_count = tree.step_count
        optimizer.skipped_steps = tree.skipped_steps


def _new_state(optimizer: "MixedPrecisionOptimizer", tree: StateTree) -> dict[str, dict[str, Any]]:
    weights = {pair.name: pair.weight for pair in optimizer.masters}
    groups = {name: group for group in tree.inner["groups"] for name in group["params"]}
    return {
        name: {key: _copied(key, value, weights[name], groups[name]) for key, value in held.items()}
        for name, held in tree.inner["state"].items()
    }


def _set_inner(
    optimizer: "MixedPrecisionOptimizer", tree: StateTree, new: Mapping[str, dict[str, Any]]
) -> None:
    inner = optimizer.inner
    inner.state.clear()
    for pair in optimizer.masters:
        if pair.name in new:
            inner.state[pair.master] = new[pair.name]
    for group, saved in zip(inner.param_groups, tree.inner["groups"], strict=True):
        for key, value in saved.items():
            if key == "params":
                continue
            if isinstance(group.get(key), torch.Tensor):  # a scheduler may hold it
                group[key].fill_(value)
            else:
                group[key] = copy.deepcopy(value)


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


def listed(problems: Sequence[str]) -> str:
    return "".join(f"\n- {problem}" for problem in problems)
