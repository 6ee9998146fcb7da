"""Ranks acting together: barriers, gathers, and errors that reach everyone.

``TorchCoordinator`` works over ``torch.distributed``'s store; ``SoloCoordinator`` is one
process. Importing this needs no torch.
"""

from holdfast.coordination._solo import SoloCoordinator
from holdfast.coordination._timeouts import TimeoutHandler
from holdfast.coordination._torch import TorchCoordinator

__all__ = ["SoloCoordinator", "TimeoutHandler", "TorchCoordinator"]
