"""The models that are made to fit, and what one step of each is. Knows no checkpointing.

All are small enough for a CPU and large where it counts: what a step keeps for its backward is
many times its largest single tensor, so there is something to choose.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from _fitting_nets import CLASSES, GPT, VOCABULARY, ResNet, UNet, ViT


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, a batch for it, and its loss.

    ``sample`` gives what the model is called with: a tuple of arguments or a dict of named ones.
    ``loss`` makes a number of what the model returns; without it the model returns an object whose
    ``loss`` that is. ``blocks`` lists the modules that may be checkpointed, in order of execution;
    ``chained`` if each takes what the one before it returns, and nothing else does. ``random`` if a
    block draws random numbers, so that a replay has to draw the same.
    """

    name: str
    what: str
    make: Callable[[], Any]
    sample: Callable[[], tuple[Any, ...] | dict[str, Any]]
    loss: Callable[[Any], Any] | None
    blocks: Callable[[Any], Sequence[Any]]
    chained: bool = True
    random: bool = False

    def output(self, model: Any, sample: tuple[Any, ...] | dict[str, Any]) -> Any:
        return model(**sample) if isinstance(sample, dict) else model(*sample)

    def step(self, model: Any, sample: tuple[Any, ...] | dict[str, Any]) -> None:
        """Forward and backward, with the output alive until the end, as in a training loop."""
        output = self.output(model, sample)
        loss = output.loss if self.loss is None else self.loss(output)
        loss.backward()


def llama(*, layers: int, width: int, heads: int, length: int) -> Any:
    """Hugging Face's, from a config."""
    from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: PLC0415 -- seconds, for one case

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=8 * width // 3,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=length,
        use_cache=False,
    )
    made: Any = AutoModelForCausalLM
    return made.from_config(config, attn_implementation="sdpa")


def _tokens(batch: int, length: int) -> Any:
    return torch.randint(0, VOCABULARY, (batch, length))


def _images(batch: int, side: int) -> Any:
    return torch.randn(batch, 3, side, side)


def _next_token(guess: Any) -> Any:
    """Against made-up targets: what is to be learnt changes neither time nor bytes."""
    flat = guess[:, :-1].flatten(0, 1)
    return functional.cross_entropy(flat, _targets(len(flat), VOCABULARY))


def _class(guess: Any) -> Any:
    return functional.cross_entropy(guess, _targets(len(guess), CLASSES))


def _targets(count: int, kinds: int) -> Any:
    return torch.arange(count) % kinds


def _mean_square(output: Any) -> Any:
    return output.square().mean()


def _gpt(name: str, *, layers: int, width: int, batch: int, length: int, dropout: float) -> Case:
    drops = f", dropout {dropout:g}" if dropout else ""
    return Case(
        name=name,
        what=f"GPT, {layers} blocks of width {width}, {batch} x {length} tokens{drops}",
        make=lambda: GPT(
            layers=layers, width=width, heads=width // 32, length=length, dropout=dropout
        ),
        sample=lambda: (_tokens(batch, length),),
        loss=_next_token,
        blocks=lambda model: list(model.blocks),
        random=dropout > 0,
    )


def _llama_sample() -> dict[str, Any]:
    tokens = _tokens(2, 256)
    return {"input_ids": tokens, "labels": tokens}


CASES = {
    case.name: case
    for case in (
        _gpt("gpt-12", layers=12, width=256, batch=2, length=256, dropout=0.0),
        _gpt("gpt-12-dropout", layers=12, width=256, batch=2, length=256, dropout=0.1),
        _gpt("gpt-48", layers=48, width=128, batch=2, length=256, dropout=0.0),
        _gpt("gpt-48-thin", layers=48, width=64, batch=2, length=128, dropout=0.0),
        Case(
            name="resnet",
            what="ResNet-50's blocks at a quarter of the width, 8 images of 128 x 128",
            make=lambda: ResNet(width=16),
            sample=lambda: (_images(8, 128),),
            loss=_class,
            blocks=lambda model: [
                *model.layer1,
                *model.layer2,
                *model.layer3,
                *model.layer4,
            ],
        ),
        Case(
            name="unet",
            what="U-Net, 4 levels from width 16, GroupNorm and SiLU, 2 images of 96 x 96",
            make=lambda: UNet(width=16),
            sample=lambda: (_images(2, 96),),
            loss=_mean_square,
            blocks=lambda model: [*model.down, model.bottom, *model.up],
            chained=False,
        ),
        Case(
            name="vit",
            what="ViT, 12 of torch's encoder layers of width 192, 8 images of 64 patches",
            make=lambda: ViT(layers=12, width=192, heads=6, side=64, patch=8),
            sample=lambda: (_images(8, 64),),
            loss=_class,
            blocks=lambda model: list(model.blocks),
        ),
        Case(
            name="llama",
            what="Hugging Face Llama from a config, 12 layers of width 256, 2 x 256 tokens",
            make=lambda: llama(layers=12, width=256, heads=8, length=256),
            sample=_llama_sample,
            loss=None,
            blocks=lambda model: list(model.model.layers),
        ),
    )
}
