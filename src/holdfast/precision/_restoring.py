"""Gives a checkpoint back to an optimizer: first the whole list of what does not fit, then all of
it or nothing. Knows no file format."""

import os

from holdfast import _checks
from holdfast.errors import ValidationError
from holdfast.precision._checkpoint import MixedPrecisionCheckpoint
from holdfast.precision._files import load_checkpoint
from holdfast.precision._loading import check_choice
from holdfast.precision._optimizer import MixedPrecisionOptimizer
from holdfast.precision._problems import listed
from holdfast.precision._state import MastersFrom, apply_tree, problems_of


def restore_checkpoint(
    optimizer: MixedPrecisionOptimizer,
    checkpoint: MixedPrecisionCheckpoint,
    restore_weights: bool = True,
    restore_state: bool = True,
    *,
    masters_from: MastersFrom = "checkpoint",
) -> None:
    """Make ``optimizer`` and its model what they were, to the last bit.

    ``restore_weights`` are masters and training weights, ``restore_state`` everything else: the
    taken-over optimizer's state, loss scaler, counters and fallback. Either works alone. With
    ``masters_from="model"`` the masters are made of the training weights: the checkpoint's, or if
    it has none those that the model has now.

    ``ValidationError`` with all that does not fit, one line each; optimizer, scaler and model are
    then unchanged. The checkpoint is copied from, and can be restored again.
    """
    _checks.instance("optimizer", optimizer, MixedPrecisionOptimizer)
    _checks.instance("checkpoint", checkpoint, MixedPrecisionCheckpoint)
    check_choice(masters_from)
    tree = checkpoint.tree()
    problems = problems_of(
        optimizer, tree, weights=restore_weights, state=restore_state, masters_from=masters_from
    )
    if problems:
        raise ValidationError(
            f"the checkpoint does not fit this optimizer; nothing was changed:{listed(problems)}"
        )
    apply_tree(
        optimizer, tree, weights=restore_weights, state=restore_state, masters_from=masters_from
    )


def load_and_restore(
    optimizer: MixedPrecisionOptimizer,
    path: str | os.PathLike[str],
    restore_weights: bool = True,
    restore_state: bool = True,
    *,
    masters_from: MastersFrom = "checkpoint",
) -> MixedPrecisionCheckpoint:
    """``load_checkpoint``, then ``restore_checkpoint``; returns what was loaded, for its metadata.
    Raises as the two do, and changes nothing then."""
    checkpoint = load_checkpoint(path)
    try:
        restore_checkpoint(
            optimizer, checkpoint, restore_weights, restore_state, masters_from=masters_from
        )
    except ValidationError as error:
        error.path = os.fsdecode(path)
        raise
    return checkpoint
