"""Which way an optimizer is stepped: in blocks by torch's kernels, in blocks by its own code, or by
its own ``step()``. Knows the three, and when each is right."""

from torch.optim import Optimizer

from holdfast.precision._blocked_step import BlockedStep
from holdfast.precision._kernels import kind_of
from holdfast.precision._parted_step import PartedStep, is_parted
from holdfast.precision._plain_step import PlainStep

Stepping = BlockedStep | PartedStep | PlainStep


def stepping_of(inner: Optimizer, *, remainders: bool) -> Stepping:
    """Raises ``ValueError`` if some masters are remainders, which only blocks can be stepped of."""
    kind = kind_of(inner)
    if kind is not None:
        return BlockedStep(inner, kind)
    if remainders:
        raise ValueError(
            "master_storage 'remainder' is for Adam, AdamW and SGD with fused=True, without step "
            "hooks, and of FP32 or BF16 parameters without gaps in memory, not for "
            f"{type(inner).__name__} as it is; use master_storage='fp32'"
        )
    return PartedStep(inner) if is_parted(inner) else PlainStep(inner)
