"""The state dict of a mixed-precision optimizer, and its way back. Knows torch's hooks there."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from holdfast.errors import ValidationError
from holdfast.precision._problems import listed
from holdfast.precision._state import MastersFrom, apply_tree, problems_of, tree_of
from holdfast.precision._state_tree import StateTree

if TYPE_CHECKING:
    from holdfast.precision._optimizer import MixedPrecisionOptimizer


def state_of(optimizer: "MixedPrecisionOptimizer", *, live: bool = False) -> dict[str, Any]:
    """Without training weights. ``live`` as for ``tree_of``."""
    for hook in optimizer._optimizer_state_dict_pre_hooks.values():  # noqa: SLF001
        hook(optimizer)
    state = {**tree_of(optimizer, live=live).plain(), "training": {}}
    for hook in optimizer._optimizer_state_dict_post_hooks.values():  # noqa: SLF001
        changed = hook(optimizer, state)
        state = state if changed is None else changed
    return state


def load_state(
    optimizer: "MixedPrecisionOptimizer", state: Mapping[str, Any], masters_from: MastersFrom
) -> None:
    """All or nothing: ``ValidationError`` has all that does not fit."""
    check_choice(masters_from)
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():  # noqa: SLF001
        changed = hook(optimizer, state)
        state = state if changed is None else changed
    try:
        tree = StateTree.from_plain(state)
    except ValueError as error:
        raise ValidationError(f"cannot load this state: {error}. Nothing was changed") from error
    problems = problems_of(optimizer, tree, masters_from=masters_from)
    if problems:
        raise ValidationError(
            f"this state does not fit the optimizer; nothing was changed:{listed(problems)}"
        )
    apply_tree(optimizer, tree, masters_from=masters_from)
    for hook in optimizer._optimizer_load_state_dict_post_hooks.values():  # noqa: SLF001
        hook(optimizer)


def check_choice(masters_from: object) -> None:
    """Raise ``ValueError`` for what is no ``MastersFrom``."""
    if masters_from not in {"checkpoint", "model"}:
        raise ValueError(f"masters_from must be 'checkpoint' or 'model', not {masters_from!r}")
