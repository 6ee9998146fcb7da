"""Small models of the kinds that are trained, for tests of `holdfast.plan`, and what a training
step of each leaves behind, told whole.

Every model returns its own loss. A step is compared bit for bit, as in `activation_models`.
"""

import gc
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from activation_models import GptBlock, Told, left_by, seed_all
from torch import Tensor, nn
from torch.nn import functional

import holdfast
from holdfast.activation import measure_peak


class Gpt(nn.Module):
    """A decoder with dropout, as most are trained."""

    def __init__(self, depth=6, width=64, heads=4, tokens=97, dropout=0.1):
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        self.start = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(GptBlock(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens)

    def forward(self, tokens):
        x = self.start(self.tokens(tokens))
        for block in self.blocks:
            x = block(x)
        scores = self.head(self.norm(x))
        return functional.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Vit(nn.Module):
    """Patches, a class token, pre-norm blocks without dropout."""

    def __init__(self, depth=5, width=64, side=32, patch=4):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, (side // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.Sequential(*(GptBlock(width, 4, 0.0) for _ in range(depth)))
        self.head = nn.Linear(width, 10)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1) + self.places
        return self.head(self.blocks(x)[:, 0]).square().mean()


class Bottleneck(nn.Module):
    """As in torchvision: batch norms, and a ReLU that writes over its input."""

    def __init__(self, channels, wide):
        super().__init__()
        self.conv1 = nn.Conv2d(wide, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, wide, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(wide)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, depth=5, channels=16, wide=48):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, wide, 3, 2, 1), nn.BatchNorm2d(wide), nn.ReLU(inplace=True)
        )
        self.layers = nn.Sequential(*(Bottleneck(channels, wide) for _ in range(depth)))
        self.head = nn.Linear(wide, 10)

    def forward(self, images):
        x = self.layers(self.stem(images))
        return self.head(x.mean((2, 3))).square().mean()


class Twice(nn.Module):
    """Two convolutions with norms, one level of a U-Net."""

    def __init__(self, given, made):
        super().__init__()
        self.one = nn.Conv2d(given, made, 3, padding=1)
        self.norm = nn.GroupNorm(4, made)
        self.two = nn.Conv2d(made, made, 3, padding=1)

    def forward(self, x):
        return functional.silu(self.two(functional.silu(self.norm(self.one(x)))))


class UNet(nn.Module):
    """What goes down is also handed across: the levels are no chain."""

    def __init__(self):
        super().__init__()
        self.down1, self.down2, self.down3 = Twice(3, 16), Twice(16, 32), Twice(32, 64)
        self.up2, self.up1 = Twice(64 + 32, 32), Twice(32 + 16, 16)
        self.out = nn.Conv2d(16, 1, 1)

    def forward(self, images):
        across1 = self.down1(images)
        across2 = self.down2(functional.avg_pool2d(across1, 2))
        x = self.down3(functional.avg_pool2d(across2, 2))
        x = self.up2(torch.cat([functional.interpolate(x, scale_factor=2.0), across2], 1))
        x = self.up1(torch.cat([functional.interpolate(x, scale_factor=2.0), across1], 1))
        return self.out(x).square().mean()


class PostNorm(nn.Module):
    """torch's own encoder, whose layers torch runs by a fast path in eval mode."""

    def __init__(self, depth=5, width=64):
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 7)

    def forward(self, x, mask):
        return self.head(self.encoder(x, mask=mask)).square().mean()


class PairBlock(nn.Module):
    """Hands a pair on, and takes what it needs by keyword alone."""

    def __init__(self, width):
        super().__init__()
        self.mix, self.gate = nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, pair, *, mask, options):
        x, trace = pair
        a, b = self.mix(functional.rms_norm(x, x.shape[-1:])).chunk(2, -1)
        mixed = functional.silu(a) * b * mask
        trace = trace + torch.sigmoid(self.gate(mixed)) * options["scale"]
        return x + functional.dropout(mixed, options["dropout"], self.training), trace


class Pairs(nn.Module):
    def __init__(self, depth=5, width=64):
        super().__init__()
        self.start = nn.Linear(width, width)
        self.blocks = nn.ModuleList(PairBlock(width) for _ in range(depth))

    def forward(self, x, mask):
        pair = self.start(x), torch.zeros_like(x)
        for block in self.blocks:
            pair = block(pair, mask=mask, options={"scale": 0.5, "dropout": 0.1})
        return pair[0].square().mean() + pair[1].square().mean()


