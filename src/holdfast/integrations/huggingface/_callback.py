"""``HoldfastCallback``: how a ``Trainer`` saves and goes on with holdfast.

resume           the newest whole checkpoint is chosen, its TrainerState put where Trainer reads it
on_train_begin   model, optimizer, scheduler and scaler exist now, and are loaded
on_epoch_begin   generators as when that epoch began, so that its data come in the same order
on_step_begin    generators as when it was saved: from here on everything is as it would have been

The ``Trainer`` itself counts epochs and skips batches, from the step in its state.
"""

import os
import shutil
import tempfile
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

import transformers
from transformers.trainer_callback import TrainerCallback

from holdfast import _checks
from holdfast.catalog import Retention
from holdfast.contracts import Storage
from holdfast.distributed import (
    CheckpointOptions,
    DistributedCheckpoint,
    FullReadChecker,
    LoadOptions,
    RequiredMetadata,
    ResumeResult,
    SaveOptions,
    keep_best,
    keep_last,
    per_rank,
)
from holdfast.distributed._rng import RngFill, capture_rng
from holdfast.errors import SaveError
from holdfast.integrations.huggingface._trainer import (
    check_trainer,
    metrics_of,
    new_progress,
    optimizer_of,
    state_text,
    statefuls_of,
)
from holdfast.storage import StorageOptions

_STATE: Final = "trainer_state"
_PROGRESS: Final = "progress"
_LIBRARY: Final = "transformers"
"""Under this name a record has the version that saved: it tells checkpoints of a Trainer."""


