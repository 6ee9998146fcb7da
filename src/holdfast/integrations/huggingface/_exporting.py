"""``save_pretrained``: a model as a checkpoint that ``from_pretrained`` opens, with its config."""

import copy
import os
import tempfile
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from holdfast._shortcuts import split_path
from holdfast.contracts import Storage
from holdfast.distributed import (
    CheckpointFormat,
    CheckpointOptions,
    DistributedCheckpoint,
    SaveOptions,
)


def save_pretrained(
    model_or_trainer: Any, path: str | os.PathLike[str], *, overwrite: bool = False
) -> str:
    """Save a model as ``path``, ``<root>/<prefix>``, for ``from_pretrained(path)``; returns the
    prefix. All ranks call this, also of a model that is split between them.

    It is a checkpoint as any other, durable and with digests, in Hugging Face's files; beside it,
    once it is committed, go the config, the generation config and the tokenizer of a ``Trainer``.
    Raises as ``holdfast.save``, and ``ValueError`` for a model without a config. After an error
    nothing is there that ``from_pretrained`` would open, or what was there before.
    """
    root, prefix = split_path(path)
    is_trainer = hasattr(model_or_trainer, "callback_handler")
    model = model_or_trainer.model if is_trainer else model_or_trainer
    config = getattr(model, "config", None)
    if not isinstance(config, PreTrainedConfig):
        raise ValueError(  # noqa: TRY004 -- as every refusal of an argument
            f"a {type(model).__name__} has no config that from_pretrained could make it from; "
            "holdfast.save(model, path, format='consolidated') saves it without"
        )
    options = SaveOptions(
        checkpoint_prefix=prefix, format=CheckpointFormat.CONSOLIDATED, overwrite=overwrite
    )
    with DistributedCheckpoint.create(options=CheckpointOptions(storage=root)) as checkpoint:
        checkpoint.save_model_only(model, options)
        timeout_s = CheckpointOptions().default_timeout_s
        with checkpoint.coordinator.operation("save_pretrained", timeout_s) as operation:
            if operation.rank == 0:
                tokenizer = model_or_trainer.processing_class if is_trainer else None
                _put_beside(checkpoint.catalog.storage, prefix, model, tokenizer)
            operation.barrier()
    return prefix


def _put_beside(storage: Storage, prefix: str, model: Any, tokenizer: Any) -> None:
    """Write what Hugging Face keeps beside a model, each file whole and durable."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.dtype = str(model.dtype).removeprefix("torch.")
    with tempfile.TemporaryDirectory(prefix="holdfast-config-") as folder:
        config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        if hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(folder)
        for file in sorted(Path(folder).rglob("*")):
            if file.is_file():
                data = file.read_bytes()
                key = f"{prefix}/{file.relative_to(folder).as_posix()}"
                with storage.open_writer(key, size_bytes=len(data)) as writer:
                    writer.write_at(0, data)
                    writer.finish()
