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

from holdfast.precision._blocks import Scratch, Span, blocks_of, flat
from holdfast.precision._gradients import Gradient, Measured, measured
from holdfast.precision._kernels import Held, Kind, Parts
from holdfast.precision._masters import Pair, local_of
from holdfast.precision._remainder import join_into, split_into

Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Parts of parameters that are stepped together. ``weights`` are to be cast into."""

    spans: tuple[Span, ...]
    masters: list[torch.Tensor]
    held: list[Held]
    weights: list[torch.Tensor | None]
    remainders: list[torch.Tensor | None]


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
            # Nothing of an FP32 weight is cast, so there is no reason to cut it.
            parted.setdefault((group, each.value.device, is_first, each.is_whole), []).append(each)
        for key, own in parted.items():
            group, device, _, is_whole = key
            layout = self._layout(key, own, whole=is_whole)
            scale = None if divisor == 1 else torch.tensor(divisor, device=device)
            self._run(self._inner.param_groups[group], layout, own, scale)
        # A scheduler that was made for the optimizer inside looks whether that has stepped.
        self._inner._opt_called = True  # noqa: SLF001

    def _run(
        self,
        group: dict[str, Any],
        layout: _Layout,
        gradients: Sequence[Gradient],
        divisor: torch.Tensor | None,
    ) -> None:
        if layout.steps:
            torch._foreach_add_(layout.steps, 1)
        values = [flat(each.value) for each in gradients]
        for block in layout.blocks:
            masters = self._taken_masters(block)
            parts = Parts(
                masters=masters,
                gradients=self._taken_gradients(block, values),
                held=block.held,
                divisor=divisor,
            )
            self._kind.run(group, parts)
            for master, weight, remainder in zip(
                masters, block.weights, block.remainders, strict=True
            ):
                if remainder is not None and weight is not None:
                    split_into(master, weight, remainder)
                elif weight is not None:
                    weight.copy_(master)
        for pair in layout.loose:
            pair.weight.copy_(pair.master)

    def _taken_gradients(self, block: _Block, values: list[torch.Tensor]) -> list[torch.Tensor]:
        """FP32 parts of gradients: their own memory, or that of the scratch."""
        found = [
            values[span.item]
            if span.size == len(values[span.item])
            else values[span.item][span.start : span.stop]
            for span in block.spans
        ]
        if all(each.dtype is torch.float32 for each in found):
            return found
        room = self._gradients.take(block.spans, found[0].device)
        return [part.copy_(each) for part, each in zip(room, found, strict=True)]

    def _taken_masters(self, block: _Block) -> list[torch.Tensor]:
        """Parts of masters: their own memory, or that of the scratch."""
        if all(remainder is None for remainder in block.remainders):
            return block.masters
        found = self._masters.take(block.spans, block.masters[0].device)
        for part, upper, remainder in zip(found, block.masters, block.remainders, strict=True):
            # A master's place in the groups is that of the weight, whose bits are its upper ones.
            join_into(part, upper, remainder)
        return found

    def _layout(self, place: Key, gradients: Sequence[Gradient], *, whole: bool) -> _Layout:
        group = self._inner.param_groups[place[0]]
        pairs = [each.pair for each in gradients]
        held = [self._kind.hold(self._inner, group, pair) for pair in pairs]
        # Of memory that a layout holds no other tensor can be made: where it lies says what it is.
        key = tuple(
            (id(pair), *(tensor.data_ptr() for tensor in (pair.weight, pair.master, *each.buffers)))
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
    masters = [flat(local_of(pair.master.detach())) for pair in pairs]
    weights = [_weight(pair) for pair in pairs]
    remainders = [None if pair.remainder is None else flat(pair.remainder) for pair in pairs]
    buffers = [[flat(buffer) for buffer in each.buffers] for each in held]
    sizes = [len(master) for master in masters]
    cuts = blocks_of(sizes, max(1, sum(sizes))) if whole else blocks_of(sizes)
    blocks = [
        _Block(
            spans=spans,
            masters=[masters[span.item][span.start : span.stop] for span in spans],
            held=[
                Held(
                    buffers=tuple(each[span.start : span.stop] for each in buffers[span.item]),
                    step=held[span.item].step,
                    is_first=held[span.item].is_first,
                )
                for span in spans
            ],
            weights=[_part(weights[span.item], span) for span in spans],
            remainders=[_part(remainders[span.item], span) for span in spans],
        )
        for spans in cuts
    ]
    loose = [p for p, weight in zip(pairs, weights, strict=True) if p.is_split and weight is None]
    steps = [each.step for each in held if each.step is not None]
    return _Layout(blocks=blocks, steps=steps, loose=loose)


def _weight(pair: Pair) -> torch.Tensor | None:
    """The weight, flat, if it is to be written and lies in memory as its master does."""
    if not pair.is_split and pair.remainder is None:
        return None
    weight = pair.weight.detach()
    return flat(weight) if weight.stride() == pair.master.stride() else None


def _part(tensor: torch.Tensor | None, span: Span) -> torch.Tensor | None:
    return None if tensor is None else tensor[span.start : span.stop]
