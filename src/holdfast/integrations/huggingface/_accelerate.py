"""``AcceleratorCheckpoint``: what Accelerate has prepared for a loop of one's own, kept.

``Accelerator.save_state`` has hooks for models only, and pickles all else whatever they do. So this
takes its place, and knows what it knows: the lists that ``prepare`` has filled.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import accelerate  # type: ignore[import-untyped]
from accelerate.utils import DistributedType  # type: ignore[import-untyped]

from holdfast import _checks
from holdfast.contracts import Storage
from holdfast.distributed import (
    CheckpointOptions,
    DistributedCheckpoint,
    LoadOptions,
    ResumeResult,
    SaveHandle,
    SaveOptions,
    per_rank,
)
from holdfast.distributed._rng import capture_rng
from holdfast.integrations.huggingface._loader import Loader
from holdfast.storage import StorageOptions

_LIBRARY: Final = "accelerate"
_REFUSED: Final = {
    DistributedType.DEEPSPEED: "DeepSpeed keeps model and optimizer itself, in files of its own",
    DistributedType.MEGATRON_LM: "Megatron-LM keeps model and optimizer itself",
    DistributedType.XLA: "tensors of XLA are not saved by holdfast",
}


class AcceleratorCheckpoint:
    """Saves all that an ``Accelerator`` has prepared or that was registered with it, while the loop
    goes on, and has a new process go on from the newest checkpoint that is whole.

    Make it after ``accelerator.prepare``. Models, optimizers, schedulers, the scaler of FP16,
    registered objects, the random generators of every rank and the order and place of its data are
    saved; ``storage`` is a path, a URL, a ``Storage`` or all ``CheckpointOptions``. ``options`` are
    those of every save: name, step and metrics are refused there, and ``overwrite`` is always on,
    whatever they say. All ranks call every method. A context manager: leaving it waits for the last
    save, and raises its error.
    """

    def __init__(
        self,
        accelerator: Any,
        storage: CheckpointOptions | StorageOptions | Storage | str | os.PathLike[str],
        options: SaveOptions | None = None,
    ) -> None:
        _check(accelerator)
        self._accelerator = accelerator
        self._saving = _checked(SaveOptions() if options is None else options)
        given = (
            storage
            if isinstance(storage, CheckpointOptions)
            else CheckpointOptions(storage=storage)
        )
        self._checkpoint = DistributedCheckpoint.create(options=given)
        self._loaders: list[Loader] = []
        self._loaders += [Loader(each, self._loaders) for each in accelerator._dataloaders]  # noqa: SLF001
        self._rng: dict[str, object] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._checkpoint.__exit__(*raised)  # type: ignore[arg-type]

    @property
    def checkpoint(self) -> DistributedCheckpoint:
        """What does the work: its catalog, its records of saves."""
        return self._checkpoint

    def save(self, step: int, *, metrics: Mapping[str, float] | None = None) -> SaveHandle:
        """Save as ``step_<step>``, after that many steps. Returns as soon as the loop may go on;
        an error is raised by the next save or at the end, or by the handle. One of this name is
        replaced: it is damaged, or of a life before the last resume."""
        options = replace(
            self._saving,
            checkpoint_prefix=f"step_{step}",
            step=step,
            metrics=dict(metrics or {}),
            custom_metadata={**self._saving.custom_metadata, _LIBRARY: accelerate.__version__},
            overwrite=True,
        )
        model, optimizer, extra = self._parts()
        return self._checkpoint.save_async(model, optimizer, options, extra=extra)

    def resume(self) -> ResumeResult | None:
        """Load the newest checkpoint that is whole, or return ``None`` if nothing was ever saved.
        ``step`` of the result is how many steps are done. Raises as
        ``DistributedCheckpoint.resume``; after an error nothing is changed."""
        model, optimizer, extra = self._parts()
        resumed = self._checkpoint.resume(model, optimizer, LoadOptions(), extra=extra)
        self._rng = None if resumed is None else capture_rng()
        return resumed

    def batches(self, loader: Any) -> Iterator[Any]:
        """The batches of one epoch of a prepared ``loader``; after ``resume`` those that are left
        of the epoch in which it was saved, with the same rows in the same order. With the first of
        them the random generators are as they were after the save. That is not exact if a dataset
        or collator draws from them: batches are made ahead of time, and those before not again.

        Saves know where in its data a loop over this is. One that was left by ``break`` keeps its
        place for a process that goes on with it first. Inside of the loop over another loader, as
        an evaluation may be, it is over then, and the next one begins anew."""
        found = [each for each in self._loaders if each.loader is loader]
        if not found:
            raise ValueError("loader must be what accelerator.prepare has returned, before this")
        return found[0].batches(self._where_to_go_on)

    def _where_to_go_on(self) -> Mapping[str, object]:
        """The state in which the generators belong: once after ``resume`` that of the save,
        whatever was drawn since; from then on the one that they are in."""
        saved, self._rng = self._rng, None
        return capture_rng() if saved is None else saved

    def _parts(self) -> tuple[Any, Any, dict[str, object]]:
        """The first model and optimizer, and all else by what it is and its number."""
        known = self._accelerator
        models = [known.unwrap_model(each) for each in known._models]  # noqa: SLF001
        optimizers = [each.optimizer for each in known._optimizers]  # noqa: SLF001
        parts: dict[str, list[object]] = {
            "models": models[1:],
            "optimizers": optimizers[1:],
            "schedulers": [each.scheduler for each in known._schedulers],  # noqa: SLF001
            "objects": [_Accumulation(known), *known._custom_objects],  # noqa: SLF001
            "scalers": [] if known.scaler is None else [known.scaler],
            "loaders": [per_rank(each) for each in self._loaders],
        }
        extra: dict[str, object] = {
            kind: {str(nth): each for nth, each in enumerate(members)}
            for kind, members in parts.items()
            if members
        }
        return models[0], optimizers[0] if optimizers else None, extra


@dataclass(frozen=True, slots=True)
class _Accumulation:
    """How many of the batches of a step whose gradients are accumulated were seen."""

    accelerator: Any

    def state_dict(self) -> dict[str, object]:
        return {"step": self.accelerator.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.accelerator.step = int(state["step"])


def _check(accelerator: Any) -> None:
    """``ValueError`` for what is no ``Accelerator`` that can be kept."""
    if not isinstance(accelerator, accelerate.Accelerator):
        raise ValueError(f"accelerator must be an accelerate.Accelerator, not {accelerator!r:.200}")  # noqa: TRY004 -- as every refusal of an argument
    problem = _REFUSED.get(accelerator.distributed_type)
    if accelerator.distributed_type is DistributedType.FSDP and not accelerator.is_fsdp2:
        problem = "FSDP1 is not supported; choose FSDP2 (fsdp_version=2)"
    if problem is not None:
        raise ValueError(f"this Accelerator cannot be kept by holdfast: {problem}")
    if any(getattr(e, "use_stateful_dataloader", False) for e in accelerator._dataloaders):  # noqa: SLF001
        raise ValueError(
            "prepare loaders without use_stateful_dataloader; batches() knows the place in others"
        )
    if not accelerator._models:  # noqa: SLF001 -- there is no other list
        raise ValueError("this Accelerator has no model yet; call accelerator.prepare first")


def _checked(options: SaveOptions) -> SaveOptions:
    _checks.instance("options", options, SaveOptions)
    for name in ("checkpoint_prefix", "step", "metrics"):
        if getattr(options, name) not in (None, {}):
            raise ValueError(f"{name} is given to every save")
    return options