class Towers(nn.Module):
    """Two towers of blocks whose results meet, as in CLIP."""

    def __init__(self, depth=3, width=64):
        super().__init__()
        self.left = nn.ModuleList(GptBlock(width, 4, 0.1) for _ in range(depth))
        self.right = nn.ModuleList(GptBlock(width, 2, 0.1) for _ in range(depth))

    def forward(self, left, right):
        for block in self.left:
            left = block(left)
        for block in self.right:
            right = block(right)
        one, other = (
            functional.normalize(left.mean(1), dim=-1),
            functional.normalize(right.mean(1), dim=-1),
        )
        return functional.cross_entropy(one @ other.T * 10, torch.arange(one.shape[0]))


class Llama(nn.Module):
    """Any decoder of Hugging Face, made from a config."""

    def __init__(self):
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        self.inner = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=128,
                hidden_size=64,
                intermediate_size=160,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                use_cache=False,
                attn_implementation="sdpa",
            )
        )

    def forward(self, **batch):
        return self.inner(**batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How a model is made, one batch of it with so many samples, and which stages it has."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    size: int
    shares: tuple[str, ...]  # budgets that can be met
    stages: Sequence[str] | None = None

    def plan(self, model: nn.Module, budget: Any, **keywords: Any) -> holdfast.ActivationPlan:
        return holdfast.plan(
            model, self.batch(self.size), budget, **{"stages": self.stages, **keywords}
        )


def _tokens(most):
    return lambda count: torch.randint(0, most, (count, 64))


def _images(side):
    return lambda count: torch.randn(count, 3, side, side)


def _pairs(count):
    return {"x": torch.randn(count, 64, 64), "mask": (torch.rand(count, 64, 1) < 0.8).float()}


def _encoded(count):
    return torch.randn(count, 48, 64), nn.Transformer.generate_square_subsequent_mask(48)


def _decoded(count):
    tokens = torch.randint(0, 128, (count, 48))
    return {"input_ids": tokens, "labels": tokens.clone()}


def _two(count):
    return [torch.randn(count, 40, 64), torch.randn(count, 24, 64)]


KINDS = {
    "gpt": Kind(make=Gpt, batch=_tokens(97), size=4, shares=("75%", "50%", "35%")),
    "vit": Kind(make=Vit, batch=_images(32), size=4, shares=("50%", "35%")),
    "resnet": Kind(make=ResNet, batch=_images(32), size=4, shares=("75%", "50%")),
    "unet": Kind(make=UNet, batch=_images(32), size=3, stages=("down*", "up*"), shares=("75%",)),
    "post-norm": Kind(make=PostNorm, batch=_encoded, size=5, shares=("50%",)),
    "pairs": Kind(make=Pairs, batch=_pairs, size=6, shares=("50%",)),
    "towers": Kind(make=Towers, batch=_two, size=5, shares=("35%",)),
    "llama": Kind(make=Llama, batch=_decoded, size=5, shares=("60%",)),
}


def output_of(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    output = output_of(model, batch)
    return getattr(output, "loss", output)


def step_left(model: nn.Module, batch: Any, *, seed: int = 11) -> Told:
    """One seeded step: the loss, the gradients, the buffers, the random streams."""
    seed_all(seed)
    loss = loss_of(model, batch)
    loss.backward()
    return left_by(model, [("loss", loss.detach())])


def stood(model: nn.Module) -> Told:
    """All that a model is, as it stands, and the random streams with it."""
    told = left_by(
        model, [(f"value of {name}", each.data) for name, each in model.named_parameters()]
    )
    told["names"] = list(model.state_dict())
    told["modes"] = [each.training for each in model.modules()]
    told["attributes"] = [sorted(each.__dict__) for each in model.modules()]
    told["trained"] = [each.requires_grad for each in model.parameters()]
    return told


def trained(model: nn.Module, batch: Any, steps: int = 3) -> Told:
    """What so many steps of an optimizer leave, the weights and its moments among it."""
    seed_all(11)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        losses.append((f"loss {len(losses)}", loss.detach()))
    moments = [
        (f"moment {number} {key}", value)
        for number, state in enumerate(optimizer.state.values())
        for key, value in state.items()
    ]
    return left_by(model, [*losses, *moments, *((n, p.data) for n, p in model.named_parameters())])


def peak_of(model: nn.Module, batch: Any) -> int:
    """The peak of a step whose gradients are allocated already, as in a loop: with the output
    alive until the end."""

    def step() -> None:
        output = output_of(model, batch)
        getattr(output, "loss", output).backward()

    step()
    return measure_peak(step).peak_bytes


def calm() -> Iterator[None]:
    """For a fixture of a module. One thread: operations are small and many, and on a busy machine
    threads wait for threads. And a plan measures a dozen steps, each of which collects garbage
    first: what is there already need not be looked through every time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")  # which the first checkpoint imports: 100,000 objects
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)
