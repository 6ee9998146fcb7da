"""Makes a checkpoint of all that a mixed-precision optimizer is. Knows no file."""

import copy
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

from holdfast import _checks
from holdfast.format import encode_value
from holdfast.precision._checkpoint import Later, MixedPrecisionCheckpoint
from holdfast.precision._moment import Moment
from holdfast.precision._optimizer import MixedPrecisionOptimizer
from holdfast.precision._state import tree_of


def create_checkpoint(
    optimizer: MixedPrecisionOptimizer,
    metadata: Mapping[str, Any] | None = None,
    *,
    training_weights: bool = True,
    snapshot: Literal["live", "copy"] = "live",
) -> MixedPrecisionCheckpoint:
    """Everything that ``optimizer`` is now: later steps do not alter it.

    What is large is copied when it is needed: when the optimizer is about to change it, or when
    the checkpoint's fields are looked at; to save it before needs no copy. If something else than
    ``optimizer`` changes it first, as ``model.load_state_dict``, using the checkpoint raises
    ``TornSnapshotError``. ``snapshot="copy"`` copies at once, and is right whatever happens next.

    Copies are in this process's memory, and a sharded master's is this rank's part of it. Without
    ``training_weights`` these are left out: they are cast from the masters when restored.
    ``metadata`` is plain values by name, kept as they are. Gradients are not in it: call it after
    ``step``. ``SaveError`` for metadata that no file could hold.
    """
    _checks.instance("optimizer", optimizer, MixedPrecisionOptimizer)
    given = dict(_checks.instance("metadata", metadata or {}, Mapping))  # type: ignore[type-abstract]
    if snapshot not in {"live", "copy"}:
        raise ValueError(f"snapshot must be 'live' or 'copy', not {snapshot!r}")
    encode_value(given, root="metadata")
    tree = tree_of(optimizer)
    trees = {
        "master_weights": tree.masters,
        "training_weights": tree.training if training_weights else {},
        "base_optimizer_state": tree.inner,
    }
    moment = Moment(trees, copies=snapshot == "copy")
    optimizer.moments.add(moment)  # which it copies before it changes anything
    tensors: dict[str, Any] = {name: Later(moment, name) for name in trees}
    return MixedPrecisionCheckpoint(
        version=tree.version,
        timestamp=datetime.now(UTC),
        **tensors,
        scaler=tree.scaler,
        options=tree.options,
        step_count=tree.step_count,
        skipped_steps=tree.skipped_steps,
        has_fallback=tree.has_fallback,
        metadata=copy.deepcopy(given),
    )
