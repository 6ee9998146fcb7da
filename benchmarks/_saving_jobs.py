"""What the ranks of the benchmark ``saving_async`` do, one function for each call of the gang.

Everything is timed in the rank itself, where the training is.
"""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from _disk import status
from _measure import in_turn
from _savers import PREFIX, Holdfast, Saver, saver_of
from _training import Batch, Copy, HookTimes, LowRank, Shape, Training
from holdfast import CheckpointOptions, DistributedCheckpoint, SaveOptions

STEPS_AFTER = 2
"""Steps made while a save goes on, before its end is waited for. Only the first can be held up: it
changes the state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """How one save held up the training, in seconds measured from outside, and what it said of
    itself. ``compute_s`` is from when it began until the state was about to change."""

    call_s: float
    wait_s: float
    compute_s: float
    said_s: float | None = None
    predicted_s: float | None = None
    copy_s: float | None = None
    share: float = 1.0

    @property
    def total_s(self) -> float:
        return self.call_s + self.wait_s


class Here:
    """What a rank holds between calls."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        ranks = dist.get_world_size()
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
        self.hooks = HookTimes()
        self.training = Training(shape, ranks=ranks)
        self.copy = Copy(self.training)
        self.folder = folder
        self.savers: dict[str, Saver] = {}
        self._warm_up("holdfast")
        self.hooks.close_up()

    def saver(self, name: str) -> Saver:
        """Made and used once when it is first asked for: the first save is another matter."""
        if name not in self.savers:
            self._warm_up(name)
        return self.savers[name]

    def _warm_up(self, name: str) -> None:
        saver = self.savers[name] = saver_of(name, self.folder, self.training)
        self._save(saver)
        saver.clean()

    def _save(self, saver: Saver) -> None:
        saver.start()
        self.training.step((1, 8), saver.before_step)
        saver.finish()


HERE: list[Here] = []  # in a rank's process, where each call is a function of its own


def set_up(rank: int, folder: Path, shape: Shape) -> int:
    """Returns how large the state is."""
    here = Here(folder, shape)
    HERE.append(here)
    return here.training.size_bytes()


def tear_down(rank: int) -> None:
    for saver in HERE.pop().savers.values():
        saver.close()


def turns(names: Sequence[str], repeats: int) -> Iterator[str]:
    for repeat in range(repeats):
        yield from in_turn(names, repeat)


def held_up(
    rank: int, names: Sequence[str], batch: Batch, repeats: int, *, late: bool = False
) -> dict[str, list[Held | float]]:
    """By each way to save, how each of its saves held the training up; and ``copy``, in turn with
    them, the seconds of a plain copy. A save begins before a step or, if ``late``, just before the
    optimizer's part of it."""
    here = HERE[0]
    found: dict[str, list[Held | float]] = {name: [] for name in names}
    for name in names:
        if name != "copy":
            here.saver(name)
    for name in turns(names, repeats):
        here.training.step(batch)
        dist.barrier()
        found[name].append(
            here.copy.seconds() if name == "copy" else _held(here, name, batch, late=late)
        )
    return found


def _held(here: Here, name: str, batch: Batch, *, late: bool) -> Held:
    saver = here.saver(name)
    here.hooks.take()
    called: list[tuple[float, float]] = []
    waited: list[tuple[float, float]] = []

    def start() -> None:
        began_s = time.perf_counter()
        saver.start()
        called.append((began_s, time.perf_counter()))

    def before_step() -> None:
        if not called:
            start()
        began_s = time.perf_counter()
        saver.before_step()
        waited.append((began_s, time.perf_counter()))

    if not late:
        start()
    for _ in range(STEPS_AFTER):
        here.training.step(batch, before_step)
    wait_s = sum(ended - began for began, ended in waited) + here.hooks.take()
    saver.finish()
    saver.clean()
    facts: dict[str, Any] = {}
    if isinstance(saver, Holdfast):
        record = saver.records[-1]
        facts = {
            "said_s": record.stall_s,
            "predicted_s": record.predicted_stall_s,
            "copy_s": record.copy_s,
            "share": record.state_bytes / here.training.size_bytes(),
        }
    ((began_s, returned_s),) = called
    return Held(
        call_s=returned_s - began_s, wait_s=wait_s, compute_s=waited[0][0] - returned_s, **facts
    )


def loops(
    rank: int, names: Sequence[str], batch: Batch, steps: int, repeats: int
) -> dict[str, list[float]]:
    """Seconds of ``steps`` steps, with one save begun before the first, and of what it takes
    longer than they do, so that every save is counted in full; one number for each repeat."""
    here = HERE[0]
    found: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        here.saver(name)
    for name in turns(names, repeats):
        saver = here.saver(name)
        here.training.step(batch)
        os.sync()
        began_s = time.perf_counter()
        saver.start()
        for _ in range(steps):
            here.training.step(batch, saver.before_step)
        saver.finish()
        found[name].append(time.perf_counter() - began_s)
        saver.clean()
    return found


def memory(rank: int, batch: Batch, saves: int) -> list[int]:
    """Resident bytes of this process after each of so many saves."""
    here = HERE[0]
    saver = here.saver("holdfast")
    resident = []
    for _ in range(saves):
        saver.start()
        here.training.step(batch)
        saver.finish()
        saver.clean()
        resident.append(status("VmRSS"))
    return resident


def low_rank(
    rank: int, folder: Path, width: int, layers: int, saves: int
) -> list[tuple[int, int, int]]:
    """Of each save of a model of which one in a hundred numbers learns, after the first: bytes that
    changed, bytes in its folder, and bytes it says it wrote."""
    torch.set_num_threads(os.cpu_count() or 1)
    model = LowRank(width=width, layers=layers, rank=max(1, width // 200))
    learning = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(learning)
    found = []
    options = CheckpointOptions(storage=folder / "low-rank")
    with DistributedCheckpoint.create(options=options) as checkpoint:
        for number in range(saves + 1):
            model(torch.randn(8, width)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            how = SaveOptions(checkpoint_prefix=f"{PREFIX}{number}", incremental=True)
            handle = checkpoint.save_async(model, optimizer, how)
            prefix = handle.result()
            state = (tensor for each in optimizer.state.values() for tensor in each.values())
            changed = sum(tensor.nbytes for tensor in (*learning, *state))
            files = (folder / "low-rank" / prefix).rglob("*")
            stored = sum(path.stat().st_size for path in files if path.is_file())
            written = 0 if handle.record is None else handle.record.written_bytes
            found.append((changed, stored, written))
    return found[1:]
