"""A training to be saved while it goes on: a small GPT with AdamW, in one process or under DDP.

Knows nothing of checkpoints; says how long something else kept it from stepping.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.distributed._fresh import in_large_pages

Batch = tuple[int, int]
"""Texts at a time, and tokens in each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How large a model is. Its state, three numbers for each parameter, is 12 bytes each."""

    width: int
    layers: int
    tokens: int


class Gpt(nn.Module):  # type: ignore[misc]
    """Blocks as GPT's, without dropout, so that a step takes as long as another."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.tokens, shape.width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                shape.width,
                shape.width // 64,
                4 * shape.width,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            for _ in range(shape.layers)
        )
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.tokens, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        seen = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        hidden = self.embedding(text)
        for block in self.blocks:
            hidden = block(hidden, src_mask=seen, is_causal=True)
        scores: torch.Tensor = self.head(self.norm(hidden))
        return scores


class Training:
    """A model that has made a step, so that all of its state is there."""

    def __init__(self, shape: Shape, *, ranks: int) -> None:
        torch.manual_seed(1)
        self._tokens = shape.tokens
        self.model: nn.Module = Gpt(shape)
        if ranks > 1:
            self.model = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.step((1, 8))

    def step(self, batch: Batch, before_step: Callable[[], None] = lambda: None) -> None:
        """``before_step`` is called when the state is about to change."""
        text = torch.randint(self._tokens, (batch[0], batch[1] + 1))
        scores = self.model(text[:, :-1])
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        before_step()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> dict[str, dict[str, Any]]:
        """What DCP is handed: the same tensors, by the names they have in holdfast."""
        named = {
            name.removeprefix("module."): parameter
            for name, parameter in self.model.named_parameters()
        }
        return {
            "model": {name: parameter.detach() for name, parameter in named.items()},
            "optimizer": {name: self.optimizer.state[value] for name, value in named.items()},
        }

    def flat(self) -> Iterator[torch.Tensor]:
        for parameter in self.model.parameters():
            yield parameter.detach()
            yield from self.optimizer.state[parameter].values()

    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.flat())


class Copy:
    """The plain copy of a state that a save is compared with, into memory that is there."""

    def __init__(self, training: Training) -> None:
        self._pairs = [
            (tensor, in_large_pages(torch.empty_like(tensor))) for tensor in training.flat()
        ]
        self.seconds()

    def seconds(self) -> float:
        began_s = time.perf_counter()
        for source, into in self._pairs:
            into.copy_(source)
        return time.perf_counter() - began_s


class HookTimes:
    """How long steps of optimizers are held up by hooks, between two of its own.

    Torch calls such hooks in the order in which they came: this is to be made before the first save
    in the process, which puts holdfast's in place, and ``close_up`` to be called after it.
    """

    def __init__(self) -> None:
        self._began_s = 0.0
        self._seconds = 0.0
        register_optimizer_step_pre_hook(self._enter)

    def close_up(self) -> None:
        register_optimizer_step_pre_hook(self._leave)

    def take(self) -> float:
        """The seconds since this was last called."""
        taken, self._seconds = self._seconds, 0.0
        return taken

    def _enter(self, *_: object) -> None:
        self._began_s = time.perf_counter()

    def _leave(self, *_: object) -> None:
        self._seconds += time.perf_counter() - self._began_s


class LowRank(nn.Module):  # type: ignore[misc]
    """Layers that stay as they are, each with a few numbers beside it that learn."""

    def __init__(self, *, width: int, layers: int, rank: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.base = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.base.requires_grad_(requires_grad=False)
        self.down = nn.ParameterList(torch.randn(rank, width) / width for _ in range(layers))
        self.up = nn.ParameterList(torch.zeros(width, rank) for _ in range(layers))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            hidden = hidden + torch.tanh(base(hidden) + hidden @ down.T @ up.T)
        return hidden