class HoldfastCallback(TrainerCallback):  # type: ignore[misc]
    """Saves a run of a ``Trainer`` wherever that would save, in its place and while it trains on;
    and has it go on from the newest checkpoint that is whole.

    ``storage`` is a path, a URL, a ``Storage`` or all ``CheckpointOptions``. Without a
    ``retention`` of its own, ``save_total_limit`` of the ``Trainer`` is kept to. ``options`` are
    those of every save; name, step and metrics are the callback's. Begin with

        trainer.train(resume_from_checkpoint=callback.resume(trainer))

    on all ranks. An error of a save is raised by the next one, or at the end of the training.
    """

    def __init__(
        self,
        storage: CheckpointOptions | StorageOptions | Storage | str | os.PathLike[str],
        options: SaveOptions | None = None,
    ) -> None:
        self._checkpointing = (
            storage
            if isinstance(storage, CheckpointOptions)
            else CheckpointOptions(storage=storage)
        )
        self._saving = _checked(SaveOptions() if options is None else options)
        self._checkpoint: DistributedCheckpoint | None = None
        self._trainer: Any = None
        self._found: ResumeResult | None = None
        self._folder: str | None = None
        self._rng: dict[str, object] | None = None
        self._progress = new_progress()

    def resume(self, trainer: Any) -> str | None:
        """Choose what ``trainer`` goes on from, and return what its ``train`` takes as
        ``resume_from_checkpoint``: a small folder with the ``TrainerState``, or ``None`` if nothing
        was ever saved. All ranks call this.

        Newer checkpoints that are damaged are passed over, with a warning in the log; all bytes
        of a checkpoint are read for that. Raises as ``DistributedCheckpoint.resume``, and
        ``ValueError`` for a ``trainer`` whose runs cannot be saved here.
        """
        check_trainer(trainer)
        self._attach(trainer)
        extra: dict[str, object] = {_STATE: None}
        options = LoadOptions(load_rng_state=False, remap=_rank_0)
        self._found = self._opened().resume(None, None, options, extra=extra)
        self._folder = None if self._found is None else self._written(str(extra[_STATE]))
        return self._folder

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        if self._trainer is None:
            raise RuntimeError(
                "this HoldfastCallback does not know its trainer, and could not save it; begin "
                "with trainer.train(resume_from_checkpoint=callback.resume(trainer))"
            )
        if self._found is None:
            return
        if state.global_step != self._found.step:
            raise RuntimeError(
                f"{self._found.prefix} was chosen to go on from, and this training begins at step "
                f"{state.global_step}; begin with "
                "trainer.train(resume_from_checkpoint=callback.resume(trainer))"
            )
        self._load(self._found)

    def on_epoch_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        if self._rng is not None:
            is_inside = state.epoch != int(state.epoch)
            RngFill(self._progress.epoch_rng if is_inside else self._rng).apply()
            self._rng = self._rng if is_inside else None
        self._progress.epoch_rng = capture_rng()

    def on_step_begin(self, *_args: Any, **_: Any) -> None:
        if self._rng is not None:
            RngFill(self._rng).apply()
            self._rng = None

    def on_train_end(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
        checkpoint = self._opened()
        self._found = self._rng = None
        try:
            checkpoint.wait()
            if args.load_best_model_at_end and state.best_global_step is not None:
                best = LoadOptions(
                    checkpoint_prefix=_name(state.best_global_step), load_rng_state=False
                )
                checkpoint.load(self._trainer.model, options=best)
        finally:
            self._checkpoint = None
            checkpoint.close()

    def _attach(self, trainer: Any) -> None:
        """Put this in the place of what ``trainer`` writes and reads itself."""
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        if self._trainer is trainer:
            return
        self._trainer = trainer
        read_own = trainer._load_from_checkpoint  # noqa: SLF001

        def read(folder: str, *args: Any, **options: Any) -> None:
            if folder != self._folder:
                read_own(folder, *args, **options)  # one that the Trainer itself has written

        trainer._load_from_checkpoint = read  # noqa: SLF001
        trainer._save_checkpoint = self._save  # noqa: SLF001

    def _save(self, _: Any, trial: Any = None) -> None:
        trainer = self._trainer
        if trial is not None:
            raise SaveError("the trials of a hyperparameter search are not saved by holdfast")
        trainer.store_flos()
        self._progress.look(trainer)
        step = trainer.state.global_step
        options = replace(
            self._saving,
            checkpoint_prefix=_name(step),
            step=step,
            metrics=metrics_of(trainer.state),
            custom_metadata={
                **self._saving.custom_metadata,
                _LIBRARY: transformers.__version__,
            },
            overwrite=True,  # one of this name is damaged, or of a life before the last resume
        )
        extra = {
            **statefuls_of(trainer),
            _STATE: state_text(trainer),
            _PROGRESS: per_rank(self._progress),
        }
        self._opened().save_async(trainer.model, optimizer_of(trainer), options, extra=extra)

    def _load(self, found: ResumeResult) -> None:
        trainer = self._trainer
        extra = statefuls_of(trainer)
        has_own = found.loaded.source_world_size == found.loaded.target_world_size
        if has_own:
            extra[_PROGRESS] = self._progress
        # resume() has read and verified all of it.
        options = LoadOptions(checkpoint_prefix=found.prefix, skip_validation=True)
        self._opened().load(trainer.model, optimizer_of(trainer), options, extra=extra)
        if has_own:
            self._progress.put(trainer)
            self._rng = capture_rng()

    def _opened(self) -> DistributedCheckpoint:
        """The checkpointer, made when it is first needed: torch.distributed is set up by then."""
        if self._checkpoint is None:
            given = self._checkpointing
            options = replace(
                given,
                retention=given.retention or _retention(self._trainer.args),
                integrity_checkers=(
                    *given.integrity_checkers,
                    RequiredMetadata([_LIBRARY]),
                    FullReadChecker(),
                ),
            )
            self._checkpoint = DistributedCheckpoint.create(options=options)
        return self._checkpoint

    def _written(self, state: str) -> str:
        """A folder with the state, as a ``Trainer`` looks for it. It stays as long as this does: a
        ``Trainer`` that has found a smaller batch size reads it again."""
        folder = tempfile.mkdtemp(prefix="holdfast-trainer-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        Path(folder, "trainer_state.json").write_text(state, encoding="utf-8")
        return folder


def _name(step: int) -> str:
    return f"step_{step}"


def _rank_0(rank: int, world_size: int, saved: int) -> int:
    """Of what ranks have logged, on another number of ranks: that of the first."""
    del rank, world_size, saved
    return 0


def _checked(options: SaveOptions) -> SaveOptions:
    _checks.instance("options", options, SaveOptions)
    for name in ("checkpoint_prefix", "step", "metrics"):
        if getattr(options, name) not in (None, {}):
            raise ValueError(f"{name} is the callback's to choose, for every save another")
    for name in ("include_optimizer", "include_rng_state"):
        if not getattr(options, name):
            raise ValueError(f"{name}=False leaves out what a run needs to go on exactly")
    return options


def _retention(args: Any) -> Retention | None:
    """What the ``Trainer`` was told to keep: its last ones, and the best if it looks for one."""
    if not args.save_total_limit:
        return None
    metric = args.metric_for_best_model
    if metric is None:
        return keep_last(args.save_total_limit)
    name = metric if metric.startswith("eval_") else f"eval_{metric}"
    mode: Literal["min", "max"] = "max" if args.greater_is_better else "min"
    return keep_last(args.save_total_limit) | keep_best(name, mode=mode)
