"""Takes over a training that torch's own ``GradScaler`` and an optimizer have begun. Knows their
state dicts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import torch

from holdfast import _checks
from holdfast.errors import ValidationError
from holdfast.precision._masters import NARROW
from holdfast.precision._optimizer import MixedPrecisionOptimizer
from holdfast.precision._problems import listed
from holdfast.precision._scaler import ScalerState
from holdfast.precision._state import apply_tree, problems_of, tree_of

_SCALER: Final = {
    "scale": "scale",
    "growth_factor": "growth_factor",
    "backoff_factor": "backoff_factor",
    "growth_interval": "growth_interval",
    "_growth_tracker": "growth_tracker",
}
"""Our words for those of ``GradScaler.state_dict()``."""


def take_over(
    optimizer: MixedPrecisionOptimizer,
    grad_scaler_state: Mapping[str, Any],
    optimizer_state: Mapping[str, Any] | None = None,
) -> None:
    """Go on where ``GradScaler`` was: with its scale, growth tracker and factors, kept between the
    optimizer's own ``min_scale`` and ``max_scale``.

    ``grad_scaler_state`` is what its ``state_dict()`` gave. ``optimizer_state`` is that of the
    torch optimizer, if it was not loaded before ``optimizer`` took that over; its parameters are
    matched by position, as torch does. The masters are those that ``optimizer`` has: make it of
    the FP32 model that was loaded. ``ValidationError`` with all that does not fit, and nothing
    changed.
    """
    _checks.instance("optimizer", optimizer, MixedPrecisionOptimizer)
    now = tree_of(optimizer, live=True)
    problems: list[str] = []
    tree = replace(now, scaler=_scaler(grad_scaler_state, now.scaler, problems))
    if optimizer_state is not None:
        groups = [group["params"] for group in now.inner["groups"]]
        named = _named(optimizer_state, groups, problems)
        tree = replace(tree, inner={"class": now.inner["class"], **named})
    problems = problems or problems_of(optimizer, tree, weights=False)
    if problems:
        raise ValidationError(
            f"this training cannot be taken over; nothing was changed:{listed(problems)}"
        )
    apply_tree(optimizer, tree, weights=False)


def _scaler(state: object, now: ScalerState, problems: list[str]) -> ScalerState:
    if not isinstance(state, Mapping) or not _SCALER.keys() <= state.keys():
        problems.append(
            "grad_scaler_state is not what GradScaler.state_dict() gives; that of one that is not "
            "enabled is empty, and then there is nothing to take over"
        )
        return now
    try:
        found = ScalerState.from_plain(
            now.plain()
            | {ours: state[theirs] for theirs, ours in _SCALER.items()}
            | {"scale": min(max(float(state["scale"]), now.min_scale), now.max_scale)}
        )
    except (TypeError, ValueError) as error:
        problems.append(f"grad_scaler_state: {error}")
        return now
    return replace(found, dynamic=now.dynamic)


def _named(
    packed: Mapping[str, Any], groups: list[list[str]], problems: list[str]
) -> dict[str, Any]:
    """A torch optimizer's state dict with its parameters called by name."""
    try:
        theirs = [[*group["params"]] for group in packed["param_groups"]]
        held = packed["state"]
        hyper = [
            {key: value for key, value in group.items() if key not in {"params", "param_names"}}
            for group in packed["param_groups"]
        ]
        by_number = {
            number: name
            for numbers, names in zip(theirs, groups, strict=True)
            for number, name in zip(numbers, names, strict=True)
        }
        state = {by_number[number]: dict(each) for number, each in held.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        sizes = ", ".join(str(len(names)) for names in groups)
        problems.append(
            "optimizer_state is no state dict of a torch optimizer with groups of "
            f"{sizes} parameters ({type(error).__name__}: {error})"
        )
        return {"state": {}, "groups": []}
    pairs = zip(hyper, groups, strict=True)
    return {
        "state": {
            name: {key: _as_master(value) for key, value in each.items()}
            for name, each in state.items()
        },
        "groups": [{**each, "params": names} for each, names in pairs],
    }


def _as_master(value: Any) -> Any:
    """State that was kept in 16 bits, of a model that was trained so, is that of FP32 masters."""
    if isinstance(value, torch.Tensor) and value.dtype in NARROW:
        return value.float()
    return value
