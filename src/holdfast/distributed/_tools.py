"""What a checkpointer works with, and what it remembers between calls. Decides nothing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast.catalog import Catalog
from holdfast.contracts import Coordinator, Storage
from holdfast.coordination import TorchCoordinator
from holdfast.distributed._bulk import Bulk
from holdfast.distributed._upkeep import Upkeep
from holdfast.distributed._validation import CheckpointValidator
from holdfast.errors import CheckpointError
from holdfast.resilience import FaultToleranceHandler

_PLANS: Final = 4


class Remembered:
    """The last few results of pure work, by what they were made from. Used by one thread."""

    def __init__(self) -> None:
        self._known: dict[Sequence[Any], Any] = {}

    def get(self, key: Sequence[Any], make: Callable[[], Any]) -> Any:
        found = self._known.pop(key, None)
        if found is None:
            found = make()
        self._known[key] = found
        while len(self._known) > _PLANS:
            del self._known[next(iter(self._known))]
        return found


class Recent:
    """The checkpoint that was last saved or loaded: the next one may refer to it. Used by one
    thread at a time."""

    prefix: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """Shared by the saves and loads of one checkpointer."""

    coordinator: Coordinator
    catalog: Catalog
    handler: FaultToleranceHandler
    validator: CheckpointValidator
    bulk: Bulk
    plans: Remembered = field(default_factory=Remembered)
    recent: Recent = field(default_factory=Recent)
    upkeep: Upkeep | None = None

    @property
    def storage(self) -> Storage:
        return self.catalog.storage

    def locate(self, error: BaseException) -> None:
        """Have an error say where in the world it was, not only in this storage."""
        url = self.storage.url
        if not isinstance(error, CheckpointError) or error.path is None:
            return
        if not error.path.startswith(url) and "://" not in error.path:
            error.path = f"{url}/{error.path}"

    def rank_of(self) -> Callable[[int], int]:
        """From the ranks that a device mesh names to those of the coordinator."""
        if not isinstance(self.coordinator, TorchCoordinator):
            return lambda rank: rank
        import torch.distributed as dist  # noqa: PLC0415 -- only where ranks are torch's

        group = self.coordinator.process_group
        if group is dist.group.WORLD:
            return lambda rank: rank
        return lambda rank: dist.get_group_rank(group, rank)
