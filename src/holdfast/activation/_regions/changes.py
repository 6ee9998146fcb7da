"""Whether what a region reaches is still what it was. Knows version counters, storages and
optimizer steps; knows nothing of replay.

``_version`` alone is blind: fused optimizers and ``.data`` do not move it. What is compared:
the version counter, the identity of the storage, the flag ``requires_grad``, and whether an
optimizer has stepped the parameter since. A change through ``.data.add_`` or through memory
shared with NumPy is seen by digests alone.
"""

import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.activation._regions.digests import digest
from holdfast.activation._regions.found import UNWATCHED, Parameter, storage_of, version_of


class Change(NamedTuple):
    tensor: Any
    what: str
    stand_in: Any = None  # what the module holds in its place now: FSDP's whole parameter


class _Steps:
    """Which parameters optimizers have stepped while anyone cares.

    The one state of the process that regions share: torch's hook is global too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hooked = False
        self._caring: set[int] = set()
        self._stepped: dict[int, int] = {}
        self.epoch = 0

    def care(self, whoever: int) -> int:
        """From now on steps are noted, until ``forget(whoever)``. Returns the epoch."""
        if not self._hooked:
            with self._lock:
                if not self._hooked:
                    register_optimizer_step_post_hook(self._noted)
                    self._hooked = True
        self._caring.add(whoever)
        return self.epoch

    def forget(self, whoever: int) -> None:
        # Called by finalizers, in any thread, at any moment: one atomic step, no lock.
        self._caring.discard(whoever)

    def since(self, epoch: int, tensor: Any) -> bool:
        return self._stepped.get(id(tensor), 0) > epoch

    def _noted(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        del args, kwargs
        with self._lock:
            if not self._caring:
                self._stepped.clear()
                return
            epoch = self.epoch + 1
            for group in optimizer.param_groups:
                for tensor in group["params"]:
                    if tensor.grad is not None:
                        self._stepped[id(tensor)] = epoch
            self.epoch = epoch


steps = _Steps()


def changes(found: Iterable[Parameter], epoch: int) -> list[Change]:
    """Those of ``found`` that are no longer what they were at ``epoch``."""
    return [
        Change(item.tensor, what, None if item.owner is None else item.owner.get(item.key))
        for item in found
        if (what := _change(item, epoch)) is not None
    ]


def _change(item: Parameter, epoch: int) -> str | None:
    tensor = item.tensor
    if steps.since(epoch, tensor):
        return "was changed by an optimizer's step"
    if item.version not in (UNWATCHED, version_of(tensor)):
        return "was changed in place"
    if item.storage and storage_of(tensor) not in (0, item.storage):
        return "was given other memory (.data = ...)"
    if tensor.requires_grad != item.requires_grad:
        return f"had requires_grad={item.requires_grad}, now {tensor.requires_grad}"
    return None


def digests(found: Iterable[Parameter]) -> dict[int, int]:
    return {id(item.tensor): digest(item.tensor) for item in found}


class Touched(TorchDispatchMode):  # type: ignore[misc]
    """Notes which of some changed tensors the code inside really uses.

    Only entered when something has changed, so its price per operator does not matter: a method
    of a whole model reaches every parameter of it, and most are none of the region's business.
    """

    def __init__(self, changed: Sequence[Change]) -> None:
        super().__init__()
        self._suspects = {_memory(change.tensor): change for change in changed}
        self._suspects |= {
            _memory(change.stand_in): change for change in changed if change.stand_in is not None
        }
        self.used: list[Change] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        if self._suspects:
            for item in torch.utils._pytree.tree_leaves((args, kwargs)):  # noqa: SLF001
                if isinstance(item, torch.Tensor):
                    change = self._suspects.pop(_memory(item), None)
                    if change is not None and all(change is not other for other in self.used):
                        self.used.append(change)
        return func(*args, **kwargs)


def _memory(tensor: Any) -> int:
    return storage_of(tensor) or id(tensor)
