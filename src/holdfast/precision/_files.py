"""Mixed-precision checkpoints in files: what stands where in the tree of one, by version.

Knows paths, versions and the fields of a checkpoint; how a tree becomes a file is
``_sealed_file``'s.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from holdfast import _checks
from holdfast.contracts import Storage
from holdfast.errors import CheckpointError, CorruptedError, LoadError, SaveError, StorageError
from holdfast.precision._checkpoint import MixedPrecisionCheckpoint, field_problems
from holdfast.precision._options import MixedPrecisionOptions
from holdfast.precision._scaler import ScalerState
from holdfast.precision._sealed_file import read_sealed, write_sealed
from holdfast.precision._state_tree import SCHEMA, StateTree
from holdfast.precision._structure import whole_problems
from holdfast.storage import open_storage

_KIND: Final = "holdfast.mixed_precision"
"""The key of a file's metadata under which its version stands."""


def save_checkpoint(checkpoint: MixedPrecisionCheckpoint, path: str | os.PathLike[str]) -> None:
    """Write it as one safetensors file. Durable on return, and whole or not there at all; what was
    there before is replaced at that instant.

    ``path`` is a file's, or a URL of an object store that ``open_storage`` knows. Folders are
    made, and get a hidden lock file, as every folder that is a storage. ``SaveError`` for what no
    file can hold, also for tensors sharded over ranks: those are for ``DistributedCheckpoint``;
    and for masters that are not finite, which nobody could go on from. ``StorageError``. After any
    error what was there is intact.
    """
    _checks.instance("checkpoint", checkpoint, MixedPrecisionCheckpoint)
    storage, key = _place(path)
    with _located(path), checkpoint.held() as tree:
        problems = [*field_problems(checkpoint), *whole_problems(tree)]
        if problems:
            raise SaveError(f"the checkpoint is not whole: {'; '.join(problems)}. Nothing is saved")
        values, version = _tree(checkpoint, tree), tree.version
        write_sealed(storage, key, values, kind=_KIND, version=version, finite="master_weights")


def load_checkpoint(path: str | os.PathLike[str]) -> MixedPrecisionCheckpoint:
    """Read and verify all of a file. Nothing in it is unpickled or called, and no more memory is
    taken than it is long.

    ``CorruptedError`` for a file that is damaged or cut, ``LoadError`` for one of another kind,
    ``IncompatibleVersionError`` for one of a newer version, ``ObjectNotFoundError`` and other
    ``StorageError``; each has the ``path``.
    """
    storage, key = _place(path)
    with _located(path):
        if _is_folder(path):
            raise LoadError(
                "this is a folder; checkpoints in folders are loaded by DistributedCheckpoint.load"
            )
        version, tree = read_sealed(storage, key, kind=_KIND, newest=SCHEMA)
        return _READERS[version](tree)


class _Stored(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The tree of version 1. The version itself is in the file's metadata, to be known first."""

    timestamp: datetime
    options: dict[str, Any]
    scaler: dict[str, Any]
    step_count: int
    skipped_steps: int
    has_fallback: bool
    metadata: dict[str, Any]
    master_weights: dict[str, Any]
    training_weights: dict[str, Any]
    base_optimizer_state: dict[str, Any]


def _tree(checkpoint: MixedPrecisionCheckpoint, tree: StateTree) -> dict[str, object]:
    return {
        "timestamp": checkpoint.timestamp,
        "options": tree.options.plain(),
        "scaler": tree.scaler.plain(),
        "step_count": tree.step_count,
        "skipped_steps": tree.skipped_steps,
        "has_fallback": tree.has_fallback,
        "metadata": dict(checkpoint.metadata),
        "master_weights": dict(tree.masters),
        "training_weights": dict(tree.training),
        "base_optimizer_state": dict(tree.inner),
    }


def _read_1(tree: object) -> MixedPrecisionCheckpoint:
    # msgspec would take a tensor for something that has attributes or items.
    values = tree if isinstance(tree, dict) else {"all of it": tree}
    misplaced = [str(name) for name, value in values.items() if isinstance(value, torch.Tensor)]
    if misplaced:
        raise CorruptedError(f"there are tensors in it where none belong: {', '.join(misplaced)}")
    try:
        stored = msgspec.convert(tree, _Stored)
        fields = {name: getattr(stored, name) for name in stored.__struct_fields__}
        fields["options"] = MixedPrecisionOptions.from_plain(stored.options)
        fields["scaler"] = ScalerState.from_plain(stored.scaler)
    except ValueError as error:
        raise CorruptedError(f"the values in it are not those of a checkpoint: {error}") from error
    checkpoint = MixedPrecisionCheckpoint(version=1, **fields)
    problems = whole_problems(checkpoint.tree())
    if problems:
        raise CorruptedError(f"the checkpoint in it is not whole: {'; '.join(problems)}")
    return checkpoint


# Every version that was ever written keeps its reader, which makes today's value of it.
_READERS: Final[Mapping[int, Callable[[object], MixedPrecisionCheckpoint]]] = {1: _read_1}


def _place(path: str | os.PathLike[str]) -> tuple[Storage, str]:
    """The storage that a file is in, and its key there."""
    given: object = path
    if not isinstance(given, str | os.PathLike) or not os.fspath(path):
        raise ValueError(f"path must be the path of a file, not {given!r}")
    text = os.fsdecode(path)
    if isinstance(path, str) and "://" in text:
        folder, _, name = text.rpartition("/")
        return open_storage(folder), name
    try:
        file = Path(os.path.realpath(Path(text).expanduser()))
        is_none = file.is_symlink() or (file.exists() and not file.is_file() and not file.is_dir())
    except (RuntimeError, ValueError) as error:  # a home that nobody has; what is no name at all
        raise ValueError(f"path must be the path of a file, not {given!r}: {error}") from error
    except OSError as error:
        raise StorageError(f"no file can be there: {error.strerror}", path=text) from error
    if is_none:
        # To take its place, as that of a file, would be the end of /dev/null for everybody.
        raise StorageError("this is a device, a pipe or a link to itself, and no file", path=text)
    return open_storage(file.parent), file.name


def _is_folder(path: str | os.PathLike[str]) -> bool:
    text = os.fsdecode(path)
    return "://" not in text and Path(text).expanduser().is_dir()


@contextlib.contextmanager
def _located(path: str | os.PathLike[str]) -> Iterator[None]:
    """Errors of the block say which file the caller named, not its key in a storage."""
    try:
        yield
    except CheckpointError as error:
        error.path = os.fsdecode(path)
        raise
