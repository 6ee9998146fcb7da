"""Trains every case of the exact-resume matrix, and goes on with it in a new process:

    python precision_resume.py <folder>

loads what another process saved in the folder, takes the further steps, and leaves there what it
saw after each of them.
"""

import json
import pathlib
import sys
from dataclasses import dataclass

import torch
import xxhash
from torch import nn

from holdfast.precision import (
    MixedPrecisionOptimizer,
    MixedPrecisionOptions,
    create_checkpoint,
    load_and_restore,
    save_checkpoint,
)

FURTHER = 100
WORDS = {
    "dynamic_scaling": True,
    "initial_scale": 64.0,
    "growth_interval": 5,
    "hysteresis": 2,
    "max_consecutive_overflows": 4,
    "max_grad_norm": 0.5,
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "sparse adam": lambda p: torch.optim.SparseAdam(p, lr=0.01),
}


@dataclass(frozen=True)
class Moment:
    """Saved after ``steps``; at each of ``overflows`` a gradient is infinite."""

    steps: int
    overflows: frozenset[int]


AGAIN = {30, 31, 32, 60}  # after the resume, so that counters and hysteresis matter
MOMENTS = {
    "before the first step": Moment(0, frozenset(AGAIN)),
    "mid growth interval": Moment(8, frozenset({1} | AGAIN)),
    "mid overflow streak": Moment(9, frozenset({6, 7, 8, 9} | AGAIN)),
    "after fallback": Moment(9, frozenset({2, 3, 4, 5} | AGAIN)),
}


@dataclass(frozen=True)
class Case:
    optimizer: str
    precision: str
    moment: str
    storage: str = "fp32"

    @property
    def name(self) -> str:
        told = f"{self.optimizer}-{self.precision}-{self.moment}-{self.storage}"
        return told.replace(" ", "_")


CASES = [
    *(Case(o, p, m) for o in OPTIMIZERS for p in ("fp16", "bf16") for m in MOMENTS),
    *(Case("adamw fused", "bf16", m, "remainder") for m in MOMENTS),
]


class Net(nn.Module):
    """A norm that stays FP32, a weight that is used twice, one that is never used."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(5, 8)
        self.norm = nn.LayerNorm(8)
        self.two = nn.Linear(8, 8)
        self.three = nn.Linear(8, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        x = self.norm(torch.tanh(self.one(x)))
        return self.three(self.two(torch.relu(self.two(x))))


class Words(nn.Module):
    """Nothing but rows of a table, whose gradients are sparse."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(12, 4, sparse=True)

    def forward(self, x):
        rows = (x[:, 0].float().abs() * 100).long() % 12
        return self.table(rows).sum(1, keepdim=True)


def made(case: Case, seed: int) -> tuple[nn.Module, MixedPrecisionOptimizer]:
    torch.manual_seed(seed)
    model = Words() if case.optimizer == "sparse adam" else Net()
    options = MixedPrecisionOptions(precision=case.precision, master_storage=case.storage, **WORDS)
    inner = OPTIMIZERS[case.optimizer](model.parameters())
    return model, MixedPrecisionOptimizer(inner, options, model=model)


def step(case: Case, model: nn.Module, optimizer: MixedPrecisionOptimizer, number: int) -> None:
    make = torch.Generator().manual_seed(number)
    loss = model(torch.randn(4, 5, generator=make)).float().square().mean()
    optimizer.scale_loss(loss).backward()
    if number in MOMENTS[case.moment].overflows:
        first = next(model.parameters())
        first.grad = first.grad * torch.inf
    optimizer.step()
    optimizer.zero_grad()


def tensors_of(value, path=()):
    """Every tensor of a tree, and every other value, with its place."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_of(item, (*path, key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from tensors_of(item, (*path, index))
    else:
        yield path, value


def seen(model: nn.Module, optimizer: MixedPrecisionOptimizer) -> str:
    """A digest of every bit that the model and the optimizer have."""
    state = xxhash.xxh3_128()
    for tree in (dict(model.state_dict()), optimizer.state_dict()):
        for path, value in tensors_of(tree):
            if isinstance(value, torch.Tensor):
                bits = value.detach().reshape(-1).view(torch.uint8)
                state.update(bits.numpy().tobytes())
                state.update(f"{path} {value.dtype} {tuple(value.shape)}".encode())
            else:
                state.update(f"{path} {value!r}".encode())
    return state.hexdigest()


def train(case: Case, model, optimizer, start: int, stop: int) -> list[str]:
    found = []
    for number in range(start, stop):
        step(case, model, optimizer, number)
        found.append(seen(model, optimizer))
    return found


def begin(case: Case, folder: pathlib.Path):
    """Train up to the case's moment and save."""
    model, optimizer = made(case, seed=1)
    train(case, model, optimizer, 0, MOMENTS[case.moment].steps)
    save_checkpoint(create_checkpoint(optimizer), folder / f"{case.name}.safetensors")
    return model, optimizer


def go_on(case: Case, model, optimizer) -> list[str]:
    start = MOMENTS[case.moment].steps
    return [seen(model, optimizer), *train(case, model, optimizer, start, start + FURTHER)]


def resume(case: Case, folder: pathlib.Path) -> list[str]:
    """As a new process does: a model of other weights, which are then those that were saved."""
    model, optimizer = made(case, seed=2)
    load_and_restore(optimizer, folder / f"{case.name}.safetensors")
    found = go_on(case, model, optimizer)
    save_checkpoint(create_checkpoint(optimizer), folder / f"{case.name}.after.safetensors")
    return found


def main() -> None:
    torch._C._set_mkldnn_enabled(False)  # its bf16 kernels end the process on some machines
    torch.set_num_threads(1)
    folder = pathlib.Path(sys.argv[1])
    saw = {case.name: resume(case, folder) for case in CASES}
    (folder / "saw.json").write_text(json.dumps(saw))


if __name__ == "__main__":
    main()
