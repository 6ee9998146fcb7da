"""``RandomState``: the random generators go on with a training that Lightning resumes."""

from typing import Any

from lightning.pytorch.callbacks import Callback

from holdfast.distributed._rng import RngFill, capture_rng


class RandomState(Callback):  # type: ignore[misc]
    """Keeps the generators of Python, NumPy and torch in Lightning's checkpoints, which have none,
    and puts them back: dropout and the order of the data go on as they would have.

    For one process: Lightning writes the state of rank 0 only, and ranks that drew the same numbers
    would be worse than ones that begin anew. More of them are a ``ValueError``.
    """

    def __init__(self) -> None:
        self._saved: dict[str, object] | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        del pl_module, stage
        if trainer.world_size > 1:
            raise ValueError(
                f"RandomState is for one process, and there are {trainer.world_size}: Lightning's "
                "checkpoints have the state of the first alone"
            )

    def state_dict(self) -> dict[str, Any]:
        return {"rng": capture_rng()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        RngFill(state_dict["rng"])  # refused here, and not in the middle of the training
        self._saved = state_dict["rng"]

    def on_fit_start(self, *_: Any) -> None:
        if self._saved is not None:
            RngFill(self._saved).apply()

    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        # The order of an epoch is drawn when it begins, but of the first one after a resume, as a
        # rule, before that, with the training. Which it is depends on where it was saved.
        loop = trainer.fit_loop
        is_drawn = loop.is_resuming or loop.epoch_loop.restarting or trainer.current_epoch == 0
        if self._saved is not None and not is_drawn:
            RngFill(self._saved).apply()

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        del trainer, pl_module, batch
        if self._saved is not None and batch_idx > 0:  # inside an epoch, whose order is known
            RngFill(self._saved).apply()
        self._saved = None
