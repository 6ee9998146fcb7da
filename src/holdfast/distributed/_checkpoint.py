"""The front of the room: one object that saves and loads the state of a training, on any number
of ranks."""

import os
from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Self, final

import torch

from holdfast import _checks
from holdfast.catalog import Catalog, CheckpointInfo, Retention
from holdfast.contracts import Coordinator, Storage
from holdfast.coordination import SoloCoordinator, TorchCoordinator
from holdfast.distributed._bulk import Bulk
from holdfast.distributed._handle import SaveHandle
from holdfast.distributed._load import Loaded, load_state
from holdfast.distributed._options import (
    DEFAULT_STORAGE,
    CheckpointOptions,
    LoadOptions,
    SaveOptions,
    checked_staging,
)
from holdfast.distributed._preparing import Request
from holdfast.distributed._result import CheckpointLoadResult
from holdfast.distributed._resuming import ResumeResult, check_resume_options, resume_newest
from holdfast.distributed._save_record import OnSave
from holdfast.distributed._saves import Saves
from holdfast.distributed._snapshots import Snapshots
from holdfast.distributed._stored import has_leaves
from holdfast.distributed._tools import Tools
from holdfast.distributed._upkeep import Upkeep
from holdfast.distributed._validation import CheckpointValidator
from holdfast.errors import ClosedError
from holdfast.resilience import FaultToleranceHandler
from holdfast.storage import StorageOptions

MODEL: Final = "model"
OPTIMIZER: Final = "optimizer"
EXTRA: Final = "extra"


