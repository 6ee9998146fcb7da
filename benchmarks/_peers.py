"""Ways to save a dict of tensors durably, and to load it into tensors that are there, by library.

Knows nothing of time: who calls, measures. What a library does not sync is synced for it. One that
gives fresh tensors copies them over, as ``load_state_dict`` would. DCP is the best that it can be
with 1 thread, its default, 2 or 4; of its other settings the defaults are kept,
``single_file_per_rank`` and ``sync_files``. Orbax takes part where it is installed.
"""

import importlib
import importlib.util
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import holdfast

Tensors = Mapping[str, torch.Tensor]

HOLDFAST, TORCH, SAFETENSORS, ORBAX = "holdfast", "torch.save", "safetensors", "Orbax"
DCP = {f"DCP{n}": n for n in (1, 2, 4)}
"""DCP, and its ``thread_count``."""

DCP_DEFAULT = "DCP1"


def has_orbax() -> bool:
    return importlib.util.find_spec("orbax") is not None


def peer_names() -> list[str]:
    return [TORCH, SAFETENSORS, *DCP, *([ORBAX] if has_orbax() else [])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    path: Path
    save: Callable[[], object]
    load: Callable[[], object]

    def clear(self) -> None:
        """Remove what was saved, for good."""
        if self.path.is_dir():
            shutil.rmtree(self.path)
        else:
            self.path.unlink(missing_ok=True)
        os.sync()


def way(name: str, folder: Path, state: Tensors, into: Tensors) -> Way:
    """One below ``folder``, which saves ``state`` and loads into ``into``."""
    path = folder / name
    if name == HOLDFAST:
        save, load = _holdfast(path / "a", state, into)
    elif name == TORCH:
        save, load = partial(torch_save, state, path), partial(_torch_load, path, into)
    elif name == SAFETENSORS:
        save, load = partial(safetensors_save, state, path), partial(_safetensors_load, path, into)
    elif name == ORBAX:
        save, load = _orbax(path, state, into)
    else:
        save = partial(dcp_save, state, path, threads=DCP[name])
        load = partial(dcp_load, into, path)
    return Way(path=path, save=save, load=load)


def check(name: str, load: Callable[[], object], state: Tensors, into: Tensors) -> None:
    """Load what was saved last, and compare."""
    for tensor in into.values():
        tensor.zero_()
    load()
    wrong = [leaf for leaf, tensor in state.items() if not torch.equal(into[leaf], tensor)]
    if wrong:
        raise AssertionError(f"{name} did not load {wrong[0]} as it was saved")


def torch_save(state: Any, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(dict(state), file)
        file.flush()
        os.fsync(file.fileno())


def safetensors_save(state: Tensors, path: Path) -> None:
    safetensors.torch.save_file(dict(state), path)
    _sync(path)


def dcp_save(state: Mapping[str, Any], path: Path, *, threads: int, alone: bool = True) -> None:
    writer = dcp.FileSystemWriter(path, thread_count=threads)
    dcp.save(dict(state), storage_writer=writer, no_dist=alone)


def dcp_load(state: Mapping[str, Any], path: Path, *, alone: bool = True) -> None:
    dcp.load(dict(state), storage_reader=dcp.FileSystemReader(path), no_dist=alone)


def _torch_load(path: Path, into: Tensors) -> None:
    copy_over(torch.load(path, weights_only=True), into)


def _safetensors_load(path: Path, into: Tensors) -> None:
    copy_over(safetensors.torch.load_file(path), into)


def _holdfast(
    path: Path, state: Tensors, into: Tensors
) -> tuple[Callable[[], object], Callable[[], object]]:
    return (
        lambda: holdfast.save(dict(state), path),
        lambda: holdfast.load(path, into=dict(into)),
    )


def _orbax(
    path: Path, state: Tensors, into: Tensors
) -> tuple[Callable[[], object], Callable[[], object]]:
    checkpointer = importlib.import_module("orbax.checkpoint").PyTreeCheckpointer()

    def save() -> None:
        checkpointer.save(path, {name: tensor.numpy() for name, tensor in state.items()})
        for file in path.rglob("*"):
            _sync(file)

    def load() -> None:
        found = checkpointer.restore(path)
        copy_over({name: torch.from_numpy(found[name]) for name in into}, into)

    return save, load


def copy_over(found: Tensors, into: Tensors) -> None:
    for name, tensor in into.items():
        tensor.copy_(found[name])


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
