"""Where a checkpoint of DCP's is: what its ``checkpoint_id`` means. Knows no tensors.

Holds no connection of its own until it is asked for one, and none when it is pickled, so that a
process beside the training can save.
"""

import os
import re
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

from holdfast._shortcuts import split_path
from holdfast.catalog import Catalog
from holdfast.contracts import Storage
from holdfast.storage import StorageOptions

CheckpointId = str | os.PathLike[str]

_SCHEMES: Final = frozenset({"s3", "gs", "az", "file"})
_STEP: Final = re.compile(r"step[-_=]?([0-9]{1,18})\Z", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The checkpoint ``checkpoint_id``: a path or URL ``<root>/<prefix>``, or with ``storage`` a
    prefix in that."""

    checkpoint_id: CheckpointId
    storage: Storage | StorageOptions | None = None
    _catalogs: dict[Any, Catalog] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._split()

    def __getstate__(self) -> tuple[CheckpointId, Storage | StorageOptions | None]:
        return self.checkpoint_id, self.storage

    def __setstate__(self, state: tuple[CheckpointId, Storage | StorageOptions | None]) -> None:
        object.__setattr__(self, "checkpoint_id", state[0])
        object.__setattr__(self, "storage", state[1])
        object.__setattr__(self, "_catalogs", {})

    def at(self, checkpoint_id: CheckpointId) -> Self:
        """Another checkpoint, with the same storage or by its own path."""
        return replace(self, checkpoint_id=checkpoint_id)

    @property
    def catalog(self) -> Catalog:
        """The store, opened once: it remembers what it has listed."""
        root, _ = self._split()
        key = root if isinstance(root, str) else id(root)
        if key not in self._catalogs:
            self._catalogs.clear()
            self._catalogs[key] = Catalog(root)
        return self._catalogs[key]

    @property
    def prefix(self) -> str:
        return self._split()[1]

    @property
    def step(self) -> int | None:
        """The step that its name ends with, as that of ``step_100`` or ``epoch=3-step=100``."""
        found = _STEP.search(self.prefix)
        return None if found is None else int(found[1])

    def _split(self) -> tuple[Storage | StorageOptions | str, str]:
        if self.storage is None:
            return split_path(self.checkpoint_id)
        return self.storage, os.fspath(self.checkpoint_id).strip("/")


def of_rank(prefix: str, rank: int) -> str:
    """Where a rank's own checkpoint is if each saves for itself (``use_collectives=False``)."""
    return f"{prefix}/rank_{rank}"


def is_possible(checkpoint_id: CheckpointId) -> bool:
    """Whether holdfast could keep a checkpoint there: a path or a URL of a kind that it knows."""
    try:
        root, _ = split_path(checkpoint_id)
    except (TypeError, ValueError):
        return False
    scheme, colon, _ = root.partition("://")
    return not colon or scheme.lower() in _SCHEMES
