"""What torch offers to make a model fit: the choices, and how each is put on a model.

A choice says what becomes of every block: it keeps all it saves, it is checkpointed selectively
(the products and convolutions are saved, the rest is computed again), or it is checkpointed whole.
Or the blocks run through ``checkpoint_sequential``. Knows nothing of what a choice costs.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

aten = torch.ops.aten
SAVED = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,  # noqa: SLF001 -- its only name
        aten.convolution.default,
    }
)


class Treatment(IntEnum):
    """Of a block. A higher one keeps less and computes more again."""

    KEEP = 0
    SELECT = 1
    WHOLE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One way to run the blocks. With ``segments`` they go through ``checkpoint_sequential``, and
    ``treatments`` says only which blocks that computes again."""

    label: str
    treatments: tuple[Treatment, ...]
    segments: int = 0

    def does_less_than(self, other: "Choice", *, alike: bool) -> bool:
        """Whether it computes less again, on no block more: then it is no slower, and if both fit
        nobody would take the other. If the blocks are ``alike``, it does not matter on which."""
        if self.segments or other.segments:
            return False
        mine, theirs = self.treatments, other.treatments
        if alike:
            mine, theirs = tuple(sorted(mine)), tuple(sorted(theirs))
        return mine != theirs and all(one <= two for one, two in zip(mine, theirs, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The blocks' numbers, those first that are checkpointed first."""

    name: str
    blocks: tuple[int, ...]


def plain(count: int) -> Choice:
    return Choice(label="save everything", treatments=(Treatment.KEEP,) * count)


def uniform(order: Order, number: int) -> Choice:
    """The first ``number`` blocks of the order checkpointed."""
    label = f"checkpoint, {order.name} {number} of {len(order.blocks)}"
    return _along(order, label, whole=number)


def spaced(count: int, number: int) -> Choice:
    """``number`` of the blocks checkpointed, evenly spaced."""
    chosen = {index * count // number for index in range(number)}
    rest = (index for index in range(count) if index not in chosen)
    order = Order(name="spaced", blocks=(*sorted(chosen), *rest))
    return _along(order, f"checkpoint, {number} of {count} evenly spaced", whole=number)


def sequential(count: int, segments: int) -> Choice:
    """``checkpoint_sequential``, which leaves the last segment as it is."""
    replayed = (segments - 1) * (count // segments)
    return Choice(
        label=f"checkpoint_sequential, {segments} segments",
        treatments=(Treatment.WHOLE,) * replayed + (Treatment.KEEP,) * (count - replayed),
        segments=segments,
    )


def selective(order: Order, whole: int, selected: int) -> Choice:
    """The first ``whole`` blocks of the order checkpointed, the next ``selected`` selectively."""
    label = f"selective on {selected}" + (f" + checkpoint on {whole}" if whole else "")
    label += f" of {len(order.blocks)}, {order.name}"
    return _along(order, label, whole=whole, selected=selected)


def _along(order: Order, label: str, *, whole: int, selected: int = 0) -> Choice:
    treatments = [Treatment.KEEP] * len(order.blocks)
    for place, block in enumerate(order.blocks[: whole + selected]):
        treatments[block] = Treatment.WHOLE if place < whole else Treatment.SELECT
    return Choice(label=label, treatments=tuple(treatments))


def without_selecting(orders: Sequence[Order], *, chained: bool, lines: int) -> list[Choice]:
    """Uniform checkpointing of every number of blocks, and every count of segments; of more than
    four times ``lines`` blocks, some. Of evenly spaced ones there are ``lines`` numbers or so.

    More segments than half the blocks are left out: they checkpoint single blocks, as the first
    so many of the blocks do.
    """
    count = len(orders[0].blocks)
    stride = math.ceil(count / (4 * lines))
    numbers = (*range(1, count, stride), count)
    choices = [uniform(order, number) for order in orders for number in numbers]
    choices += [spaced(count, number) for number in range(2, count, math.ceil(count / lines))]
    if chained:
        choices += [sequential(count, segments) for segments in range(2, count // 2 + 1, stride)]
    return _different(choices)


def with_selecting(orders: Sequence[Order], *, lines: int) -> list[Choice]:
    """Selective on n blocks after m whole ones, for about ``lines`` values of m and of n."""
    count = len(orders[0].blocks)
    marks = [*range(0, count, math.ceil(count / lines)), count]
    return _different(
        [
            selective(order, whole, end - whole)
            for order in orders
            for whole in marks
            for end in marks
            if end > whole
        ]
    )


def _different(choices: Sequence[Choice]) -> list[Choice]:
    """Without those that do the same as an earlier one under another name."""
    found: dict[tuple[object, ...], Choice] = {}
    for choice in choices:
        found.setdefault((choice.treatments, choice.segments), choice)
    return list(found.values())


@contextlib.contextmanager
def put_on(choice: Choice, blocks: Sequence[Any], *, random: bool) -> Iterator[None]:
    """Run ``blocks`` so, until the end of the context. Random states are saved only if a block is
    ``random``: torch is faster without."""
    forwards = [block.forward for block in blocks]
    if choice.segments:
        replaced = _in_segments(forwards, choice.segments, random=random)
    else:
        replaced = [
            _treated(forward, treatment, random=random)
            for forward, treatment in zip(forwards, choice.treatments, strict=True)
        ]
    for block, forward in zip(blocks, replaced, strict=True):
        block.forward = forward
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def _treated(
    forward: Callable[..., Any], treatment: Treatment, *, random: bool
) -> Callable[..., Any]:
    if treatment is Treatment.KEEP:
        return forward
    more = {"context_fn": _selecting} if treatment is Treatment.SELECT else {}
    return functools.partial(
        checkpoint, forward, use_reentrant=False, preserve_rng_state=random, **more
    )


def _selecting() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    saved = operator in SAVED
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def _in_segments(
    forwards: Sequence[Callable[..., Any]], segments: int, *, random: bool
) -> list[Callable[..., Any]]:
    """The first block runs all of them; the others pass on what they are given. What the first is
    given by name, they all get."""

    def run(x: Any, **named: Any) -> Any:
        functions = [functools.partial(forward, **named) for forward in forwards]
        return checkpoint_sequential(
            functions, segments, x, use_reentrant=False, preserve_rng_state=random
        )

    def passed_on(x: Any, **_named: Any) -> Any:
        return x

    return [run, *(passed_on for _ in forwards[1:])]
