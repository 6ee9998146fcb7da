"""Storage for ``torch.distributed.checkpoint``: what it saves is a checkpoint of holdfast's."""

from holdfast.integrations.dcp._reader import HoldfastReader
from holdfast.integrations.dcp._writer import HoldfastWriter

__all__ = ["HoldfastReader", "HoldfastWriter"]
