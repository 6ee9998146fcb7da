"""The chain of a step whose stages are larger or smaller than the sample's. Pure.

What a stage saves is known. What lives besides, while it runs forward or backward, is not: it is
taken to grow as whatever the stage saves that grew most, and never to shrink, for the gradients of
weights do not. The same holds for what lies outside the stages, which is taken to grow as the
largest input of a stage.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from holdfast.activation._planning.seen import Recipes
from holdfast.activation._planning.sizes import Growth
from holdfast.activation._solving.chain import MOST_BYTES, Chain, Option, Stage


def grown(chain: Chain, growths: Sequence[Growth], recipes: Sequence[Recipes | None]) -> Chain:
    """``chain`` with each stage grown, and what recipes free of it."""
    outside = max(1.0, *(each.given for each in growths))
    # What a stage leaves besides what it saved is what the next one is given.
    left = [
        max(each.given, after.given)
        for each, after in zip(growths, [*growths[1:], growths[-1]], strict=True)
    ]
    return Chain(
        stages=tuple(map(_stage, chain.stages, growths, left, recipes)),
        base_bytes=_bytes(chain.base_bytes * outside),
        head_bytes=_bytes(chain.head_bytes * outside),
    )


def _stage(stage: Stage, growth: Growth, left: float, recipes: Recipes | None) -> Stage:
    keep = stage.keep.kept_bytes
    saved = max(0, keep - stage.input_bytes)
    keep_now = min(stage.input_bytes, keep) * left + saved * growth.saved
    most = max(growth.most, left)

    def level(then: int, kept: int, kept_now: float) -> int:
        """What lives at most, of which ``kept`` is what the stage keeps."""
        held = min(then, kept)
        return _bytes(min(held * most, kept_now) + (then - held) * max(1.0, most))

    def option(each: Option) -> Option:
        if each.dropped and recipes is not None:
            freed = sum(recipes.made[item].freed_bytes * growth.made[item] for item in each.dropped)
            kept_now = max(0.0, keep_now - freed)
        elif each is stage.keep:
            kept_now = keep_now
        else:
            kept_now = min(each.kept_bytes * most, keep_now)
        return replace(
            each,
            kept_bytes=_bytes(kept_now),
            backward_bytes=level(each.backward_bytes, each.kept_bytes, kept_now),
            extra_s=each.extra_s * growth.saved,
        )

    return replace(
        stage,
        options=tuple(map(option, stage.options)),
        input_bytes=_bytes(stage.input_bytes * left),
        output_bytes=_bytes(stage.output_bytes * left),
        forward_s=stage.forward_s * growth.saved,
        forward_bytes=level(stage.forward_bytes, keep, keep_now),
        replayed_bytes=level(stage.replayed_bytes, keep, keep_now),
    )


def _bytes(count: float) -> int:
    """More than a chain counts is as much as it counts: neither fits."""
    return math.ceil(min(count, MOST_BYTES))
