"""A small GPT whose blocks are called through a function of the caller's choice."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.before_attention = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.before_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        parts = self.attention(self.before_attention(x))
        parts = parts.view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        seen = self.merge(seen.transpose(1, 2).reshape(batch, length, width))
        x = x + functional.dropout(seen, self.dropout, self.training)
        hidden = self.down(functional.gelu(self.up(self.before_mlp(x))))
        return x + functional.dropout(hidden, self.dropout, self.training)


class GPT(nn.Module):  # type: ignore[misc]
    """Predicts the next token; ``forward`` gives the loss."""

    def __init__(
        self, *, layers: int, width: int, heads: int, vocabulary: int, length: int, dropout: float
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.last = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Any, call: Callable[..., Any]) -> Any:
        """``call(block, x)`` runs each block: a checkpoint function, or just the call."""
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = call(block, x)
        guess = self.head(self.last(x))
        return functional.cross_entropy(guess[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
