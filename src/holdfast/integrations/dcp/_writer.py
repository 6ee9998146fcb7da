"""``HoldfastWriter``: how ``torch.distributed.checkpoint`` saves with holdfast.

prepare_local_plan   every rank sends a token with its plan
prepare_global_plan  the coordinator announces the save, and tells its name to all, by token
write_data           every rank writes its file, durably, with digests
finish               the coordinator commits: from that instant the checkpoint exists
"""

import contextlib
import dataclasses
import os
import secrets
import uuid
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from holdfast.catalog._catalog import checked_metrics, checked_step
from holdfast.catalog._names import shard_key
from holdfast.catalog._shard_write import Tick
from holdfast.catalog._writing import Facts, check_record_size, record_of
from holdfast.contracts import Storage
from holdfast.distributed._announcing import look_for
from holdfast.distributed._collecting import collecting_later
from holdfast.errors import SaveError
from holdfast.format import CommitRecord, CompressionLevel, encode_value
from holdfast.integrations.dcp._items import ItemWriter, incomplete
from holdfast.integrations.dcp._place import CheckpointId, Place, is_possible, of_rank
from holdfast.integrations.dcp._record import NOTES, Contents, contents_of
from holdfast.integrations.dcp._saving import Saving
from holdfast.resilience import FaultToleranceHandler
from holdfast.storage import StorageOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class _Announced:
    """What the coordinator tells a rank. ``token`` is the rank's own: a plan that DCP has cached
    comes with an older one, and so with the name of a save that is over."""

    token: str | None
    attempt: str
    incomplete: frozenset[str]


@dataclass(slots=True, kw_only=True)
class _Turn:
    """One save, from ``set_up_storage_writer`` on, on this rank."""

    rank: int = 0
    prefix: str = ""
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    saving: Saving | None = None
    ending: "weakref.finalize[..., HoldfastWriter] | None" = None
    world_size: int = 1


