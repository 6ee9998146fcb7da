"""What of a ``Trainer`` is the state of its run, and which ones cannot be kept. Reads it, and puts
back what only the ``Trainer`` itself has; saves nothing."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped]
from transformers.trainer_callback import ExportableState

from holdfast.distributed._rng import RngFill, capture_rng
from holdfast.errors import SaveError

_OWN_FILES: Final = ("_save_checkpoint", "_load_from_checkpoint")
"""Where a ``Trainer`` writes files of its own and reads its model from them."""

_TIMINGS: Final = ("_runtime", "_per_second")


@dataclass(slots=True, kw_only=True)
class Progress:
    """What each rank knows of a run beside its ``TrainerState``: the random generators as they were
    when the epoch began, from which its order comes, and the losses that are not logged yet."""

    epoch_rng: Mapping[str, object]
    loss: float = 0.0
    logged_step: int = 0

    def state_dict(self) -> dict[str, object]:
        return {
            "epoch_rng": self.epoch_rng,
            "loss": self.loss,
            "logged_step": self.logged_step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        RngFill(state["epoch_rng"])  # refused here, and not in the middle of the training
        self.epoch_rng = state["epoch_rng"]
        self.loss = float(state["loss"])
        self.logged_step = int(state["logged_step"])

    def look(self, trainer: Any) -> None:
        """Take over what ``trainer`` has not logged yet."""
        self.loss = trainer._tr_loss.item()  # noqa: SLF001 -- nothing else has it
        self.logged_step = trainer._globalstep_last_logged  # noqa: SLF001

    def put(self, trainer: Any) -> None:
        """Have the next log of ``trainer`` count what was not logged when this was looked at."""
        trainer._tr_loss.fill_(self.loss)  # noqa: SLF001
        trainer._globalstep_last_logged = self.logged_step  # noqa: SLF001


def new_progress() -> Progress:
    return Progress(epoch_rng=capture_rng())


def check_trainer(trainer: Any) -> None:
    """``ValueError`` with everything that keeps a run of ``trainer`` from being saved here."""
    if not hasattr(trainer, "callback_handler") or not hasattr(trainer, "args"):
        raise ValueError(f"trainer must be a transformers.Trainer, not {trainer!r:.200}")
    problems = [*_problems(trainer, trainer.args)]
    if problems:
        raise ValueError(f"this Trainer cannot be kept by holdfast: {'; '.join(problems)}")


def _problems(trainer: Any, args: Any) -> Iterator[str]:
    if trainer.is_deepspeed_enabled:
        yield "DeepSpeed keeps model and optimizer itself, in files of its own"
    if trainer.is_fsdp_enabled:
        version = getattr(trainer.accelerator.state.fsdp_plugin, "fsdp_version", 1)
        if version == 1:
            yield "FSDP1 is not supported; choose FSDP2 (fsdp_version: 2)"
    if args.save_only_model:
        yield "save_only_model=True leaves out what a run needs to go on"
    if args.push_to_hub and str(getattr(args.hub_strategy, "value", args.hub_strategy)) != "end":
        yield "checkpoints are not pushed to the hub; use hub_strategy='end'"
    yield from (
        f"this version of transformers has no Trainer.{name}"
        for name in _OWN_FILES
        if not callable(getattr(trainer, name, None))
    )


def optimizer_of(trainer: Any) -> Any:
    """The optimizer itself, without the wrapper that Accelerate has put around it."""
    optimizer = trainer.optimizer
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def statefuls_of(trainer: Any) -> dict[str, object]:
    """What has a state beside model and optimizer, by name."""
    found: dict[str, object] = {"scheduler": trainer.lr_scheduler}
    scaler = getattr(trainer.accelerator, "scaler", None)
    if scaler is not None:
        found["scaler"] = scaler
    return found


def state_text(trainer: Any) -> str:
    """The ``TrainerState``, with the states of callbacks that have one, as the ``Trainer`` itself
    would write it. ``SaveError`` if something that is not JSON was logged."""
    kept = [*trainer.callback_handler.callbacks, trainer.control]
    state = replace(
        trainer.state,
        stateful_callbacks=[each for each in kept if isinstance(each, ExportableState)],
        is_local_process_zero=True,  # each process finds out for itself when it goes on
        is_world_process_zero=True,
    )
    try:
        return json.dumps(asdict(state), sort_keys=True)
    except (TypeError, ValueError) as error:
        raise SaveError(
            f"the TrainerState is not JSON, so that no Trainer could read it: {error}. Log "
            "numbers and texts only; nothing was written"
        ) from error


def metrics_of(state: Any) -> dict[str, float]:
    """What was logged at the step of ``state``, but for how long things took: those differ between
    ranks."""
    found: dict[str, float] = {}
    for entry in reversed(state.log_history):
        if entry.get("step") != state.global_step:
            break
        for name, value in entry.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and math.isfinite(value) and not name.endswith(_TIMINGS):
                found.setdefault(name, float(value))
    found.pop("step", None)
    return found
