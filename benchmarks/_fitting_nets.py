"""The networks that are made to fit. Knows nothing of what is done with them.

A GPT, a ViT of torch's own encoder layers, ResNet-50's blocks and a U-Net: blocks that are alike
and blocks that are not, in one chain and with skips across it, in place and out of place.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from _gpt import Block

VOCABULARY = 512
CLASSES = 100


class GPT(nn.Module):  # type: ignore[misc]
    def __init__(self, *, layers: int, width: int, heads: int, length: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.last = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Any) -> Any:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))


class ViT(nn.Module):  # type: ignore[misc]
    """Of torch's own encoder layers."""

    def __init__(self, *, layers: int, width: int, heads: int, side: int, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, kernel_size=patch, stride=patch)
        self.places = nn.Parameter(torch.randn(1, (side // patch) ** 2, width) * 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width,
                heads,
                4 * width,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            for _ in range(layers)
        )
        self.last = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Any) -> Any:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x).mean(1))


class Bottleneck(nn.Module):  # type: ignore[misc]
    """ResNet-50's, with the stride in the 3 x 3 convolution."""

    def __init__(self, incoming: int, width: int, stride: int) -> None:
        super().__init__()
        outgoing = 4 * width
        self.conv1 = nn.Conv2d(incoming, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outgoing, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outgoing)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or incoming != outgoing:
            self.downsample = nn.Sequential(
                nn.Conv2d(incoming, outgoing, 1, stride=stride, bias=False),
                nn.BatchNorm2d(outgoing),
            )

    def forward(self, x: Any) -> Any:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


class ResNet(nn.Module):  # type: ignore[misc]
    def __init__(self, *, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        self.layer1 = _bottlenecks(3, width, width, stride=1)
        self.layer2 = _bottlenecks(4, 4 * width, 2 * width, stride=2)
        self.layer3 = _bottlenecks(6, 8 * width, 4 * width, stride=2)
        self.layer4 = _bottlenecks(3, 16 * width, 8 * width, stride=2)
        self.head = nn.Linear(32 * width, CLASSES)

    def forward(self, images: Any) -> Any:
        x = self.layer4(self.layer3(self.layer2(self.layer1(self.stem(images)))))
        return self.head(x.mean((2, 3)))


def _bottlenecks(count: int, incoming: int, width: int, *, stride: int) -> Any:
    first = Bottleneck(incoming, width, stride)
    return nn.Sequential(first, *(Bottleneck(4 * width, width, 1) for _ in range(count - 1)))


class TwoConvolutions(nn.Module):  # type: ignore[misc]
    def __init__(self, incoming: int, outgoing: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(incoming, outgoing, 3, padding=1)
        self.norm1 = nn.GroupNorm(8, outgoing)
        self.conv2 = nn.Conv2d(outgoing, outgoing, 3, padding=1)
        self.norm2 = nn.GroupNorm(8, outgoing)

    def forward(self, x: Any) -> Any:
        x = functional.silu(self.norm1(self.conv1(x)))
        return functional.silu(self.norm2(self.conv2(x)))


class Up(nn.Module):  # type: ignore[misc]
    """Twice the size, joined with what came down at that size."""

    def __init__(self, incoming: int, outgoing: int) -> None:
        super().__init__()
        self.grow = nn.ConvTranspose2d(incoming, outgoing, 2, stride=2)
        self.joined = TwoConvolutions(2 * outgoing, outgoing)
        self.again = TwoConvolutions(outgoing, outgoing)

    def forward(self, x: Any, skip: Any) -> Any:
        return self.again(self.joined(torch.cat((self.grow(x), skip), dim=1)))


class Down(nn.Module):  # type: ignore[misc]
    def __init__(self, incoming: int, outgoing: int) -> None:
        super().__init__()
        self.first = TwoConvolutions(incoming, outgoing)
        self.again = TwoConvolutions(outgoing, outgoing)

    def forward(self, x: Any) -> Any:
        return self.again(self.first(x))


class UNet(nn.Module):  # type: ignore[misc]
    """Four levels down and up again."""

    def __init__(self, *, width: int) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width, 8 * width]
        before = [3, *widths[:-1]]
        self.down = nn.ModuleList(map(Down, before, widths))
        self.bottom = Down(widths[-1], 2 * widths[-1])
        self.up = nn.ModuleList(Up(2 * each, each) for each in reversed(widths))
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, images: Any) -> Any:
        x, skips = images, []
        for down in self.down:
            skips.append(down(x))
            x = functional.max_pool2d(skips[-1], 2)
        x = self.bottom(x)
        for up in self.up:
            x = up(x, skips.pop())
        return self.head(x)
