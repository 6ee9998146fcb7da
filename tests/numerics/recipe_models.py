"""Blocks of the models people train, small: each a module and what it is given."""

import torch
from activation_models import GptBlock
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding


def tokens():
    return torch.randn(2, 12, 32)


def image():
    return torch.randn(2, 8, 12, 12)


class Llama(nn.Module):
    """A decoder layer of Hugging Face's, with the rotary embedding it is given."""

    def __init__(self):
        super().__init__()
        config = LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            vocab_size=11,
            attn_implementation="sdpa",
        )
        self.rotary = LlamaRotaryEmbedding(config)
        self.layer = LlamaDecoderLayer(config, layer_idx=0)

    def forward(self, x):
        places = torch.arange(x.shape[1])[None]
        return self.layer(x, position_embeddings=self.rotary(x, places), position_ids=places)


class Bottleneck(nn.Module):
    def __init__(self, channels=8, inner=4):
        super().__init__()
        self.convs = nn.ModuleList(
            [
                nn.Conv2d(channels, inner, 1, bias=False),
                nn.Conv2d(inner, inner, 3, padding=1, bias=False),
                nn.Conv2d(inner, channels, 1, bias=False),
            ]
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(conv.out_channels) for conv in self.convs)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = x
        for number, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            out = norm(conv(out))
            if number < 2:
                out = self.relu(out)
        out += x
        return self.relu(out)


class UNetBlock(nn.Module):
    def __init__(self, channels=8):
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(2, channels), nn.SiLU())
        self.down = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        self.second = nn.Sequential(nn.GroupNorm(4, channels), nn.SiLU(), nn.Dropout(0.1))
        self.up = nn.ConvTranspose2d(channels, channels, 2, stride=2)
        self.merge = nn.Conv2d(3 * channels, channels, 1)

    def forward(self, x):
        small = self.down(self.first(x))
        inner = self.second(small)
        again = functional.interpolate(small, scale_factor=2, mode="bilinear")
        return x + self.merge(torch.cat([x, self.up(inner), again], 1))


class VitBlock(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.before = nn.LayerNorm(width, eps=1e-6)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.after = nn.LayerNorm(width, eps=1e-6)
        self.inner = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x):
        y = self.before(x)
        mixed, weights = self.attention(y, y, y, need_weights=True)
        x = x + self.scale * mixed
        return x + self.inner(self.after(x)), weights


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3)
        self.slope = nn.PReLU(8)

    def forward(self, x):
        x = functional.max_pool2d(functional.relu(self.one(x)), 2)
        x = functional.avg_pool2d(functional.leaky_relu(self.two(x), 0.1), 2)
        return functional.adaptive_avg_pool2d(self.slope(x), 1).flatten(1)


class Recurrent(nn.Module):
    """A cell of its own, over a sequence."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell(32, 32)

    def forward(self, x):
        state, states = torch.zeros(x.shape[0], 32), []
        for part in x.unbind(1):
            state = self.cell(part, state)
            states.append(state)
        return torch.stack(states, 1)


class Lora(nn.Module):
    """Frozen but for what was added."""

    def __init__(self, width=32):
        super().__init__()
        self.norm = nn.LayerNorm(width).requires_grad_(False)
        self.up = nn.Linear(width, 64, bias=False).requires_grad_(False)
        self.down = nn.Linear(64, width).requires_grad_(False)
        self.added = nn.ParameterList([nn.Parameter(torch.randn(width, 4)), torch.randn(4, 64)])

    def forward(self, x):
        y = self.norm(x)
        inner = self.up(y) + (y @ self.added[0]) @ self.added[1] * 0.5
        return x + self.down(functional.silu(inner))


class Tied(nn.Module):
    """One weight, used twice and the other way round."""

    def __init__(self, width=32):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, width) / 8)

    def forward(self, x):
        x = torch.tanh(functional.linear(x, self.weight)) @ self.weight
        return torch.tanh(functional.linear(x, self.weight)) @ self.weight


class Parts(nn.Module):
    """Views of the input, and several outputs in a dict."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        one, other = x.chunk(2, -1)
        gated = torch.sigmoid(one) * torch.tanh(self.linear(other))
        return {"gated": gated, "rest": [other.exp() * gated, gated.softmax(-1).transpose(0, 1)]}


BLOCKS = {
    "gpt": (lambda: GptBlock(32, 4, 0.0), tokens),
    "gpt with dropout": (lambda: GptBlock(32, 4, 0.2), tokens),
    "post-norm transformer": (
        lambda: nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True),
        tokens,
    ),
    "pre-norm transformer": (
        lambda: nn.TransformerEncoderLayer(32, 4, 64, activation="gelu", norm_first=True),
        tokens,
    ),
    "llama": (Llama, tokens),
    "resnet bottleneck": (Bottleneck, image),
    "resnet bottleneck, channels last": (
        lambda: Bottleneck().to(memory_format=torch.channels_last),
        lambda: image().contiguous(memory_format=torch.channels_last),
    ),
    "resnet bottleneck in eval": (lambda: Bottleneck().eval(), image),
    "u-net": (UNetBlock, image),
    "vit": (VitBlock, tokens),
    "pooled convolutions": (Pooled, image),
    "tanh": (
        lambda: nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh()),
        tokens,
    ),
    "rnn cell": (lambda: Recurrent(nn.RNNCell), tokens),
    "gru cell": (lambda: Recurrent(nn.GRUCell), tokens),
    "lora": (Lora, tokens),
    "tied": (Tied, tokens),
    "parts": (Parts, tokens),
}
