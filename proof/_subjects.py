"""The savers under test, each used as its users use it to overwrite "the latest checkpoint". Knows
their calls and what a state is made of; knows no faults.

torch and the savers are imported when they are first used: a campaign is listed without them.
"""

import functools
import importlib.util
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

HOLDFAST, TORCH, SAFETENSORS, DCP, ORBAX = "holdfast", "torch.save", "safetensors", "DCP", "Orbax"
THREADED_DCP = "DCP, 4 threads"
SUBJECTS = (HOLDFAST, TORCH, SAFETENSORS, DCP, ORBAX)

LATEST = "latest"
"""The name that is overwritten again and again, if no other is given."""

ELEMENTS = 2000
"""Floats in each of two tensors of a state: some 16 KiB, many blocks and still quick to save."""


class Wrong(Exception):  # noqa: N818 -- the word that the campaigns use
    """Loaded without an error, and it is no state that was ever saved."""


def state_of(value: int, elements: int = ELEMENTS) -> "dict[str, torch.Tensor]":
    """A state of which no other value has any 16 bytes: every element tells the value."""
    import torch

    random = torch.Generator().manual_seed(value)
    return {
        "step": torch.full((16,), value, dtype=torch.int64),
        "weight": torch.randn(elements, generator=random),
        "moment": torch.randn(elements, generator=random),
        "bias": torch.randint(2**60, (64,), generator=random),
        "half": torch.randn(elements // 4, generator=random).to(torch.bfloat16),
    }


def value_of(state: Mapping[str, Any]) -> int:
    """Which state this is; ``Wrong`` if it is none."""
    import torch

    try:
        value = int(state["step"][0])
        elements = len(state["weight"])
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise Wrong(f"no state of ours: {error!r}") from error
    wanted = state_of(value, elements)
    differing = sorted(
        name
        for name in wanted.keys() | state.keys()
        if name not in wanted or name not in state or not torch.equal(wanted[name], state[name])
    )
    if differing:
        raise Wrong(f"claims to be value {value}, and {', '.join(differing)} differ from it")
    return value


class Subject(ABC):
    """A saver. ``save`` has acknowledged the value's state when it returns; ``load`` returns which
    value's state is there, raises what the library raises, or ``Wrong``."""

    name: str
    module: str
    """What must be importable."""
    is_slow = False
    """Each process that uses it takes seconds to begin: batches are smaller."""

    def __init__(self, elements: int = ELEMENTS) -> None:
        self.elements = elements

    @abstractmethod
    def save(self, folder: Path, value: int, name: str = LATEST) -> None:
        """Overwrite what is in ``folder``, which exists, under that name."""

    @abstractmethod
    def load(self, folder: Path, name: str = LATEST) -> int: ...

    def files(self, folder: Path) -> list[Path]:
        """All that was written, in order."""
        return sorted(path for path in folder.rglob("*") if path.is_file())


class Holdfast(Subject):
    name = HOLDFAST
    module = "holdfast"

    def save(self, folder: Path, value: int, name: str = LATEST) -> None:
        import holdfast

        holdfast.save(state_of(value, self.elements), folder / name, overwrite=True)

    def load(self, folder: Path, name: str = LATEST) -> int:
        import holdfast

        return value_of(holdfast.load(folder / name))


class TorchSave(Subject):
    name = TORCH
    module = "torch"

    def save(self, folder: Path, value: int, name: str = LATEST) -> None:
        import torch

        torch.save(state_of(value, self.elements), folder / f"{name}.pt")

    def load(self, folder: Path, name: str = LATEST) -> int:
        import torch

        return value_of(torch.load(folder / f"{name}.pt", weights_only=True))


class Safetensors(Subject):
    name = SAFETENSORS
    module = "safetensors"

    def save(self, folder: Path, value: int, name: str = LATEST) -> None:
        from safetensors.torch import save_file

        save_file(state_of(value, self.elements), folder / f"{name}.safetensors")

    def load(self, folder: Path, name: str = LATEST) -> int:
        from safetensors.torch import load_file

        return value_of(load_file(folder / f"{name}.safetensors"))


class DistributedCheckpoint(Subject):
    """``torch.distributed.checkpoint``: its FileSystemWriter as it comes, without ranks."""

    name = DCP
    module = "torch"
    threads = 1

    def save(self, folder: Path, value: int, name: str = LATEST) -> None:
        import torch.distributed.checkpoint as dcp

        with warnings.catch_warnings():  # that it overwrites, and that there are no ranks
            warnings.simplefilter("ignore")
            dcp.save(
                state_of(value, self.elements),
                storage_writer=dcp.FileSystemWriter(folder / name, thread_count=self.threads),
            )

    def load(self, folder: Path, name: str = LATEST) -> int:
        import torch
        import torch.distributed.checkpoint as dcp

        state = {name: torch.zeros_like(t) for name, t in state_of(0, self.elements).items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(state, storage_reader=dcp.FileSystemReader(folder / name))
        return value_of(state)


class ThreadedDistributedCheckpoint(DistributedCheckpoint):
    """The same, as it is recommended for large states."""

    name = THREADED_DCP
    threads = 4


class Orbax(Subject):
    """``StandardCheckpointer``, waited for. Its states are NumPy's, which has no bfloat16 that it
    would take everywhere: the bits are saved as 16-bit integers."""

    name = ORBAX
    module = "orbax.checkpoint"
    is_slow = True

    def save(self, folder: Path, value: int, name: str = LATEST) -> None:
        import orbax.checkpoint as ocp
        import torch

        state = state_of(value, self.elements)
        state["half"] = state["half"].view(torch.int16)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(
                (folder / name).absolute(),
                {name: tensor.numpy() for name, tensor in state.items()},
                force=True,
            )

    def load(self, folder: Path, name: str = LATEST) -> int:
        import orbax.checkpoint as ocp
        import torch

        empty = state_of(0, self.elements)
        empty["half"] = empty["half"].view(torch.int16)
        with ocp.StandardCheckpointer() as checkpointer:
            found = checkpointer.restore(
                (folder / name).absolute(), {name: t.numpy() for name, t in empty.items()}
            )
        state = {name: torch.from_numpy(array) for name, array in found.items()}
        state["half"] = state["half"].view(torch.bfloat16)
        return value_of(state)


_KINDS: Mapping[str, type[Subject]] = {
    kind.name: kind
    for kind in (
        Holdfast,
        TorchSave,
        Safetensors,
        DistributedCheckpoint,
        ThreadedDistributedCheckpoint,
        Orbax,
    )
}


def subject(name: str, elements: int = ELEMENTS) -> Subject:
    return _KINDS[name](elements)


@functools.cache
def unavailable(name: str) -> str | None:
    """Why this saver cannot be used here, or ``None``."""
    module = _KINDS[name].module
    package = module.split(".")[0]
    if importlib.util.find_spec(package) is not None and importlib.util.find_spec(module):
        return None
    distribution = {"orbax": "orbax-checkpoint"}.get(package, package)
    return f"{distribution} is not installed"
