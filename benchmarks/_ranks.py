"""What the ranks of the benchmark ``distributed`` do, one function for each call of the gang.

A rank holds a state to save and one to load into. Holdfast, DCP and the bare disk write and read
the same bytes of it. Knows nothing of time: who calls, measures.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from _disk import RAW, extra_memory, raw_read, raw_write
from _peers import DCP, HOLDFAST, dcp_load, dcp_save
from holdfast.contracts import ReadRange, Storage
from holdfast.distributed import CheckpointOptions, DistributedCheckpoint, LoadOptions, SaveOptions
from holdfast.storage import LocalStorage
from holdfast.storage._wrapped import WrappedStorage

WIDTH = 2048
IN_PLACE = "holdfast, in place"
"""Loads as DCP does, without a copy to fall back on if something fails midway."""


class Training:
    """A model and an Adam that has made a step; sharded by FSDP2 if there are several ranks.

    Half of the bytes are an embedding with an odd number of rows, which no number of ranks
    divides; the rest are square layers with small biases. The values depend on ``seed`` only.
    """

    def __init__(self, size_bytes: int, *, ranks: int, seed: int) -> None:
        torch.manual_seed(seed)
        count = size_bytes // 3 // 4
        rows = count // 2 // WIDTH | 1
        layers = (count - rows * WIDTH) // (WIDTH * (WIDTH + 1))
        self.model = nn.Sequential(
            nn.Embedding(rows, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        )
        if ranks > 1:
            mesh = init_device_mesh("cpu", (ranks,))
            for layer in self.model:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        for parameter in self.model.parameters():
            value = parameter.detach()
            self.optimizer.state[parameter] = {
                "step": torch.tensor(float(seed)),
                "exp_avg": value * 0.5,
                "exp_avg_sq": value * value,
            }

    def tensors(self) -> dict[str, dict[str, Any]]:
        """What DCP is handed: the same tensors, by the names they have in holdfast."""
        named = dict(self.model.named_parameters())
        state = {name: self.optimizer.state[parameter] for name, parameter in named.items()}
        return {
            "model": {name: parameter.detach() for name, parameter in named.items()},
            "optimizer": state,
        }

    def local(self) -> Iterator[Any]:
        """This rank's part of every tensor."""
        for parameter in self.model.parameters():
            for tensor in (parameter.detach(), *self.optimizer.state[parameter].values()):
                yield tensor.to_local() if hasattr(tensor, "to_local") else tensor

    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.local())


class Here:
    """What a rank holds between calls: one state to save, one to load into."""

    def __init__(self, folder: Path, size_bytes: int, *, rank: int, ranks: int) -> None:
        self.saved = Training(size_bytes, ranks=ranks, seed=1)
        self.into = Training(size_bytes, ranks=ranks, seed=2)
        self.checkpoint = checkpoint_in(folder / HOLDFAST)
        self.alone = ranks == 1
        self.part_bytes = self.saved.size_bytes()
        self.folders = {name: folder / name for name in (*RAW, *DCP)}
        self.raw_name = f"part-{rank}"

    def write(self, name: str) -> None:
        if name == HOLDFAST:
            options = SaveOptions(checkpoint_prefix="a", include_rng_state=False)
            self.checkpoint.save(self.saved.model, self.saved.optimizer, options)
        elif name in RAW:
            path = self.folders[name] / self.raw_name
            path.parent.mkdir(exist_ok=True)
            raw_write(path, self.part_bytes, RAW[name])
        else:
            state = self.saved.tensors()
            dcp_save(state, self.folders[name], threads=DCP[name], alone=self.alone)

    def read(self, name: str) -> None:
        if name in {HOLDFAST, IN_PLACE}:
            load(self.checkpoint, self.into, in_place=name == IN_PLACE)
        elif name in RAW:
            raw_read(self.folders[name] / self.raw_name, RAW[name])
        else:
            dcp_load(self.into.tensors(), self.folders[name], alone=self.alone)


HERE: list[Here] = []  # in a rank's process, where each call is a function of its own


def set_up(rank: int, folder: Path, size_bytes: int) -> int:
    """Returns how many bytes are this rank's."""
    here = Here(folder, size_bytes, rank=rank, ranks=torch.distributed.get_world_size())
    HERE.append(here)
    return here.part_bytes


def write(rank: int, name: str) -> None:
    HERE[0].write(name)


def read(rank: int, name: str) -> None:
    HERE[0].read(name)


def check(rank: int, name: str) -> None:
    """Load, and compare with what was saved, on however many ranks that was."""
    here = HERE[0]
    for tensor in here.into.local():
        tensor.zero_()
    here.read(name)
    pairs = zip(here.into.local(), here.saved.local(), strict=True)
    if not all(torch.equal(loaded, saved) for loaded, saved in pairs):
        raise AssertionError(f"{name} did not load what it saved")


def peak_of(rank: int, work: Callable[[int, str], None], name: str) -> int:
    return extra_memory(lambda: work(rank, name))


def bytes_read(rank: int, folder: Path) -> int:
    storage = CountingStorage(LocalStorage(folder / HOLDFAST))
    checkpoint = checkpoint_in(storage)
    load(checkpoint, HERE[0].into)
    checkpoint.close()
    return storage.bytes_read


class CountingStorage(WrappedStorage):
    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self.bytes_read = 0
        self._lock = threading.Lock()

    def read(self, key: str) -> bytes:
        data = super().read(key)
        self._count(len(data))
        return data

    def read_into(self, key: str, ranges: Sequence[ReadRange]) -> None:
        super().read_into(key, ranges)
        self._count(sum(wanted.into.nbytes for wanted in ranges))

    def _count(self, size_bytes: int) -> None:
        with self._lock:
            self.bytes_read += size_bytes


def checkpoint_in(storage: Path | Storage) -> DistributedCheckpoint:
    return DistributedCheckpoint.create(options=CheckpointOptions(storage=storage))


def load(checkpoint: DistributedCheckpoint, into: Training, *, in_place: bool = False) -> None:
    options = LoadOptions(checkpoint_prefix="a", load_rng_state=False, in_place=in_place)
    checkpoint.load(into.model, into.optimizer, options)
