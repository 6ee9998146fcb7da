"""What a checkpointer works with, and what it remembers between calls. Decides nothing."""

from collections.abc import Callable, Mapping, Sequence
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
    _numbers: Mapping[int, int] | None = field(init=False)

    def __post_init__(self) -> None:
        # Asked for now: a save may go on when the process group has been destroyed.
        object.__setattr__(self, "_numbers", _numbers_in(self.coordinator))

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
        """From the ranks that a device mesh names to those of the coordinator. ``ValueError`` for
        one that is not among these."""
        numbers = self._numbers
        if numbers is None:
            return lambda rank: rank

        def number_of(rank: int) -> int:
            if rank not in numbers:
                raise ValueError(f"rank {rank} of the mesh is not in the coordinator's group")
            return numbers[rank]

        return number_of


def _numbers_in(coordinator: Coordinator) -> Mapping[int, int] | None:
    """What the coordinator calls each of torch's ranks; ``None`` if that is the same."""
    if not isinstance(coordinator, TorchCoordinator):
        return None
    import torch.distributed as dist  # noqa: PLC0415 -- only where ranks are torch's

    group = coordinator.process_group
    if group is dist.group.WORLD:
        return None
    return {rank: number for number, rank in enumerate(dist.get_process_group_ranks(group))}
