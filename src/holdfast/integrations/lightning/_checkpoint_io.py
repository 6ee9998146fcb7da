"""``HoldfastCheckpointIO``: how Lightning's ``Trainer`` saves, loads and removes with holdfast.

Lightning gathers its state on one rank and gives it as one dict. That is what is stored here, by
that rank alone: the ``state_dict`` as the model, everything else beside it.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO

from holdfast import _checks
from holdfast._shortcuts import split_path
from holdfast.contracts import Storage
from holdfast.coordination import SoloCoordinator
from holdfast.distributed import (
    CheckpointOptions,
    DistributedCheckpoint,
    LoadOptions,
    SaveHandle,
    SaveOptions,
)
from holdfast.distributed._shortcuts import load_tree
from holdfast.errors import CheckpointNotFoundError, LoadError
from holdfast.storage import StorageOptions

_STATE_DICT: Final = "state_dict"
_STEP: Final = "global_step"

Path_ = str | os.PathLike[str]


class HoldfastCheckpointIO(CheckpointIO):  # type: ignore[misc]
    """A plugin for ``Trainer(plugins=[...])``: its checkpoints are holdfast's, folders instead of
    files, whole and durable or not there, with digests, and without pickles.

    A path is ``<root>/<prefix>``, local or a URL. With ``storage``, all checkpoints are there, by
    the last part of their paths. ``options`` are those of every save; name and step are the
    checkpoint's. With ``background`` a save returns once all is copied, and is written while the
    training goes on; its error is raised by the next save, load or removal, or by ``teardown``.
    What is to be removed meanwhile stays until that save is durable.

    Used by one thread of each rank, for strategies that save on one: a single device and DDP.
    """

    def __init__(
        self,
        storage: Storage | StorageOptions | Path_ | None = None,
        options: SaveOptions | None = None,
        *,
        background: bool = True,
    ) -> None:
        self._storage = storage
        self._options = _checked(SaveOptions() if options is None else options)
        self._background = _checks.instance("background", background, bool)
        self._root: object = None
        self._checkpoint: DistributedCheckpoint | None = None
        self._handle: SaveHandle | None = None
        self._unwanted: list[str] = []

    def save_checkpoint(
        self, checkpoint: Mapping[str, Any], path: Path_, storage_options: Any = None
    ) -> None:
        """Save. ``SaveError`` with its place for a value that is not a tensor and has no type in
        the format: nothing is pickled, and nothing of that checkpoint is committed."""
        if storage_options is not None:
            raise ValueError(
                "storage_options is not for HoldfastCheckpointIO; give it a StorageOptions when "
                "you make it"
            )
        keeper, prefix = self._at(path)
        self._settle()
        if self._storage is None and "://" not in os.fspath(path):
            Path(path).parent.mkdir(parents=True, exist_ok=True)  # Lightning puts links there
        extra = dict(checkpoint)
        model = extra.pop(_STATE_DICT, None)
        step = checkpoint.get(_STEP)
        options = replace(
            self._options,
            checkpoint_prefix=prefix,
            step=step if isinstance(step, int) else None,
            overwrite=True,  # as a file would be
        )
        if self._background:
            self._handle = keeper.save_async(model, None, options, extra=extra)
        else:
            keeper.save(model, None, options, extra=extra)

    def load_checkpoint(
        self, path: Path_, map_location: Any = None, weights_only: bool | None = None, **_: Any
    ) -> dict[str, Any]:
        """The dict that was saved, every byte of it verified. Tensors are on ``map_location``, a
        device, or on the CPU. ``weights_only`` makes no difference, as nothing is unpickled.

        ``CheckpointNotFoundError``, ``CorruptedError`` with tensor and file, and others as
        ``holdfast.load``.
        """
        del weights_only
        if self._storage is None and Path(path).is_symlink():
            path = Path(path).resolve()  # a last.ckpt that Lightning has made of the newest
        keeper, prefix = self._at(path)
        self._settle()
        options = LoadOptions(checkpoint_prefix=prefix)
        try:
            tree = load_tree(keeper, None, _device(map_location), options)
        except CheckpointNotFoundError:
            if self._storage is None and Path(path).is_file():
                raise LoadError(
                    "this is a file, and no checkpoint of holdfast's; Lightning's own "
                    "TorchCheckpointIO loads what torch.save wrote",
                    path=os.fspath(path),
                ) from None
            raise
        if not isinstance(tree, Mapping) or not isinstance(tree.get("extra"), Mapping):
            raise LoadError("this was not saved by Lightning", path=os.fspath(path))
        model = {} if tree["model"] is None else {_STATE_DICT: tree["model"]}
        return {**tree["extra"], **model}

    def remove_checkpoint(self, path: Path_) -> None:
        """Remove it, once nothing newer is being written; of one that is not there, nothing."""
        _, prefix = self._at(path)
        self._unwanted.append(prefix)
        if self._handle is None or self._handle.done():
            self._settle()

    def teardown(self) -> None:
        """Wait for what is being written, and raise its error."""
        checkpoint, self._checkpoint = self._checkpoint, None
        if checkpoint is None:
            return
        self._root = None
        with checkpoint:
            self._finish(checkpoint)

    def _at(self, path: Path_) -> tuple[DistributedCheckpoint, str]:
        """The checkpointer of a path, and the prefix in there. One is open at a time."""
        root: Any = self._storage
        if root is None:
            root, prefix = split_path(path)
        else:
            prefix = os.fspath(path).rstrip("/").rpartition("/")[2]
        if self._checkpoint is None or root != self._root:
            self.teardown()
            options = CheckpointOptions(storage=root)
            # Lightning calls this on whichever ranks it likes, so that each is for itself.
            self._checkpoint = DistributedCheckpoint.create(SoloCoordinator(), options)
            self._root = root
        return self._checkpoint, prefix

    def _settle(self) -> None:
        if self._checkpoint is not None:
            self._finish(self._checkpoint)

    def _finish(self, checkpoint: DistributedCheckpoint) -> None:
        """Wait for the save under way, raise its error, and remove what it was to replace. After
        an error that stays."""
        unwanted, self._unwanted = self._unwanted, []
        self._handle = None
        checkpoint.wait()
        for prefix in unwanted:
            try:
                checkpoint.delete_checkpoint(prefix)
            except CheckpointNotFoundError:
                continue  # somebody else was quicker


def _checked(options: SaveOptions) -> SaveOptions:
    _checks.instance("options", options, SaveOptions)
    for name in ("checkpoint_prefix", "step"):
        if getattr(options, name) is not None:
            raise ValueError(f"{name} is the checkpoint's, for every save another")
    return replace(options, include_rng_state=False)


def _device(map_location: Any) -> torch.device | None:
    """Lightning means the CPU by ``None``, and by a function, which it gives for no reason."""
    if map_location is None or callable(map_location):
        return None
    if not isinstance(map_location, str | torch.device):
        raise ValueError(  # noqa: TRY004 -- as every refusal of an argument
            f"map_location must be a device, not {map_location!r}"
        )
    return torch.device(map_location)
