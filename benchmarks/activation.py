"""What recomputing activations costs beside torch's own: time and peak bytes of a step, and what
the manager and the engine add to a look-up and to a call."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from _gpt import GPT
from _measure import Measurement, at_most, interleaved, told
from holdfast.activation import (
    AsyncRecomputationEngine,
    CheckpointManager,
    RecomputationEngine,
    checkpoint,
    measure_peak,
)

Call = Callable[..., Any]
THREADS = 8


def torchs(fn: Call, *args: Any) -> Any:
    return torch_checkpoint(fn, *args, use_reentrant=False)


def nothing(fn: Call, *args: Any) -> Any:
    return fn(*args)


HOW: dict[str, Call] = {"plain": nothing, "torch": torchs, "holdfast": checkpoint}


def measure() -> list[Measurement]:
    threads = torch.get_num_threads()
    try:
        return [*small_ops(), *gpt(), *lookups(), *calls(), *together()]
    finally:
        torch.set_num_threads(threads)


def small_ops() -> list[Measurement]:
    """torch's own micro case: a chain of 101 operators on almost nothing."""
    torch.set_num_threads(1)

    def chain(x: Any) -> Any:
        for _ in range(101):
            x = x.sin()
        return x

    def step(how: Call) -> None:
        x = torch.ones(4, requires_grad=True)
        how(chain, x).sum().backward()

    return _against_torch("101 small ops", step, repeats=201)


def gpt() -> list[Measurement]:
    """Twelve blocks, each checkpointed, with dropout."""
    torch.set_num_threads(2)
    torch.manual_seed(0)
    model = GPT(layers=12, width=256, heads=8, vocabulary=512, length=256, dropout=0.1)
    tokens = torch.randint(0, 512, (4, 256))

    def step(how: Call) -> None:
        model.zero_grad(set_to_none=False)
        model(tokens, how).backward()

    step(nothing)  # the gradients are there from now on
    return _against_torch("GPT of 12 blocks", step, repeats=31)


def _against_torch(name: str, step: Callable[[Call], None], *, repeats: int) -> list[Measurement]:
    for how in HOW.values():
        step(how)
    seconds = interleaved({key: _bound(step, how) for key, how in HOW.items()}, repeats=repeats)
    peaks = {key: measure_peak(step, how).peak_bytes for key, how in HOW.items()}
    return [
        at_most(f"{name}: time, of torch's", _ratios(seconds, "holdfast", "torch"), "x", 1.0),
        told(f"{name}: time, of no checkpointing", _ratios(seconds, "holdfast", "plain"), "x"),
        at_most(f"{name}: peak, of torch's", [peaks["holdfast"] / peaks["torch"]], "x", 1.0),
        told(f"{name}: peak, of no checkpointing", [peaks["holdfast"] / peaks["plain"]], "x"),
    ]


def lookups() -> list[Measurement]:
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
        )


def calls() -> list[Measurement]:
    """A recompute function, over calling it."""
    result = torch.zeros(8)

    def bare() -> Any:
        return result

    with RecomputationEngine() as engine:
        engine.register_recompute_function("layer.7", bare)
        return _over(
            "recompute, over the bare call", bare, lambda: engine.recompute("layer.7"), most_us=3.0
        )


def _over(name: str, bare: Call, wrapped: Call, *, most_us: float) -> list[Measurement]:
    both = {"bare": bare, "wrapped": wrapped}
    alone = interleaved(both, repeats=51, calls=2_000)
    beside = interleaved(
        {key: _by_threads(call) for key, call in both.items()}, repeats=15, calls=1
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
        _on_threads(THREADS, lambda: work(start))

    return run


def _on_threads(count: int, work: Callable[[], object]) -> None:
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _over_us(seconds: dict[str, list[float]], calls: int) -> list[float]:
    return [
        1e6 * (wrapped - bare) / calls
        for wrapped, bare in zip(seconds["wrapped"], seconds["bare"], strict=True)
    ]


def together() -> list[Measurement]:
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
                "two bare": lambda: _on_threads(2, lambda: _product(matrix, rounds)),
            },
            repeats=25,
        )
    name = "two async recomputations of 50 ms, of one"
    return [
        at_most(name, _ratios(seconds, "two", "one"), "x", 1.3),
        told(f"{name}: two threads without us", _ratios(seconds, "two bare", "one bare"), "x"),
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


def _ratios(seconds: dict[str, list[float]], one: str, other: str) -> Sequence[float]:
    return [a / b for a, b in zip(seconds[one], seconds[other], strict=True)]
