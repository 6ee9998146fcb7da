"""Whether ranks talk to each other in a call. Knows torch's names for it, not what they say."""

from typing import Any, Final

from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type


class Collectives(TorchDispatchMode):  # type: ignore[misc]
    """Notes whether anything run under it was a collective."""

    def __init__(self) -> None:
        super().__init__()
        self.met = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # the wrapper acts first, and its inner calls come here
        self.met |= func.namespace in _SPACES
        return func(*args, **(kwargs or {}))


_SPACES: Final = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"})
