"""A step in which a block of gradients is cast, stepped and cast back while it is in the cache.

Knows pairs and kernels. There is no FP32 copy of the gradients: with Adam 16 bytes are held per
parameter (2 of weight, 2 of gradient, 4 of master, 8 of moments), and with remainders 14. Its bits
are those of a step that is not cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.optim import Optimizer

from holdfast.precision._blocks import (
    FUSED_BLOCK,
    Scratch,
    Span,
    Tensors,
    blocks_of,
    cut,
    flat,
    laid_as,
    part,
)
from holdfast.precision._gradients import Gradient, Measured, measured
from holdfast.precision._kernels import Held, Kernel, Kind, has_hooks
from holdfast.precision._masters import Pair, local_of
from holdfast.precision._remainder import join_into, split_into

Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Parts of parameters that are stepped together. ``cast``: which masters go into which
    ``weights``; with remainders all of them do, in parts."""

    spans: tuple[Span, ...]
    masters: Tensors
    held: list[Held]
    cast: Tensors
    weights: Tensors
    remainders: Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """How some parameters of a group are stepped. ``steps`` count it. ``loose`` weights lie in
    memory otherwise than their masters, and are cast when all is done."""

    blocks: list[_Block]
    steps: list[torch.Tensor]
    loose: list[Pair]


@final
class BlockedStep:
    """Steps the parameters of an optimizer that has a kernel.

    What it knows of their memory it keeps from step to step, as long as that is the same.
    """

    def __init__(self, inner: Optimizer, kind: Kind) -> None:
        self._inner = inner
        self._kind = kind
        self._gradients = Scratch()
        self._masters = Scratch()
        self._layouts: dict[Key, tuple[Key, _Layout]] = {}

    def is_right(self) -> bool:
        """Whether the optimizer is still to be stepped this way: hooks may be added at any time."""
        return not has_hooks(self._inner)

    def measure(self, gradients: Sequence[Gradient], pairs: Sequence[Pair]) -> Measured:
        for each in gradients:
            if each.is_sparse:
                raise RuntimeError(
                    f"the gradient of {each.pair.name!r} is sparse, which the fused "
                    f"{type(self._inner).__name__} does not take; use SparseAdam, or SGD with "
                    "fused=False. Nothing was changed."
                )
        return measured(gradients, pairs, self._gradients)

    def apply(self, gradients: Sequence[Gradient], divisor: float) -> None:
        """Step by gradients that are to be divided by ``divisor`` first. Those that are FP32
        already are divided in place."""
        parted: dict[Key, list[Gradient]] = {}
        for each in gradients:
            group = each.pair.place[0]
            is_first = self._kind.is_first(self._inner, self._inner.param_groups[group], each.pair)
            left = each.pair.remainder is not None
            # Nothing of an FP32 weight is cast, so there is no reason to cut it.
            key = (group, each.value.device, is_first, left, each.is_whole)
            parted.setdefault(key, []).append(each)
        try:
            for key, own in parted.items():
                group, device, *_, is_whole = key
                layout = self._layout(key, own, whole=is_whole)
                scale = None
                if divisor != 1:
                    scale = torch.tensor(divisor, dtype=torch.float32, device=device)
                self._run(self._kind.kernel(self._inner.param_groups[group], scale), layout, own)
        except BaseException:
            for each in gradients:  # a weight must never be other than its master
                each.pair.cast()
            raise
        for each in gradients:
            each.pair.note()
        # A scheduler that was made for the optimizer inside looks whether that has stepped.
        self._inner._opt_called = True  # noqa: SLF001

    def _run(self, kernel: Kernel, layout: _Layout, gradients: Sequence[Gradient]) -> None:
        if layout.steps:
            torch._foreach_add_(layout.steps, 1)
        values = [flat(each.value) for each in gradients]
        spans = [block.spans for block in layout.blocks]
        for block, own in zip(layout.blocks, cut(values, spans), strict=True):
            masters = self._masters_of(block)
            kernel(masters, self._cast(block.spans, own), block.held)
            if block.remainders:
                for each in zip(masters, block.weights, block.remainders, strict=True):
                    split_into(*each)
            elif block.cast:  # torch refuses to copy nothing
                torch._foreach_copy_(block.weights, block.cast)
        for pair in layout.loose:
            pair.cast()

    def _cast(self, spans: Sequence[Span], gradients: Tensors) -> Tensors:
        """FP32 parts of gradients: their own memory, or that of the scratch."""
        if all(each.dtype is torch.float32 for each in gradients):
            return gradients
        room = self._gradients.take(spans, gradients[0].device)
        torch._foreach_copy_(room, gradients)
        return room

    def _masters_of(self, block: _Block) -> Tensors:
        """FP32 parts of masters: their own memory, or that of the scratch."""
        if not block.remainders:
            return block.masters
        found = self._masters.take(block.spans, block.masters[0].device)
        for into, upper, remainder in zip(found, block.masters, block.remainders, strict=True):
            # A master's place in the groups is that of the weight, whose bits are its upper ones.
            join_into(into, upper, remainder)
        return found

    def _layout(self, place: Key, gradients: Sequence[Gradient], *, whole: bool) -> _Layout:
        group = self._inner.param_groups[place[0]]
        pairs = [each.pair for each in gradients]
        held = [self._kind.hold(self._inner, group, pair) for pair in pairs]
        # Of memory that a layout holds no other tensor can be made: where it lies says what it is.
        key = tuple(
            (id(pair), *(tensor.data_ptr() for tensor in (pair.weight, pair.master, *each.tensors)))
            for pair, each in zip(pairs, held, strict=True)
        )
        known = self._layouts.get(place)
        if known is not None and known[0] == key:
            return known[1]
        layout = _laid_out(pairs, held, whole=whole)
        if not any(each.is_first for each in held):
            self._layouts[place] = key, layout
        return layout


