"""What recomputing activations costs beside torch's own: time and peak bytes of a step, and what
the manager and the engine add to a look-up and to a call."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from _disk import on_threads
from _gpt import GPT
from _measure import FULL, Extent, Measurement, Place, at_most, interleaved, ratios, told
from holdfast.activation import (
    AsyncRecomputationEngine,
    CheckpointManager,
    RecomputationEngine,
    checkpoint,
    measure_peak,
)

Call = Callable[..., Any]
THREADS = 8
STEP = "checkpoint(): time of a step"


def torchs(fn: Call, *args: Any) -> Any:
    return torch_checkpoint(fn, *args, use_reentrant=False)


def nothing(fn: Call, *args: Any) -> Any:
    return fn(*args)


HOW: dict[str, Call] = {"plain": nothing, "torch": torchs, "holdfast": checkpoint}


def measure(extent: Extent = FULL) -> list[Measurement]:
    threads = torch.get_num_threads()
    try:
        return [
            *small_ops(extent.repeats(201)),
            *gpt(extent.repeats(31)),
            *lookups(extent),
            *calls(extent),
            *together(extent.repeats(25)),
        ]
    finally:
        torch.set_num_threads(threads)


def small_ops(repeats: int) -> list[Measurement]:
    """torch's own micro case: a chain of 101 operators on almost nothing."""
    torch.set_num_threads(1)

    def chain(x: Any) -> Any:
        for _ in range(101):
            x = x.sin()
        return x

    def step(how: Call) -> None:
        x = torch.ones(4, requires_grad=True)
        how(chain, x).sum().backward()

    return _against_torch("101 small ops", step, repeats=repeats)


def gpt(repeats: int) -> list[Measurement]:
    """Twelve blocks, each checkpointed, with dropout."""
    torch.set_num_threads(2)
    torch.manual_seed(0)
    model = GPT(layers=12, width=256, heads=8, vocabulary=512, length=256, dropout=0.1)
    tokens = torch.randint(0, 512, (4, 256))

    def step(how: Call) -> None:
        model.zero_grad(set_to_none=False)
        model(tokens, how).backward()

    step(nothing)  # the gradients are there from now on
    return _against_torch("GPT of 12 blocks", step, repeats=repeats)


def _against_torch(name: str, step: Callable[[Call], None], *, repeats: int) -> list[Measurement]:
    for how in HOW.values():
        step(how)
    seconds = interleaved({key: _bound(step, how) for key, how in HOW.items()}, repeats=repeats)
    peaks = {key: measure_peak(step, how).peak_bytes for key, how in HOW.items()}
    return [
        at_most(
            f"{name}: time, of torch's",
            ratios(seconds["holdfast"], seconds["torch"]),
            "x",
            1.0,
            place=Place(chart=STEP, series=f"{name}, of torch's"),
        ),
        told(
            f"{name}: time, of no checkpointing",
            ratios(seconds["holdfast"], seconds["plain"]),
            "x",
            place=Place(chart=STEP, series=f"{name}, of no checkpointing"),
        ),
        at_most(f"{name}: peak, of torch's", [peaks["holdfast"] / peaks["torch"]], "x", 1.0),
        told(f"{name}: peak, of no checkpointing", [peaks["holdfast"] / peaks["plain"]], "x"),
    ]


def lookups(extent: Extent) -> list[Measurement]:
    """A kept activation, over a look-up in a dict."""
    with CheckpointManager() as manager:
        kept = {f"layer.{i}": torch.zeros(8) for i in range(64)}
        for layer, tensor in kept.items():
            manager.register_checkpoint(layer, tensor)
        return _over(
            "retrieve_or_recompute, over a dict look-up",
            lambda: kept["layer.7"],
            lambda: manager.retrieve_or_recompute("layer.7"),
            most_us=2.0,
            extent=extent,
        )


def calls(extent: Extent) -> list[Measurement]:
    """A recompute function, over calling it."""
    result = torch.zeros(8)

    def bare() -> Any:
        return result

    with RecomputationEngine() as engine:
        engine.register_recompute_function("layer.7", bare)
        return _over(
            "recompute, over the bare call",
            bare,
            lambda: engine.recompute("layer.7"),
            most_us=3.0,
            extent=extent,
        )


def _over(
    name: str, bare: Call, wrapped: Call, *, most_us: float, extent: Extent
) -> list[Measurement]:
    both = {"bare": bare, "wrapped": wrapped}
    alone = interleaved(both, repeats=extent.repeats(51), calls=2_000)
    beside = interleaved(
        {key: _by_threads(call) for key, call in both.items()}, repeats=extent.repeats(15)
    )
    return [
        at_most(name, _over_us(alone, 1), "us", most_us),
        at_most(
            f"{name}, {THREADS} threads at once", _over_us(beside, THREADS * 2_000), "us", most_us
        ),
    ]


def _by_threads(call: Call) -> Callable[[], None]:
    """Calls it 2,000 times in each of the threads. Their time together counts."""

    def work(start: threading.Barrier) -> None:
        start.wait()
        for _ in range(2_000):
            call()

    def run() -> None:
        start = threading.Barrier(THREADS)
        on_threads(THREADS, lambda _: work(start))

    return run


def _over_us(seconds: dict[str, list[float]], calls: int) -> list[float]:
    return [
        1e6 * (wrapped - bare) / calls
        for wrapped, bare in zip(seconds["wrapped"], seconds["bare"], strict=True)
    ]


def together(repeats: int) -> list[Measurement]:
    """Two recomputations of about 50 ms that need nothing of each other, on one thread each."""
    torch.set_num_threads(1)
    matrix = torch.randn(512, 512)
    _product(matrix, 10)
    rounds = max(1, round(10 * 0.05 / _timed(_product, matrix, 10)))

    with AsyncRecomputationEngine(max_parallelism=2) as engine:
        for layer in ("a", "b"):
            engine.register_recompute_function(layer, lambda: _product(matrix, rounds))
        seconds = interleaved(
            {
                "one": lambda: asyncio.run(engine.recompute_async("a")),
                "two": lambda: asyncio.run(_both(engine)),
                "one bare": lambda: _product(matrix, rounds),
                "two bare": lambda: on_threads(2, lambda _: _product(matrix, rounds)),
            },
            repeats=repeats,
        )
    name = "two async recomputations of 50 ms, of one"
    return [
        at_most(name, ratios(seconds["two"], seconds["one"]), "x", 1.3),
        told(
            f"{name}: two threads without us", ratios(seconds["two bare"], seconds["one bare"]), "x"
        ),
    ]


async def _both(engine: AsyncRecomputationEngine) -> None:
    await engine.recompute_multiple_async(["a", "b"])


def _product(matrix: Any, rounds: int) -> Any:
    result = matrix
    for _ in range(rounds):
        result = matrix @ result
    return result


def _timed(call: Callable[..., Any], *args: Any) -> float:
    began = time.perf_counter()
    call(*args)
    return time.perf_counter() - began


def _bound(step: Callable[[Call], None], how: Call) -> Callable[[], None]:
    return lambda: step(how)
