"""``HoldfastReader``: how ``torch.distributed.checkpoint`` loads what ``HoldfastWriter`` saved."""

import dataclasses
import os
import uuid
from collections.abc import Sequence
from typing import Any, Final

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from holdfast.catalog._committed import Found
from holdfast.catalog._reading import TensorReader
from holdfast.contracts import Storage
from holdfast.distributed._collecting import collecting_later
from holdfast.errors import CheckpointNotFoundError, LoadError, ObjectNotFoundError
from holdfast.integrations.dcp._contents import Listed, listed
from holdfast.integrations.dcp._filling import Filling
from holdfast.integrations.dcp._place import CheckpointId, Place, is_possible, of_rank
from holdfast.storage import StorageOptions

_THEIRS: Final = ".metadata"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Open:
    """A checkpoint as this rank has found it."""

    found: Found
    listed: Listed


class HoldfastReader(StorageReader):  # type: ignore[misc]
    """Loads a checkpoint for ``dcp.load``, onto any number of ranks.

    ``path`` and ``storage`` are those of ``HoldfastWriter``. Each rank reads the chunks (256 KiB)
    that hold what it wants, several at once, straight into its tensors where they are in its
    memory. Everything is verified: a ``CorruptedError`` names the tensor and the file. After an
    error the state holds anything, as after any of DCP's. Nothing is ever unpickled.

    Used by one load at a time. Can be pickled.
    """

    def __init__(
        self, path: CheckpointId, *, storage: Storage | StorageOptions | None = None
    ) -> None:
        super().__init__()
        self._place = Place(checkpoint_id=path, storage=storage)
        self._load_id = str(uuid.uuid4())
        self._open: _Open | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": None}

    def __repr__(self) -> str:
        return f"HoldfastReader({os.fspath(self.checkpoint_id)!r})"

    @property
    def checkpoint_id(self) -> CheckpointId:
        """What the next load reads."""
        return self._place.checkpoint_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Whether a checkpoint could be there: a path, or a URL of a kind that is known."""
        return is_possible(checkpoint_id)

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        if checkpoint_id:
            self._place = self._place.at(checkpoint_id)
        self._load_id = str(uuid.uuid4())
        self._open = None

    def read_metadata(
        self,
        *args: Any,  # noqa: ARG002 -- DCP's signature
        **kwargs: Any,
    ) -> Metadata:
        """Open the checkpoint, or with ``rank=`` what that rank has saved for itself.

        ``CheckpointNotFoundError`` if there is none that is committed. DCP asks for a rank's own
        after any problem with that of all ranks; if there is none, that problem is told again.
        """
        rank = kwargs.get("rank")
        self._open = self._of_all() if rank is None else self._of_rank(rank)
        return dataclasses.replace(
            self._open.listed.metadata,
            storage_meta=StorageMeta(
                checkpoint_id=self.checkpoint_id,
                save_id=self._open.listed.save_id,
                load_id=self._load_id,
            ),
        )

    def set_up_storage_reader(
        self,
        metadata: Metadata,  # noqa: ARG002 -- DCP's signature
        is_coordinator: bool,  # noqa: ARG002 -- as above
        *args: Any,  # noqa: ARG002 -- as above
        **kwargs: Any,  # noqa: ARG002 -- as above
    ) -> None:
        if self._open is None:
            self.read_metadata()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return dataclasses.replace(plan, storage_data=self._opened().found.record.attempt)

    def prepare_global_plan(self, plans: Sequence[LoadPlan]) -> list[LoadPlan]:
        """``LoadError`` if ranks see different checkpoints under this name."""
        seen = {plan.storage_data for plan in plans}
        if len(seen) > 1 and self._opened().found.prefix == self._place.prefix:
            raise LoadError(
                "not all ranks see the same checkpoint of this name: it was replaced just now, or "
                "the storage is not the same on all hosts; nothing was loaded",
                path=self._path(self._place.prefix),
            )
        return [*plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        opened = self._opened()
        found, storage = opened.found, self._place.catalog.storage
        filling = Filling(
            reader=TensorReader(storage, found.prefix, found.record),
            tensors=found.record.tensors,
            listed=opened.listed,
            planner=planner,
            path=self._path(found.prefix),
        )
        filling.run(plan.items)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _of_all(self) -> _Open:
        return self._at(self._place.prefix)

    def _of_rank(self, rank: int) -> _Open:
        try:
            return self._at(of_rank(self._place.prefix, rank))
        except CheckpointNotFoundError:
            if not self._is_of_ranks():
                # DCP tells this problem last, where a reader looks: not that of a name nobody gave.
                self._of_all()
            raise

    def _is_of_ranks(self) -> bool:
        """Whether ranks have saved each for itself."""
        first = f"{of_rank(self._place.prefix, 0)}/"
        return next(iter(self._place.catalog.storage.list(first)), None) is not None

    def _at(self, prefix: str) -> _Open:
        found = self._find(prefix)
        with collecting_later():
            return _Open(found=found, listed=listed(found, self._path(prefix)))

    def _find(self, prefix: str) -> Found:
        catalog = self._place.catalog
        try:
            return catalog.find(prefix)
        except CheckpointNotFoundError:
            try:
                catalog.storage.stat(f"{prefix}/{_THEIRS}")
            except ObjectNotFoundError:
                pass
            else:
                raise CheckpointNotFoundError(
                    "this was saved with DCP's own FileSystemWriter; load it with FileSystemReader",
                    path=self._path(prefix),
                ) from None
            raise

    def _opened(self) -> _Open:
        if self._open is None:
            raise LoadError("read_metadata must come first", path=self._place.prefix)
        return self._open

    def _path(self, prefix: str) -> str:
        return f"{self._place.catalog.storage.url}/{prefix}"
