"""Steps of mixed precision beside those of FP32 and of torch's GradScaler, with made-up gradients.

24 M parameters, in a few large and many small tensors. Everything is clipped. ``FP32`` is the
optimizer on FP32 weights, ``GradScaler`` the same with torch's scaler in between; ours holds BF16
or FP16 weights, whose gradients it is given. Candidates take turns, and each ratio is of one turn.
No forward is timed: on a CPU, 16-bit products are about 100 times slower than FP32's.

Bytes per parameter are what processes of their own hold for 72 M parameters and not for 24 M,
gradients included. A checkpoint is made and saved beside a bare write of as many bytes to the same
disk.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from torch.nn.utils import clip_grad_norm_

from _disk import RAW, in_folder, raw_write
from _measure import (
    FULL,
    Extent,
    Measurement,
    Place,
    at_least,
    at_most,
    fastest,
    interleaved,
    ratios,
    told,
)
from holdfast.precision import (
    MixedPrecisionOptimizer,
    MixedPrecisionOptions,
    create_checkpoint,
    save_checkpoint,
)

SHAPES = [(1024, 1024)] * 20 + [(1024,)] * 40 + [(3000, 1024)]
REPEATS = 15
SAVES = 5
STEP = "mixed-precision step, of the time of"
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


def measure(extent: Extent = FULL) -> list[Measurement]:
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found += _fused(threads, extent.repeats(REPEATS))
            for name, make in OTHERS.items():
                found += _other(name, make, threads, extent.repeats(REPEATS))
    finally:
        torch.set_num_threads(before)
    return [*found, *_memory(extent), in_folder(partial(_saving, extent.repeats(SAVES)))]


def _fused(threads: int, repeats: int) -> list[Measurement]:
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
        repeats=repeats,
    )
    most = {1: (1.30, 1.05), 2: (1.10, 0.95)}[threads]
    found = []
    for ours in ("bf16", "fp16"):
        for other, limit in zip(("FP32", "GradScaler"), most, strict=True):
            name = f"fused AdamW, {ours}, {threads} threads: of {other} + clip"
            pairs = ratios(seconds[ours], seconds[other])
            place = Place(chart=STEP, series=f"fused AdamW, {ours}, {threads} threads, of {other}")
            found.append(at_most(name, pairs, "x", limit, place=place))
    name = f"fused AdamW, bf16 with remainders, {threads} threads: of FP32 + clip"
    return [*found, told(name, ratios(seconds["remainder"], seconds["FP32"]), "x")]


def _other(name: str, make: Make, threads: int, repeats: int) -> list[Measurement]:
    seconds = interleaved(
        _warm({"FP32": plain(make), "bf16": mixed(make, "bf16")}), repeats=repeats
    )
    told_as = f"{name}, bf16, {threads} threads: of FP32 + clip"
    place = Place(chart=STEP, series=f"{name}, bf16, {threads} threads, of FP32")
    return [at_most(told_as, ratios(seconds["bf16"], seconds["FP32"]), "x", 1.40, place=place)]


def _memory(extent: Extent) -> list[Measurement]:
    def told_by(kind: str, parameters: int, steps: int = 3) -> int:
        program = str(HERE / "_precision_memory.py")
        command = [sys.executable, program, kind, str(parameters), str(steps)]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    few, many = extent.of(24) * 2**20, extent.of(72, least=2) * 2**20
    found = []
    targets = {"fused": 16.5, "remainder": 14.5, "not fused": 16.5, "by its own step": 20.5}
    for kind, most in targets.items():
        held = (told_by(kind, many) - told_by(kind, few)) / (many - few)
        found.append(at_most(f"AdamW, {kind}: bytes per parameter", [held], "B", most))
    steps = extent.of(1000)
    growth = told_by("growth", 2**20, steps) / 2**20
    return [*found, at_most(f"growth over {steps:,} steps", [growth], "MiB", 1.0)]


def _saving(repeats: int, folder: Path) -> Measurement:
    optimizer = mixed_optimizer(FUSED, "bf16")
    optimizer.step()
    path, raw = folder / "mp.safetensors", folder / "raw"

    def save() -> None:
        save_checkpoint(create_checkpoint(optimizer), path)

    save()
    size = path.stat().st_size

    def prepare(name: str) -> None:
        (path if name == "holdfast" else raw).unlink(missing_ok=True)
        os.sync()

    bare = {name: partial(raw_write, raw, size, threads) for name, threads in RAW.items()}
    seconds = interleaved({"holdfast": save, **bare}, repeats=repeats, prepare=prepare)
    return at_least(
        "create_checkpoint + save_checkpoint: of the bare disk's speed",
        ratios(seconds[fastest(seconds, tuple(RAW))], seconds["holdfast"]),
        "x",
        0.8,
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


def _warm(steps: dict[str, Callable[[], object]]) -> dict[str, Callable[[], object]]:
    for step in steps.values():
        step()
    return steps