@final
class DistributedCheckpoint:
    """Saves and loads the state of a training. A context manager; ``close`` it when done.

    Every rank makes one, and every rank makes the same calls in the same order: ``save`` and
    ``load`` are collective. ``list_checkpoints`` and ``delete_checkpoint`` are for any one rank.
    Used by one thread at a time.

    Without a ``coordinator`` the ranks are torch.distributed's if it is initialised, else there is
    one. A ``storage`` is one, its URL or path, a catalog, or options. With a ``retention``, rank 0
    prunes all of that storage after every save; see ``Catalog.prune``.
    """

    def __init__(
        self,
        *,
        coordinator: Coordinator | None = None,
        storage: Catalog | Storage | StorageOptions | str | os.PathLike[str] | None = None,
        fault_handler: FaultToleranceHandler | None = None,
        validator: CheckpointValidator | None = None,
        default_timeout_s: float = 600.0,
        retention: Retention | None = None,
        staging_bytes: int | None = None,
        on_save: OnSave | None = None,
    ) -> None:
        self._timeout_s = _checks.seconds("default_timeout_s", default_timeout_s)
        given = DEFAULT_STORAGE if storage is None else storage
        catalog = given if isinstance(given, Catalog) else Catalog(given)
        if retention is not None:
            _checks.instance("retention", retention, Retention)
        self._owns_coordinator = coordinator is None
        ranks = _default_coordinator(self._timeout_s) if coordinator is None else coordinator
        self._closed = False
        self._tools = Tools(
            coordinator=ranks,
            catalog=catalog,
            handler=fault_handler or FaultToleranceHandler(catalog),
            validator=validator or CheckpointValidator(catalog),
            bulk=Bulk(ranks),
            upkeep=None if retention is None else Upkeep(catalog, retention),
        )
        self._saves = Saves(self._tools, Snapshots(checked_staging(staging_bytes)), on_save)

    @classmethod
    def create(
        cls, coordinator: Coordinator | None = None, options: CheckpointOptions | None = None
    ) -> Self:
        """A checkpointer as ``options`` say. Every rank calls this."""
        chosen = CheckpointOptions() if options is None else options
        _checks.instance("options", chosen, CheckpointOptions)
        catalog = Catalog(chosen.storage, retry_policy=chosen.retry_policy)
        return cls(
            coordinator=coordinator,
            storage=catalog,
            fault_handler=FaultToleranceHandler(catalog, chosen.retry_policy),
            validator=CheckpointValidator(
                catalog, chosen.integrity_checkers, chosen.compatibility_checkers
            ),
            default_timeout_s=chosen.default_timeout_s,
            retention=chosen.retention,
            staging_bytes=chosen.staging_bytes,
            on_save=chosen.on_save,
        )

    @property
    def catalog(self) -> Catalog:
        """The checkpoints of this storage, for reading as NumPy, verifying and gc."""
        return self._tools.catalog

    @property
    def coordinator(self) -> Coordinator:
        return self._tools.coordinator

    def save(
        self,
        model: object,
        optimizer: object = None,
        options: SaveOptions | None = None,
        *,
        extra: Mapping[str, object] | None = None,
    ) -> str:
        """Save, and return the prefix. Durable on return, and whole on all ranks or on none.

        ``model`` and ``optimizer`` are torch's, or anything with ``state_dict``, or a plain tree.
        ``extra`` names further things of any of these kinds: schedulers, data loaders, the step.
        Values in it that differ between ranks are kept for each rank.

        ``CheckpointExistsError`` if the name is taken and not to be overwritten, ``SaveError`` and
        its kinds for what cannot be saved, ``StorageError``, and ``CoordinationError`` or
        ``OperationTimeoutError`` naming the ranks that were lost or late. After any error what was
        saved before is intact.
        """
        return self._save(_request(model, optimizer, options, extra))

    def save_async(
        self,
        model: object,
        optimizer: object = None,
        options: SaveOptions | None = None,
        *,
        extra: Mapping[str, object] | None = None,
    ) -> SaveHandle:
        """Save the state as it is now, while training goes on; ``handle.result()`` is the prefix.

        What torch optimizers own, parameters and their state, is copied in the background, and by
        the next ``step()`` of any optimizer at the latest, which waits for that. Everything else
        is copied before this returns, but for tensors of modules that have not changed since the
        last save. A change that comes between all the same fails the save
        (``TornSnapshotError``), as far as it can be seen; ``SaveOptions(snapshot="copy")`` copies
        everything at once.

        One save at a time: another waits, or is refused (``SaveInProgressError``), as
        ``when_busy`` says. The error of one that failed is raised by its handle or, if nobody
        asks that, by the next save or by ``close``. The interpreter does not exit before a save
        has ended. Otherwise as ``save``.
        """
        request = _request(model, optimizer, options, extra)
        self._require_open()
        return self._saves.start(request, self._limit(request.options.timeout_s))

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when no save is under way in the background. Raises the error of the last one,
        if nobody has been given it, and ``OperationTimeoutError`` if it is not done in time."""
        limit_s = None if timeout_s is None else _checks.seconds("timeout_s", timeout_s, zero=True)
        self._require_open()
        self._saves.wait(limit_s)

    def save_model_only(self, model: object, options: SaveOptions | None = None) -> str:
        """Save a model without optimizer, extra state or random number generators."""
        chosen = SaveOptions() if options is None else options
        _checks.instance("options", chosen, SaveOptions)
        return self._save(Request(state={MODEL: model}, options=chosen, model=(MODEL,)))

    def load(
        self,
        model: object = None,
        optimizer: object = None,
        options: LoadOptions | None = None,
        *,
        extra: dict[str, object] | None = None,
    ) -> CheckpointLoadResult:
        """Fill the state from a checkpoint, saved by any number of ranks in any layout.

        All or nothing, on all ranks: nothing is changed before all of them have read and verified
        everything, and if something then fails it is put back (not with ``in_place``). What is
        ``None`` is not loaded. In ``extra``, tensors are filled and statefuls loaded, plain values
        are replaced in the dict.

        ``CheckpointNotFoundError``; ``ValidationError`` with one report of all that does not fit,
        on any rank; ``CorruptedError`` naming tensor and file; ``IncompatibleVersionError``;
        ``LoadError``, ``StorageError`` and errors about ranks as for ``save``.
        """
        chosen = LoadOptions() if options is None else options
        _checks.instance("options", chosen, LoadOptions)
        if chosen.checkpoint_prefix is None:
            raise ValueError(
                "LoadOptions(checkpoint_prefix=...) is required; list_checkpoints() names those "
                "there are"
            )
        target: dict[str, object] = {}
        if model is not None:
            target[MODEL] = model
        if optimizer is not None and chosen.load_optimizer:
            target[OPTIMIZER] = optimizer
        if extra is not None:
            target[EXTRA] = _extra(extra)
        loaded = self._load(target, chosen, chosen.checkpoint_prefix, rng=chosen.load_rng_state)
        return CheckpointLoadResult(
            metadata=loaded.metadata,
            model_state=_state_of(model),
            optimizer_state=_state_of(target.get(OPTIMIZER)),
            extra=_plain_extra(loaded.tree, extra or {}),
            source_world_size=loaded.metadata.world_size,
            target_world_size=self._tools.coordinator.world_size,
            was_resharded=loaded.was_resharded,
            report=loaded.report,
            not_restored=loaded.not_restored,
            validation=loaded.validation,
        )

    def resume(
        self,
        model: object,
        optimizer: object = None,
        options: LoadOptions | None = None,
        *,
        extra: dict[str, object] | None = None,
    ) -> ResumeResult | None:
        """``load`` the newest checkpoint that is whole; ``None`` if the storage has none. The
        result says which newer ones were passed over, and why; so does a warning in the log.

        One is passed over if its record, files or bytes are damaged, missing or of a version that
        this one does not read, or if the validation refuses it. ``LoadError`` with all reasons if
        none is left: to begin anew then is not for this to decide. Everything else is raised as by
        ``load``: a ``ValidationError`` if the newest does not fit the state, ``StorageError`` if
        the storage does not answer, and errors about ranks.
        """
        chosen = LoadOptions() if options is None else options
        _checks.instance("options", chosen, LoadOptions)
        check_resume_options(chosen)
        self._require_open()
        self._saves.settle()  # so that what is being saved is listed

        def load(prefix: str) -> CheckpointLoadResult:
            which = replace(chosen, checkpoint_prefix=prefix)
            return self.load(model, optimizer, which, extra=extra)

        return resume_newest(
            self._tools, load, timeout_s=self._limit(chosen.timeout_s), in_place=chosen.in_place
        )

    def list_checkpoints(self) -> list[CheckpointInfo]:
        """Every committed checkpoint of the storage, the newest first."""
        self._require_open()
        return self._tools.catalog.list()

    def delete_checkpoint(self, prefix: str) -> None:
        """Delete a checkpoint: its record first, then files that nothing else needs."""
        self._require_open()
        self._tools.catalog.delete(prefix)

    def close(self) -> None:
        """Wait for a save in the background, and release what this has made: the way to other
        ranks, and the coordinator unless it was given. Raises the error of the last save in the
        background, if nobody has been given it. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self._saves.wait()
        finally:
            self._saves.finish_upkeep()
            self._tools.bulk.close()
            if self._owns_coordinator:
                self._tools.coordinator.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception as problem:  # noqa: BLE001 -- what ended the block is what is raised
            told = f"{type(problem).__name__}: {problem}"
            error.add_note(f"Beside that, a save in the background had failed: {told}")

    def __repr__(self) -> str:
        ranks = self._tools.coordinator
        return (
            f"DistributedCheckpoint({self._tools.storage.url!r}, rank {ranks.rank} of "
            f"{ranks.world_size})"
        )

    def _save(self, request: Request) -> str:
        self._require_open()
        return self._saves.save(request, self._limit(request.options.timeout_s))

    def _limit(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else timeout_s

    def _load(
        self,
        target: Any,
        options: LoadOptions,
        prefix: str,
        *,
        rng: bool = False,
        device: torch.device | None = None,
        open_at: frozenset[str] = frozenset({"", EXTRA}),
    ) -> Loaded:
        self._require_open()
        self._saves.settle()
        return load_state(
            self._tools,
            target,
            options,
            prefix=prefix,
            open_at=open_at,
            timeout_s=self._limit(options.timeout_s),
            rng=rng,
            device=device,
        )

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("this DistributedCheckpoint is closed")


def _default_coordinator(timeout_s: float) -> Coordinator:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return TorchCoordinator(timeout_s=timeout_s)
    return SoloCoordinator()


def _request(
    model: object,
    optimizer: object,
    options: SaveOptions | None,
    extra: Mapping[str, object] | None,
) -> Request:
    chosen = SaveOptions() if options is None else options
    _checks.instance("options", chosen, SaveOptions)
    if isinstance(model, torch.optim.Optimizer) or isinstance(optimizer, torch.nn.Module):
        raise ValueError(  # noqa: TRY004 -- as every refusal of an argument
            "save takes the model first, then the optimizer"
        )
    state: dict[str, object] = {MODEL: model}
    if optimizer is not None and chosen.include_optimizer:
        state[OPTIMIZER] = optimizer
    if extra is not None:
        state[EXTRA] = dict(_extra(extra))
    return Request(state=state, options=chosen, model=(MODEL,), rng=chosen.include_rng_state)


def _extra(extra: object) -> Any:
    if not isinstance(extra, Mapping) or not all(isinstance(name, str) for name in extra):
        raise ValueError(f"extra must be a dict of things by name, not {extra!r:.200}")
    return extra


def _state_of(value: Any) -> Any:
    if value is None or isinstance(value, Mapping):
        return value
    return value.state_dict() if hasattr(value, "state_dict") else value


def _plain_extra(tree: object, extra: Mapping[str, object]) -> dict[str, object]:
    """What was loaded into, and every plain value that is stored beside."""
    stored = tree.get(EXTRA) if isinstance(tree, Mapping) else None
    found = {
        name: value
        for name, value in (stored.items() if isinstance(stored, Mapping) else ())
        if not has_leaves(value)
    }
    return found | dict(extra)
