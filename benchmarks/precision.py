"""Steps of mixed precision beside those of FP32 and of torch's GradScaler, with made-up gradients.

24 M parameters, in a few large and many small tensors. Everything is clipped. ``FP32`` is the
optimizer on FP32 weights, ``GradScaler`` the same with torch's scaler in between; ours holds BF16
or FP16 weights, whose gradients it is given. Candidates take turns, and each ratio is of one turn.
No forward is timed: on a CPU, 16-bit products are about 100 times slower than FP32's.

Bytes per parameter are what processes of their own hold for 72 M parameters and not for 24 M,
gradients included. A checkpoint is made and saved beside a bare write of as many bytes to the same
disk.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from torch.nn.utils import clip_grad_norm_

from _measure import Measurement, at_most, interleaved, median, spread, told
from _ranks import raw_write
from holdfast.precision import (
    MixedPrecisionOptimizer,
    MixedPrecisionOptions,
    create_checkpoint,
    save_checkpoint,
)

SHAPES = [(1024, 1024)] * 20 + [(1024,)] * 40 + [(3000, 1024)]
REPEATS = 15
SAVES = 5
SCALE = 2.0**10
HERE = Path(__file__).parent

Make = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]

FUSED: Make = partial(torch.optim.AdamW, lr=1e-3, fused=True)
OTHERS: dict[str, Make] = {
    "AdamW, foreach": partial(torch.optim.AdamW, lr=1e-3, foreach=True),
    "SGD with momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-3),
    "Adafactor": partial(torch.optim.Adafactor, lr=1e-3),
}


def measure() -> list[Measurement]:
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found += _fused(threads)
            for name, make in OTHERS.items():
                found += _other(name, make, threads)
    finally:
        torch.set_num_threads(before)
    return [*found, *_memory(), _saving()]


def _fused(threads: int) -> list[Measurement]:
    seconds = interleaved(
        _warm(
            {
                "FP32": plain(FUSED),
                "GradScaler": scaled(FUSED),
                "bf16": mixed(FUSED, "bf16"),
                "fp16": mixed(FUSED, "fp16"),
                "remainder": mixed(FUSED, "bf16", master_storage="remainder"),
            }
        ),
        repeats=REPEATS,
    )
    most = {1: (1.30, 1.05), 2: (1.10, 0.95)}[threads]
    found = []
    for ours in ("bf16", "fp16"):
        for other, limit in zip(("FP32", "GradScaler"), most, strict=True):
            name = f"fused AdamW, {ours}, {threads} threads: of {other} + clip"
            found.append(at_most(name, ratios(seconds[ours], seconds[other]), "x", limit))
    name = f"fused AdamW, bf16 with remainders, {threads} threads: of FP32 + clip"
    return [*found, told(name, ratios(seconds["remainder"], seconds["FP32"]), "x")]


def _other(name: str, make: Make, threads: int) -> list[Measurement]:
    seconds = interleaved(
        _warm({"FP32": plain(make), "bf16": mixed(make, "bf16")}), repeats=REPEATS
    )
    told_as = f"{name}, bf16, {threads} threads: of FP32 + clip"
    return [at_most(told_as, ratios(seconds["bf16"], seconds["FP32"]), "x", 1.40)]


def _memory() -> list[Measurement]:
    def told_by(kind: str, parameters: int) -> int:
        command = [sys.executable, str(HERE / "_precision_memory.py"), kind, str(parameters)]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    few, many = 24 * 2**20, 72 * 2**20
    found = []
    targets = {"fused": 16.5, "remainder": 14.5, "not fused": 16.5, "by its own step": 20.5}
    for kind, most in targets.items():
        held = (told_by(kind, many) - told_by(kind, few)) / (many - few)
        found.append(at_most(f"AdamW, {kind}: bytes per parameter", [held], "B", most))
    growth = told_by("growth", 2**20) / 2**20
    return [*found, at_most("growth over 1,000 steps", [growth], "MiB", 1.0)]


def _saving() -> Measurement:
    optimizer = mixed_optimizer(FUSED, "bf16")
    optimizer.step()
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=".") as folder:
        path, raw = Path(folder) / "mp.safetensors", Path(folder) / "raw"

        def save() -> None:
            save_checkpoint(create_checkpoint(optimizer), path)

        save()
        size = path.stat().st_size
        seconds = interleaved(
            {"holdfast": save, "raw": lambda: raw_write(raw, size, 2)},
            repeats=SAVES,
            prepare=lambda name: (path if name == "holdfast" else raw).unlink(missing_ok=True),
        )
    speeds = ratios(seconds["raw"], seconds["holdfast"])
    return Measurement(
        name="create_checkpoint + save_checkpoint: of the bare disk's speed",
        value=median(speeds),
        unit="x",
        target="\N{GREATER-THAN OR EQUAL TO} 0.8",
        met=median(speeds) >= 0.8,
        spread=spread(speeds),
    )


def parameters() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def filled(weights: list[torch.nn.Parameter], scale: float = 1.0) -> list[torch.nn.Parameter]:
    torch.manual_seed(1)
    for weight in weights:
        weight.grad = (torch.randn(weight.shape) * 1e-3 * scale).to(weight.dtype)
    return weights


def plain(make: Make) -> Callable[[], object]:
    weights = filled(parameters())
    optimizer = make(weights)

    def step() -> None:
        clip_grad_norm_(weights, 1.0)
        optimizer.step()

    return step


def scaled(make: Make) -> Callable[[], object]:
    """Its scale is 1, so that gradients, which it divides in place, stay what they are."""
    weights = filled(parameters())
    optimizer = make(weights)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=10**6)
    scaler.scale(torch.ones(()))

    def step() -> None:
        scaler.unscale_(optimizer)
        clip_grad_norm_(weights, 1.0)
        scaler.step(optimizer)
        scaler.update()

    return step


def mixed_optimizer(make: Make, precision: str, **words: object) -> MixedPrecisionOptimizer:
    weights = parameters()
    given = {"precision": precision, "initial_scale": SCALE, "max_grad_norm": 1.0, **words}
    optimizer = MixedPrecisionOptimizer(make(weights), MixedPrecisionOptions.from_plain(given))
    filled(weights, SCALE)
    return optimizer


def mixed(make: Make, precision: str, **words: object) -> Callable[[], object]:
    optimizer = mixed_optimizer(make, precision, **words)

    def step() -> None:
        if not optimizer.step():
            raise RuntimeError("a made-up gradient overflowed")

    return step


def ratios(ours: list[float], others: list[float]) -> list[float]:
    return [mine / other for mine, other in zip(ours, others, strict=True)]


def _warm(steps: dict[str, Callable[[], object]]) -> dict[str, Callable[[], object]]:
    for step in steps.values():
        step()
    return steps
