"""Checkpoints of Lightning's ``Trainer``, kept by holdfast, and the random generators with them."""

from holdfast.integrations._packages import require

require("lightning", "lightning")

from holdfast.integrations.lightning._checkpoint_io import HoldfastCheckpointIO  # noqa: E402
from holdfast.integrations.lightning._random_state import RandomState  # noqa: E402

__all__ = ["HoldfastCheckpointIO", "RandomState"]
