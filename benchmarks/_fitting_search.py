"""Finds torch's best for a model: its floor, and at every budget the fastest choices that fit.

Nothing is predicted: the peak of every choice is measured, and what may be fastest is timed. Left
out is only what is beaten for certain: a choice that computes more again than another that fits
too, and selective checkpointing where it is slower than whole on all blocks, since it keeps more.
"""

import contextlib
import ctypes
import functools
import gc
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from _fitting_models import Case
from _fitting_torch import (
    Choice,
    Order,
    plain,
    put_on,
    selective,
    uniform,
    with_selecting,
    without_selecting,
)
from holdfast.activation import measure_peak

THREADS = 2
CLEARLY_SLOWER = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured. ``levels`` are budgets, in percent of the way from torch's floor to the
    peak of saving everything; ``judged`` those of them at which time has to be better. ``lines``
    thins the choices; ``tried`` of those that fit are timed more than once, ``compared`` of them
    beside ours, ``pairs`` times, or ``pairs_elsewhere`` at a level that is not judged."""

    levels: tuple[int, ...]
    judged: tuple[int, ...]
    lines: int
    tried: int
    compared: int
    pairs: int
    pairs_elsewhere: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A budget, and torch's choices that fit it, the fastest first: seconds are of a quick look.
    ``simplest`` is the checkpointing of the first so many blocks, if that fits."""

    percent: int
    budget_bytes: int
    best: tuple[tuple[Choice, float], ...]
    simplest: Choice | None

    def compared(self, number: int) -> list[Choice]:
        """The ``number`` fastest, and the simplest: a quick look on a busy machine may take a poor
        choice for the best."""
        fastest = [choice for choice, _ in self.best[:number]]
        simplest = [] if self.simplest is None else [self.simplest]
        return list(dict.fromkeys((*fastest, *simplest)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchsBest:
    plain_bytes: int
    plain_s: float
    floor_bytes: int
    floor: Choice
    levels: tuple[Level, ...]
    peaks: Mapping[Choice, int] = field(repr=False)


class Bench:
    """One model with its gradients allocated, stepped under one choice after another."""

    def __init__(self, case: Case) -> None:
        self.case = case
        torch.manual_seed(0)
        self.model = case.make()
        self.sample = case.sample()
        self.blocks = case.blocks(self.model)
        self.step()

    @property
    def alike(self) -> bool:
        """Whether all blocks are the same, as far as what they save tells."""
        return len(set(self.saved_bytes)) == 1

    def step(self) -> None:
        self.case.step(self.model, self.sample)

    def clear(self) -> None:
        self.model.zero_grad(set_to_none=False)

    def running(self, choice: Choice) -> contextlib.AbstractContextManager[None]:
        return put_on(choice, self.blocks, random=self.case.random)

    def peak_bytes(self, choice: Choice) -> int:
        self.clear()
        with self.running(choice):
            return measure_peak(self.step, device="cpu").peak_bytes

    def seconds(self, choices: Iterable[Choice], *, repeats: int) -> dict[Choice, float]:
        """The fastest of ``repeats`` steps under each choice, in random order."""
        shuffled = list(dict.fromkeys(choices))
        order = random.Random(0)
        best: dict[Choice, float] = {}
        for _ in range(repeats):
            order.shuffle(shuffled)
            for choice in shuffled:
                self.clear()
                with self.running(choice):
                    took = _timed(self.step)
                best[choice] = min(took, best.get(choice, took))
        return best

    def orders(self) -> list[Order]:
        """As they are executed: the last blocks are the first that backward frees, so they are the
        last to be checkpointed. And if they differ in size, the largest first."""
        executed = Order(name="first", blocks=tuple(range(len(self.blocks))))
        largest = tuple(sorted(executed.blocks, key=lambda block: -self.saved_bytes[block]))
        if largest == executed.blocks:
            return [executed]
        return [executed, Order(name="largest", blocks=largest)]

    @functools.cached_property
    def saved_bytes(self) -> list[int]:
        """What each block saves for its backward, parameters left out."""
        own = {each.untyped_storage()._cdata for each in self.model.parameters()}  # noqa: SLF001
        found: list[dict[int, int]] = [{} for _ in self.blocks]
        with contextlib.ExitStack() as stack:
            for block, saved in zip(self.blocks, found, strict=True):
                stack.enter_context(_noting(block, saved, own))
            self.case.output(self.model, self.sample)
        return [sum(saved.values()) for saved in found]


@contextlib.contextmanager
def _noting(block: Any, saved: dict[int, int], own: set[int]) -> Iterator[None]:
    """Notes the storages that the block's forward saves. They are alive together, as its graph."""
    forward = block.forward

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:  # noqa: SLF001 -- the identity of a storage
            saved[storage._cdata] = storage.nbytes()  # noqa: SLF001
        return tensor

    def noted(*args: Any, **named: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return forward(*args, **named)

    block.forward = noted
    try:
        yield
    finally:
        del block.forward


def torchs_best(bench: Bench, effort: Effort) -> TorchsBest:
    orders = bench.orders()
    choices = _worth_measuring(bench, orders, effort)
    peaks = _peaks(bench, choices)
    nothing = choices[0]
    floor = min(peaks, key=lambda choice: peaks[choice])
    room = peaks[nothing] - peaks[floor]
    budgets = {level: peaks[floor] + room * level // 100 for level in effort.levels}
    fitting = {
        level: unbeaten(peaks, budget, alike=bench.alike) for level, budget in budgets.items()
    }

    once = bench.seconds((each for fits in fitting.values() for each in fits), repeats=1)
    tried = {level: _fastest(fits, once, effort.tried) for level, fits in fitting.items()}
    seconds = bench.seconds(
        (nothing, *(each for fits in tried.values() for each in fits)), repeats=4
    )
    numbers = range(1, len(bench.blocks) + 1)
    simple = [each for each in (uniform(orders[0], number) for number in numbers) if each in peaks]

    def level(percent: int) -> Level:
        best = _fastest(tried[percent], seconds, effort.tried)
        return Level(
            percent=percent,
            budget_bytes=budgets[percent],
            best=tuple((choice, seconds[choice]) for choice in best),
            simplest=next((each for each in simple if peaks[each] <= budgets[percent]), None),
        )

    return TorchsBest(
        plain_bytes=peaks[nothing],
        plain_s=seconds[nothing],
        floor_bytes=peaks[floor],
        floor=floor,
        levels=tuple(map(level, effort.levels)),
        peaks=peaks,
    )


def _peaks(bench: Bench, choices: Iterable[Choice]) -> dict[Choice, int]:
    gc.collect()
    gc.freeze()  # or the meter goes through all that is there, imports included, for every choice
    try:
        return {choice: bench.peak_bytes(choice) for choice in choices}
    finally:
        gc.unfreeze()


def _worth_measuring(bench: Bench, orders: Sequence[Order], effort: Effort) -> list[Choice]:
    count = len(bench.blocks)
    choices = [
        plain(count),
        *without_selecting(orders, chained=bench.case.chained, lines=effort.lines),
    ]
    whole, selected = uniform(orders[0], count), selective(orders[0], 0, count)
    seconds = bench.seconds((whole, selected), repeats=4)
    if seconds[selected] > CLEARLY_SLOWER * seconds[whole]:
        return choices
    return [*choices, *with_selecting(orders, lines=effort.lines)]


def unbeaten(peaks: Mapping[Choice, int], budget_bytes: int, *, alike: bool) -> list[Choice]:
    """What fits, without those that do more than another that fits."""
    fits = [choice for choice, peak in peaks.items() if peak <= budget_bytes]
    return [
        each for each in fits if not any(other.does_less_than(each, alike=alike) for other in fits)
    ]


def _fastest(choices: Iterable[Choice], seconds: Mapping[Choice, float], most: int) -> list[Choice]:
    return sorted(choices, key=lambda choice: seconds[choice])[:most]


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def settle_process() -> None:
    """Two threads, and an allocator that keeps what it has: else what a step frees goes back to
    the system at a moment that depends on the steps before it, and the next one pays for getting
    it again. glibc's only; another allocator is left as it is. For good, so in a process of its
    own."""
    torch.set_num_threads(THREADS)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        no_mapping, no_trimming = (-4, 0), (-1, -1)
        mallopt(*no_mapping)
        mallopt(*no_trimming)
