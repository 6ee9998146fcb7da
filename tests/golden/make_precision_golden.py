"""Makes the golden files of mixed-precision checkpoints, version 1.

    python tests/golden/make_precision_golden.py tests/golden/precision_v1

Everything is fixed, the time included, and no tensor is computed, so that it makes the same bytes
each time. Files of a released version are never made again: they show that what was written once
is read for ever. A new version gets a new folder beside ``precision_v1``.
"""

import datetime as dt
import pathlib
import sys

import torch

from holdfast.precision import (
    MixedPrecisionCheckpoint,
    MixedPrecisionOptions,
    Precision,
    save_checkpoint,
)
from holdfast.precision._scaler import ScalerState

SHAPES = {"0.weight": (5, 3), "0.bias": (5,), "1.weight": (5,), "1.bias": (5,), "2.weight": (2, 5)}
TIME = dt.datetime(2026, 1, 31, 12, 0, 0, 123456, dt.UTC)
METADATA = {"run": "größe 日本", "loss": 0.25, "sizes": (3, 5), "none": None}


def numbers(shape: tuple[int, ...], start: float) -> torch.Tensor:
    """FP32 values that have more digits than 16 bits hold, without any arithmetic of floats."""
    count = torch.Size(shape).numel()
    bits = torch.arange(count, dtype=torch.int32) * 70_001 + int(start * 2**23) + 0x3C00_0000
    return bits.view(torch.float32).reshape(shape)


def adamw() -> MixedPrecisionCheckpoint:
    """BF16 with a norm that stays FP32, in the middle of a growth interval."""
    masters = {name: numbers(shape, i / 8) for i, (name, shape) in enumerate(SHAPES.items())}
    narrow = {name: w for name, w in masters.items() if not name.startswith("1.")}
    state = {
        name: {
            "step": torch.tensor(12.0),
            "exp_avg": numbers(SHAPES[name], 0.3),
            "exp_avg_sq": numbers(SHAPES[name], 0.6),
        }
        for name in SHAPES
    }
    hyper = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-08, "weight_decay": 0.01}
    flags = {"amsgrad": False, "maximize": False, "foreach": None, "capturable": False}
    more = {"differentiable": False, "fused": True, "decoupled_weight_decay": True}
    return MixedPrecisionCheckpoint(
        version=1,
        timestamp=TIME,
        master_weights=masters,
        training_weights=masters | {name: w.bfloat16() for name, w in narrow.items()},
        base_optimizer_state={
            "class": "AdamW",
            "state": state,
            "groups": [{**hyper, **flags, **more, "params": list(SHAPES)}],
        },
        scaler=ScalerState(
            scale=1024.0,
            growth_tracker=3,
            hysteresis_left=2,
            steps_since_overflow=5,
            total_overflows=1,
            growth_interval=100,
            hysteresis=2,
        ),
        options=MixedPrecisionOptions.for_bf16(
            dynamic_scaling=True, initial_scale=2048.0, growth_interval=100, hysteresis=2
        ),
        step_count=13,
        skipped_steps=1,
        has_fallback=False,
        metadata=METADATA,
    )


def sgd() -> MixedPrecisionCheckpoint:
    """FP16 after a fallback, in two groups, one without momentum yet, without training weights."""
    masters = {name: numbers(shape, i / 8) for i, (name, shape) in enumerate(SHAPES.items())}
    hyper = {"lr": 0.1, "momentum": 0.9, "dampening": 0, "weight_decay": 0, "nesterov": False}
    flags = {"maximize": False, "foreach": None, "differentiable": False, "fused": None}
    first = [name for name in SHAPES if name.endswith("weight")]
    rest = [name for name in SHAPES if name.endswith("bias")]
    return MixedPrecisionCheckpoint(
        version=1,
        timestamp=TIME,
        master_weights=masters,
        training_weights={},
        base_optimizer_state={
            "class": "SGD",
            "state": {name: {"momentum_buffer": numbers(SHAPES[name], 0.4)} for name in first},
            "groups": [
                {**hyper, **flags, "params": first},
                {**hyper, **flags, "lr": 0.2, "params": rest},
            ],
        },
        scaler=ScalerState(
            scale=1.0, steps_since_overflow=2, total_overflows=9, dynamic=False, min_scale=1.0
        ),
        options=MixedPrecisionOptions(
            precision=Precision.FP16,
            dynamic_scaling=True,
            initial_scale=65536.0,
            max_consecutive_overflows=4,
            max_grad_norm=1.0,
            fp32_layer_patterns=("*LayerNorm",),
        ),
        step_count=20,
        skipped_steps=9,
        has_fallback=True,
    )


FILES = {"adamw.safetensors": adamw, "sgd.safetensors": sgd}


def make(folder: pathlib.Path) -> None:
    for name, made in FILES.items():
        save_checkpoint(made(), folder / name)
        (folder / ".holdfast.lock").unlink(missing_ok=True)


if __name__ == "__main__":
    target = pathlib.Path(sys.argv[1])
    if target.exists():
        sys.exit(f"{target} exists: golden files are never made again, only added to")
    make(target)