class HoldfastWriter(StorageWriter):  # type: ignore[misc]
    """Saves what ``dcp.save`` and ``dcp.async_save`` give it as a checkpoint of holdfast's.

    ``path`` is ``<root>/<prefix>``, a path or a URL, as of ``holdfast.save``; with ``storage`` it
    is a prefix in that. ``checkpoint_id`` of a save is the same, and takes its place.

    A checkpoint exists once all of it is durable, and not before; a save that is interrupted leaves
    none, or, with ``overwrite``, the one that was there. ``step``, if it is not given, is the
    number that the name ends with (``step_100``, ``step-100``). ``metrics`` and
    ``custom_metadata`` are kept in the record, and ``compression_level`` is that of
    ``SaveOptions``. Values that are no tensors are stored by type, never pickled: what cannot be
    is a ``SaveError`` with its key.

    Used by one save at a time. Can be pickled.
    """

    def __init__(
        self,
        path: CheckpointId,
        *,
        storage: Storage | StorageOptions | None = None,
        overwrite: bool = True,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        custom_metadata: Mapping[str, object] | None = None,
        compression_level: CompressionLevel | str = CompressionLevel.NONE,
    ) -> None:
        super().__init__()
        self._place = Place(checkpoint_id=path, storage=storage)
        self._overwrite = overwrite
        self._step = None if step is None else checked_step(step)
        self._metrics = checked_metrics(metrics)
        self._custom = dict(custom_metadata or {})
        if NOTES in self._custom:
            raise ValueError(f"the key {NOTES!r} of custom_metadata is taken")
        encode_value(self._custom, root="custom_metadata")
        self._level = CompressionLevel(compression_level)
        self._save_id = str(uuid.uuid4())
        self._turn: _Turn | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without a save under way, which is this process's."""
        return {**self.__dict__, "_turn": None}

    def __repr__(self) -> str:
        return f"HoldfastWriter({os.fspath(self.checkpoint_id)!r})"

    @property
    def checkpoint_id(self) -> CheckpointId:
        """Where the next save goes."""
        return self._place.checkpoint_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Whether a checkpoint can be kept there: a path, or a URL of a kind that is known."""
        return is_possible(checkpoint_id)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save_id)

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Begin anew, at another place if one is given. Gives up a save that was not finished."""
        if checkpoint_id:
            self._place = self._place.at(checkpoint_id)
        self._save_id = str(uuid.uuid4())
        self._give_up()

    def set_up_storage_writer(
        self,
        is_coordinator: bool,  # noqa: ARG002 -- DCP's signature
        *args: Any,  # noqa: ARG002 -- as above
        **kwargs: Any,
    ) -> None:
        self._give_up()
        rank = kwargs.get("rank") or 0
        prefix = self._place.prefix
        if not kwargs.get("use_collectives", True):
            prefix = of_rank(prefix, rank)
        self._turn = _Turn(rank=rank, prefix=prefix)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return dataclasses.replace(plan, storage_data=self._now().token)

    def prepare_global_plan(self, plans: Sequence[SavePlan]) -> list[SavePlan]:
        """``CheckpointExistsError`` if the name is taken and is not to be overwritten."""
        turn, catalog = self._now(), self._place.catalog
        alone = incomplete(plans[0]) if len(plans) == 1 else frozenset[str]()
        attempt = catalog.begin(turn.prefix, overwrite=self._overwrite)
        turn.saving = Saving(catalog, attempt)
        turn.ending = weakref.finalize(self, turn.saving.forget)
        turn.world_size = len(plans)
        return [
            dataclasses.replace(
                plan,
                storage_data=_Announced(
                    token=plan.storage_data if isinstance(plan.storage_data, str) else None,
                    attempt=attempt.intent.attempt,
                    incomplete=alone,
                ),
            )
            for plan in plans
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        """Durable when this returns; nothing is a checkpoint yet."""
        turn = self._now()
        try:
            results = self._write(turn, plan, planner)
        except BaseException:
            if turn.world_size == 1:  # else others may be writing still; see _saving
                self._give_up()
            raise
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> None:
        """Make the checkpoint exist."""
        turn = self._now()
        if turn.saving is None:
            raise SaveError("there is no save under way to be finished", path=turn.prefix)
        try:
            with collecting_later():
                record = self._record(turn, turn.saving, contents_of(metadata, results))
            turn.saving.commit(record)
        except BaseException:
            self._give_up()
            raise
        self._give_up()  # of which nothing is left to be given up
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_meta = self.storage_meta()

    def _write(self, turn: _Turn, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        told = plan.storage_data
        with contextlib.ExitStack() as stack:
            name, tick = self._named(turn, told, stack)
            writer = ItemWriter(
                storage=self._place.catalog.storage,
                key_of=partial(shard_key, turn.prefix, name, turn.rank),
                level=self._level,
                planner=planner,
                incomplete=told.incomplete if isinstance(told, _Announced) else frozenset(),
            )
            retry = FaultToleranceHandler(None, None).execute_with_retry
            sizes = (item.tensor_storage_size() or 0 for item in plan.items)
            with collecting_later(moved_bytes=sum(sizes)):
                results = writer.write(plan.items, tick=tick, retry=retry)
            stack.pop_all()
        return results

    def _named(self, turn: _Turn, told: object, stack: contextlib.ExitStack) -> tuple[str, Tick]:
        """The name of the save that this rank writes for, and what it does now and then meanwhile.

        A rank that has a plan of an earlier save announces one of its own, which leaving the
        stack removes; the coordinator commits its files all the same.
        """
        catalog = self._place.catalog
        if turn.saving is not None:
            return turn.saving.attempt.intent.attempt, lambda _: None
        if isinstance(told, _Announced) and told.token == turn.token:
            look_for(catalog.storage, turn.prefix, told.attempt, lambda: None)
            return told.attempt, lambda _: None
        own = stack.enter_context(catalog.begin(turn.prefix, overwrite=True))
        return own.intent.attempt, lambda _: own.keep_alive()

    def _record(self, turn: _Turn, saving: Saving, contents: Contents) -> CommitRecord:
        notes = {**contents.notes, "version": CURRENT_DCP_VERSION, "save_id": self._save_id}
        custom = encode_value({**self._custom, NOTES: notes}, root="custom_metadata")
        check_record_size(contents.tree, custom, self._place.catalog.storage, turn.prefix)
        step = self._place.step if self._step is None else self._step
        return record_of(
            saving.attempt,
            Facts(step=step, metrics=self._metrics, custom=custom),
            tree=contents.tree,
            files=contents.files,
            tensors=contents.tensors,
            world_size=turn.world_size,
        )

    def _now(self) -> _Turn:
        if self._turn is None:
            raise SaveError("set_up_storage_writer must come first", path=self._place.prefix)
        return self._turn

    def _give_up(self) -> None:
        turn, self._turn = self._turn, None
        if turn is not None and turn.saving is not None and turn.ending is not None:
            turn.ending.detach()
            turn.saving.give_up()
