"""A character GPT in BF16, and the text it learns. Knows no rank and no checkpoint."""

import importlib.resources
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from holdfast.cli._demonstration.jobs import PARTS, Size


def sonnets() -> str:
    """Sonnets of William Shakespeare, 1609."""
    return importlib.resources.files(__package__).joinpath("sonnets.txt").read_text("utf-8")


class Text:
    """The sonnets as numbers. A part of a batch depends on its step and its number alone."""

    def __init__(self, size: Size) -> None:
        text = sonnets()
        self.letters = sorted(set(text))
        self.length = len(text)
        place = {letter: number for number, letter in enumerate(self.letters)}
        self._all = torch.tensor([place[letter] for letter in text])
        self._size = size

    def part(self, step: int, number: int) -> tuple[Any, Any]:
        """Letters, and for each of them the one that follows it."""
        context = self._size.context
        random = torch.Generator().manual_seed(step * PARTS + number)
        starts = torch.randint(self.length - context, (self._size.rows, 1), generator=random)
        places = starts + torch.arange(context)
        return self._all[places], self._all[places + 1]


class Linear(nn.Linear):  # type: ignore[misc]  # torch is Any here
    """BF16 in, BF16 out, and FP32 for the sums between, as a GPU has it. A CPU's own BF16 products
    are slow where it has no units for them, and round otherwise where it has."""

    def forward(self, x: Any) -> Any:
        return functional.linear(x.float(), self.weight.float()).to(x.dtype)


class Block(nn.Module):  # type: ignore[misc]  # torch is Any here
    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = Linear(width, 3 * width, bias=False), Linear(width, width, bias=False)
        self.up = Linear(width, 4 * width, bias=False)
        self.down = Linear(4 * width, width, bias=False)
        future = torch.ones(size.context, size.context, dtype=torch.bool).triu(1)
        self.register_buffer("future", future, persistent=False)

    def forward(self, x: Any) -> Any:
        x = x + self.out(self._mixed(self.norm_1(x)))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))

    def _mixed(self, x: Any) -> Any:
        rows, context, width = x.shape
        heads = self.qkv(x).view(rows, context, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4).float()
        scores = q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5
        mixed = scores.masked_fill(self.future, float("-inf")).softmax(-1) @ v
        return mixed.transpose(1, 2).reshape(rows, context, width).to(x.dtype)


class CharacterGPT(nn.Module):  # type: ignore[misc]  # torch is Any here
    def __init__(self, size: Size, letters: int) -> None:
        super().__init__()
        self.letter = nn.Embedding(letters, size.width)
        self.place = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.blocks))
        self.norm = nn.LayerNorm(size.width)
        self.head = Linear(size.width, letters, bias=False)
        for module in self.modules():
            # Smaller embeddings make one step of the first dozen leap.
            if isinstance(module, nn.Embedding | nn.Linear):
                std = 0.3 if isinstance(module, nn.Embedding) else 0.02
                nn.init.normal_(module.weight, std=std)

    def forward(self, letters: Any) -> Any:
        x = self.letter(letters) + self.place.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(logits: Any, wanted: Any) -> Any:
    return functional.cross_entropy(logits.float().flatten(0, 1), wanted.flatten())