def _laid_out(pairs: Sequence[Pair], held: Sequence[Held], *, whole: bool) -> _Layout:
    for pair in pairs:
        if pair.remainder is not None:  # the weight may have been laid out anew
            pair.remainder = laid_as(pair.remainder, pair.weight)
    masters = [flat(local_of(pair.master.detach())) for pair in pairs]
    sizes = tuple(master.numel() for master in masters)
    blocks = blocks_of(sizes, max(1, sum(sizes)) if whole else FUSED_BLOCK)
    weights = [flat_weight(pair) for pair in pairs]
    return _Layout(
        blocks=[_block(spans, pairs, masters, held, weights) for spans in blocks],
        steps=[each.step for each in held if each.step is not None],
        loose=[
            p for p, weight in zip(pairs, weights, strict=True) if p.is_split and weight is None
        ],
    )


def _block(
    spans: tuple[Span, ...],
    pairs: Sequence[Pair],
    masters: Sequence[torch.Tensor],
    held: Sequence[Held],
    weights: Sequence[torch.Tensor | None],
) -> _Block:
    own = [part(masters[span.item], span) for span in spans]
    into = [None if (w := weights[span.item]) is None else part(w, span) for span in spans]
    left = [pairs[span.item].remainder for span in spans]
    return _Block(
        spans=spans,
        masters=own,
        held=[_held(held[span.item], span) for span in spans],
        cast=[part for part, weight in zip(own, into, strict=True) if weight is not None],
        weights=[weight for weight in into if weight is not None],
        remainders=[part(flat(e), s) for e, s in zip(left, spans, strict=True) if e is not None],
    )


def _held(held: Held, span: Span) -> Held:
    parts = tuple(part(flat(each), span) for each in held.buffers)
    return Held(buffers=parts, step=held.step, is_first=held.is_first)


def flat_weight(pair: Pair) -> torch.Tensor | None:
    """The weight, flat, if it is to be written and lies in memory as its master does."""
    if not pair.is_split and pair.remainder is None:
        return None
    weight = pair.weight.detach()
    return flat(weight) if weight.stride() == pair.master.stride() else None
