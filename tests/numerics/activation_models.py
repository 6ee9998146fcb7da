"""Small models in which a replay can go wrong, and one training step of each, told whole.

A `Chain` hands each of its blocks to the function it is given, so that the same model runs plain,
checkpointed block by block, as a whole, or nested. What a step leaves behind (output, gradients,
buffers, the state of every random stream) is compared bit for bit: the graphs are the same, so
there is no rounding to allow for.
"""

import collections
import functools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from holdfast.activation import checkpoint

Told = dict[str, Any]


def plain(function, *args, **kwargs):
    return function(*args, **kwargs)


class Chain(nn.Module):
    """Blocks one after the other, each run by ``run(block, x)``."""

    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x, run=plain):
        for block in self.blocks:
            x = run(block, x)
        return x


class GptBlock(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.between = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        split = self.qkv(self.before(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        mixed = self.merge(mixed.transpose(1, 2).reshape(batch, length, width))
        x = x + functional.dropout(mixed, self.dropout, self.training)
        inner = functional.gelu(self.up(self.between(x)))
        return x + functional.dropout(self.down(inner), self.dropout, self.training)


class ResidualBlock(nn.Module):
    def __init__(self, channels, momentum=0.1):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels, momentum=momentum)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels, momentum=momentum)

    def forward(self, x):
        inner = functional.relu(self.first_norm(self.first(x)), inplace=True)
        return functional.relu(x + self.second_norm(self.second(inner)))


class Recurrent(nn.Module):
    def __init__(self, kind, width):
        super().__init__()
        self.cell = kind(width, width, num_layers=2, batch_first=True, dropout=0.25)

    def forward(self, x):
        return self.cell(x)[0]


class PythonRandom(nn.Module):
    """Stochastic depth, and a shuffle, by Python's own stream."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        order = list(range(x.shape[0]))
        random.shuffle(order)
        if random.random() < 0.5:
            return x[order].tanh()
        return torch.tanh(self.linear(x[order]) * random.gauss(1.0, 0.1))


class NumpyRandom(nn.Module):
    """Noise and a mask by NumPy's global stream."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        mask = torch.from_numpy(np.random.rand(*x.shape) < 0.7)  # noqa: NPY002
        scale = float(np.random.standard_normal())  # noqa: NPY002
        return torch.tanh(self.linear(x) * scale) * mask


class OwnStreams(nn.Module):
    """Draws from a torch, a NumPy and a Python generator of its own, which nobody else knows."""

    def __init__(self, width, seed):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.streams = (
            torch.Generator().manual_seed(seed),
            np.random.default_rng(seed),
            random.Random(seed),
        )

    def forward(self, x):
        by_torch, by_numpy, by_python = self.streams
        noise = torch.rand(x.shape, generator=by_torch)
        mask = torch.from_numpy(by_numpy.random(x.shape) < 0.8)
        return torch.tanh(self.linear(x) * noise * by_python.uniform(0.5, 1.5)) * mask


class Codebook(nn.Module):
    """Buffers of every kind: used before they are changed, in place, replaced, made up late."""

    moving: Tensor
    replaced: Tensor
    seen: Tensor

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("moving", torch.ones(width))
        self.register_buffer("replaced", torch.zeros(width), persistent=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("late", None)

    def forward(self, x):
        x = torch.tanh(self.linear(x) * self.moving.clone() + self.replaced)
        if self.late is not None:
            x = x * self.late
        with torch.no_grad():
            self.seen += 1
            self.moving.mul_(0.9).add_(x.mean(0), alpha=0.1)
            self.replaced = 0.5 * self.replaced + x.std(0)
            self.late = x.amax(0)
        return x.sin()


class Shared(nn.Module):
    """One BatchNorm used twice in a region: its buffers move twice."""

    def __init__(self, norm, width):
        super().__init__()
        self.norm = norm
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return self.norm(torch.tanh(self.linear(self.norm(x))))


class Head(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.linear = nn.Linear(width, classes)

    def forward(self, x):
        return self.linear(x.flatten(2).mean(-1) if x.dim() == 4 else x)


def _gpt():
    blocks = (GptBlock(16, 2, 0.2) for _ in range(3))
    return Chain(nn.Embedding(23, 16), nn.Dropout(0.1), *blocks, nn.Linear(16, 23))


def _resnet():
    return Chain(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout2d(0.2)),
        ResidualBlock(8),
        ResidualBlock(8, momentum=None),
        Head(8, 5),
    )


def _spectral(normed):
    layers = [normed(nn.Linear(8, 8)) for _ in range(3)]
    return Chain(*(nn.Sequential(layer, nn.Tanh(), nn.Dropout(0.1)) for layer in layers))


def _shared():
    norm = nn.BatchNorm1d(8)
    return Chain(Shared(norm, 8), Shared(norm, 8), nn.Dropout(0.5))


def _everything():
    normed = nn.utils.parametrizations.spectral_norm
    return Chain(
        nn.Sequential(normed(nn.Linear(8, 8)), nn.BatchNorm1d(8), nn.RReLU(), nn.Dropout(0.2)),
        PythonRandom(8),
        Codebook(8),
        NumpyRandom(8),
        nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 8)), nn.AlphaDropout(0.1)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    make: Callable[[], Chain]
    sample: Callable[[], Tensor]


def _rows():
    return torch.randn(6, 8, requires_grad=True)


def _sequence():
    return torch.randn(3, 5, 8, requires_grad=True)


CASES = {
    "gpt": Case(make=_gpt, sample=lambda: torch.randint(0, 23, (2, 7))),
    "resnet": Case(make=_resnet, sample=lambda: torch.randn(4, 3, 8, 8, requires_grad=True)),
    "spectral norm": Case(
        make=lambda: _spectral(nn.utils.parametrizations.spectral_norm), sample=_rows
    ),
    "old spectral norm": Case(make=lambda: _spectral(nn.utils.spectral_norm), sample=_rows),
    "lstm": Case(make=lambda: Chain(Recurrent(nn.LSTM, 8), nn.Dropout(0.2)), sample=_sequence),
    "rnn": Case(make=lambda: Chain(Recurrent(nn.RNN, 8), nn.Linear(8, 8)), sample=_sequence),
    "gru": Case(make=lambda: Chain(Recurrent(nn.GRU, 8), nn.Linear(8, 8)), sample=_sequence),
    "python random": Case(make=lambda: Chain(*(PythonRandom(8) for _ in range(4))), sample=_rows),
    "numpy random": Case(make=lambda: Chain(*(NumpyRandom(8) for _ in range(3))), sample=_rows),
    "own streams": Case(
        make=lambda: Chain(*(OwnStreams(8, seed) for seed in range(3))), sample=_rows
    ),
    "changing buffers": Case(make=lambda: Chain(Codebook(8), Codebook(8)), sample=_rows),
    "one norm for all": Case(make=_shared, sample=_rows),
    "everything": Case(make=_everything, sample=_rows),
}


def streams_of(model: nn.Module) -> tuple[Any, ...]:
    """The generators that the model's blocks own, which `checkpoint` must be told of."""
    return tuple(s for m in model.modules() if isinstance(m, OwnStreams) for s in m.streams)


def in_groups(model, x, run):
    """Two regions, each of regions: the chain cut in halves."""
    half = len(model.blocks) // 2
    for part in (model.blocks[:half], model.blocks[half:]):
        x = run(_through, part, x, run)
    return x


def _through(blocks, x, run):
    return functools.reduce(lambda x, block: run(block, x), blocks, x)


MODES = {
    "each block": lambda model, x, run: model(x, run),
    "whole": lambda model, x, run: run(model, x),
    "blocks in the whole": lambda model, x, run: run(model, x, run),
    "blocks in halves": in_groups,
    "three deep": lambda model, x, run: run(lambda x: run(model, x, run), x),
}


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002


def stream_states() -> Told:
    kind, words, place, half, gauss = np.random.get_state()  # noqa: NPY002
    return {
        "torch's stream": torch.get_rng_state(),
        "Python's stream": random.getstate(),
        "NumPy's stream": (kind, tuple(words.tolist()), place, half, gauss),
    }


def left_by(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> Told:
    """Gradients, buffers and streams as they are now, and the given tensors with theirs."""
    told = stream_states()
    for name, parameter in model.named_parameters():
        told[f"gradient of {name}"] = None if parameter.grad is None else parameter.grad.clone()
    for name, buffer in model.named_buffers():
        told[f"buffer {name}"] = None if buffer is None else buffer.clone()
    for name, tensor in tensors:
        told[name] = tensor.detach().clone()
        if tensor.is_leaf and tensor.grad is not None:
            told[f"gradient of {name}"] = tensor.grad.clone()
    for number, stream in enumerate(streams_of(model)):
        told[f"own stream {number}"] = _state(stream)
    return told


def _state(stream):
    if isinstance(stream, torch.Generator):
        return stream.get_state()
    if isinstance(stream, np.random.Generator):
        return repr(stream.bit_generator.state)
    return stream.getstate()


def differing(one: Told, other: Told) -> list[str]:
    """The names under which the two differ by as much as a bit."""
    assert one.keys() == other.keys()
    return [name for name in one if not _same(one[name], other[name])]


def _same(one, other):
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and one == other


def loss_of(output: Tensor) -> Tensor:
    """Depends on every element in its own way, so that no gradient is the same as another."""
    weights = torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype).view_as(output)
    return (output * output * weights).sum()


def checking(model: nn.Module, **keywords: Any) -> Callable[..., Any]:
    return functools.partial(checkpoint, generators=streams_of(model), **keywords)


def step_of(case: Case, mode: str | None, *, backwards: int = 1, **keywords: Any) -> Told:
    """One seeded forward and backward, in the mode, or plain if there is none."""
    seed_all(7)
    model, x = case.make(), case.sample()
    run = checking(model, **keywords)
    output = model(x) if mode is None else MODES[mode](model, x, run)
    loss = loss_of(output)
    for left in reversed(range(backwards)):
        loss.backward(retain_graph=left > 0)
    return left_by(model, [("input", x), ("output", output)])


Pair = collections.namedtuple("Pair", ["first", "second"])  # noqa: PYI024 -- plain, as users have
