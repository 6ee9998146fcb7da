"""A step by an optimizer's own code, a block of all parameters at a time. Knows pairs, and of the
optimizer that it works element by element: so do all but a few of torch's.

What a step is given is a stand-in for the optimizer, whose parameters are parts of masters and
whose state is parts of their state; a number in it, as the count of steps, is copied for each part.
The bits are those of a step that is not cut, and no FP32 copy of all gradients exists. Parameters
that have no state yet, and sparse gradients, are stepped whole.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import nn
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from holdfast.precision._blocked_step import flat_weight
from holdfast.precision._blocks import (
    BLOCK,
    Scratch,
    Span,
    Tensors,
    blocks_of,
    cut,
    flat,
    is_dense,
    laid_as,
    part,
)
from holdfast.precision._gradients import Gradient, Measured, measured
from holdfast.precision._kernels import has_hooks
from holdfast.precision._masters import Pair

State = dict[str, torch.Tensor]
Key = tuple[Any, ...]

_ELEMENTWISE: Final = {
    *(SGD, Adam, AdamW, RMSprop, Adagrad, Adadelta, Adamax, NAdam, RAdam, ASGD, Rprop),
}


def is_parted(inner: Optimizer) -> bool:
    """Whether ``inner`` is one of those that are stepped so. Subclasses may do anything."""
    return (
        type(inner) in _ELEMENTWISE
        and not has_hooks(inner)
        and not any(group.get("differentiable") for group in inner.param_groups)
        and all(
            type(each) in {torch.Tensor, nn.Parameter}
            and each.dtype is torch.float32
            and is_dense(each)
            for group in inner.param_groups
            for each in group["params"]
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Parts of parameters that are stepped together; ``cast`` go into ``weights`` then."""

    spans: tuple[Span, ...]
    masters: Tensors
    states: list[State]
    cast: Tensors
    weights: Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """How some parameters of a group are stepped. The ``numbers`` in their states are copied for
    each part, into ``copies``, and of its last part a parameter gets them back. ``loose`` weights
    lie in memory otherwise than their masters, and are cast when all is done."""

    blocks: list[_Block]
    numbers: Tensors
    copies: Tensors
    last: tuple[Tensors, Tensors]
    loose: list[Pair]


@final
class PartedStep:
    """Steps the masters of one of torch's optimizers that work element by element.

    What it knows of their memory it keeps from step to step, as long as that is the same.
    """

    def __init__(self, inner: Optimizer) -> None:
        self._inner = inner
        self._step = inspect.unwrap(type(inner).step)  # without what is done once for a step
        self._scratch = Scratch()
        self._layouts: dict[Key, tuple[Key, _Layout]] = {}

    def is_right(self) -> bool:
        """Whether the optimizer is still to be stepped this way: hooks may be added at any time."""
        return not has_hooks(self._inner)

    def measure(self, gradients: Sequence[Gradient], pairs: Sequence[Pair]) -> Measured:
        return measured(gradients, pairs, self._scratch)

    def apply(self, gradients: Sequence[Gradient], divisor: float) -> None:
        """Step by what was measured, divided by ``divisor``. Gradients that are FP32 already are
        divided in place."""
        factor = 1 / divisor
        parted: dict[Key, list[Gradient]] = {}
        for each in gradients:
            key = (each.pair.place[0], each.value.device, each.needs_cast, self._is_cut(each))
            parted.setdefault(key, []).append(each)
        try:
            for key, own in parted.items():
                number, _, needs_cast, is_cut = key
                group = self._inner.param_groups[number]
                if is_cut:
                    self._step_parts(group, key, own, factor)
                    continue
                for batch in _batches(own) if needs_cast else [own]:
                    self._step_whole(group, batch, factor)
        except BaseException:
            for each in gradients:  # a weight must never be other than its master
                each.pair.cast()
            raise
        # A scheduler that was made for the optimizer inside looks whether that has stepped.
        self._inner._opt_called = True  # noqa: SLF001

    def _is_cut(self, gradient: Gradient) -> bool:
        """Whether there is something to cast, and state that can be cut. Of nothing there are no
        parts that could count steps."""
        pair = gradient.pair
        if not pair.master.numel():
            return False
        if gradient.is_sparse or not pair.is_split or not is_dense(gradient.value):
            return False
        state = self._inner.state.get(pair.master)
        if not state:
            group = self._inner.param_groups[pair.place[0]]
            return type(self._inner) is SGD and not group["momentum"]  # which never has any
        return all(
            isinstance(value, torch.Tensor)
            and (value.shape == pair.master.shape or not value.dim())
            for value in state.values()
        )

    def _step_whole(
        self, group: Mapping[str, Any], gradients: Sequence[Gradient], factor: float
    ) -> None:
        """Step parameters as they are, with their own state, which may be made now."""
        masters = [each.pair.master for each in gradients]
        values = _whole_values(gradients)
        if factor != 1:
            torch._foreach_mul_([_values(value) for value in values], factor)
        for each, master, value in zip(gradients, masters, values, strict=True):
            if each.pair.is_split or each.is_sparse:
                master.grad = value
            elif value is not master.grad:  # laid out anew
                master.grad.copy_(value)
        try:
            self._run(group, masters, self._inner.state)
        finally:
            for each in gradients:
                if each.pair.is_split:
                    each.pair.master.grad = None
                each.pair.cast()

    def _step_parts(
        self, group: Mapping[str, Any], place: Key, gradients: Sequence[Gradient], factor: float
    ) -> None:
        layout = self._layout(place, [each.pair for each in gradients])
        if layout.copies:  # torch refuses to copy nothing
            torch._foreach_copy_(layout.copies, layout.numbers)
        values = [flat(each.value) for each in gradients]
        spans = [block.spans for block in layout.blocks]
        for block, parts in zip(layout.blocks, cut(values, spans), strict=True):
            own = parts
            if gradients[0].needs_cast:
                own = self._scratch.take(block.spans, parts[0].device)
                torch._foreach_copy_(own, parts)
            if factor != 1:
                torch._foreach_mul_(own, factor)
            self._step_block(group, block, own)
            if block.cast:
                torch._foreach_copy_(block.weights, block.cast)
        if layout.copies:
            torch._foreach_copy_(*layout.last)
        for pair in layout.loose:
            pair.cast()
        for each in gradients:
            each.pair.note()

    def _step_block(self, group: Mapping[str, Any], block: _Block, gradients: Tensors) -> None:
        states = [dict(state) for state in block.states]
        for master, gradient in zip(block.masters, gradients, strict=True):
            master.grad = gradient
        try:
            self._run(group, block.masters, dict(zip(block.masters, states, strict=True)))
        finally:
            for master in block.masters:
                master.grad = None
        for own, after in zip(block.states, states, strict=True):
            for key, value in own.items():
                if after[key] is not value:  # it was not written, but replaced
                    value.copy_(after[key])

    def _run(self, group: Mapping[str, Any], masters: Tensors, state: Mapping[Any, Any]) -> None:
        stand_in = object.__new__(type(self._inner))
        groups = [{**group, "params": masters}]
        vars(stand_in).update(vars(self._inner), param_groups=groups, state=state)
        self._step(stand_in)

    def _layout(self, place: Key, pairs: Sequence[Pair]) -> _Layout:
        states = [self._inner.state.get(pair.master, {}) for pair in pairs]
        for pair, state in zip(pairs, states, strict=True):
            for key, value in state.items():
                if value.shape == pair.master.shape and value.stride() != pair.master.stride():
                    state[key] = laid_as(value, pair.master)
        # Of memory that a layout holds no other tensor can be made: where it lies says what it is.
        key = tuple(
            (id(pair), *(each.data_ptr() for each in (pair.weight, pair.master, *state.values())))
            for pair, state in zip(pairs, states, strict=True)
        )
        known = self._layouts.get(place)
        if known is not None and known[0] == key:
            return known[1]
        layout = _laid_out(pairs, states)
        self._layouts[place] = key, layout
        return layout


def _whole_values(gradients: Sequence[Gradient]) -> Tensors:
    if not gradients[0].needs_cast:
        return [each.value for each in gradients]
    sizes = [each.value.numel() for each in gradients]
    spans = [Span(item=item, start=0, stop=size) for item, size in enumerate(sizes)]
    # Given back after the step: it may be as large as the largest parameter, and is needed once.
    rooms = Scratch().take(spans, gradients[0].value.device)
    found = [
        room.as_strided(master.shape, master.stride(), room.storage_offset())
        for room, master in zip(rooms, (each.pair.master for each in gradients), strict=True)
    ]
    torch._foreach_copy_(found, [each.value for each in gradients])
    return found


def _laid_out(pairs: Sequence[Pair], states: Sequence[State]) -> _Layout:
    masters = [flat(pair.master.detach()) for pair in pairs]
    weights = [flat_weight(pair) for pair in pairs]
    numbers: Tensors = []
    copies: Tensors = []
    last: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def state_of(span: Span) -> State:
        found = {}
        for key, value in states[span.item].items():
            if value.shape == pairs[span.item].master.shape:
                found[key] = part(flat(value), span)
                continue
            found[key] = value.clone()
            numbers.append(value)
            copies.append(found[key])
            last[id(value)] = value, found[key]
        return found

    blocks = []
    for spans in blocks_of(tuple(master.numel() for master in masters)):
        own = [part(masters[span.item], span) for span in spans]
        into = [None if (w := weights[span.item]) is None else part(w, span) for span in spans]
        blocks.append(
            _Block(
                spans=spans,
                masters=own,
                states=[state_of(span) for span in spans],
                cast=[each for each, weight in zip(own, into, strict=True) if weight is not None],
                weights=[weight for weight in into if weight is not None],
            )
        )
    return _Layout(
        blocks=blocks,
        numbers=numbers,
        copies=copies,
        last=([own for own, _ in last.values()], [copy for _, copy in last.values()]),
        loose=[pair for pair, weight in zip(pairs, weights, strict=True) if weight is None],
    )


def _batches(gradients: Iterable[Gradient]) -> Iterator[list[Gradient]]:
    """Small ones together, large ones by themselves."""
    held: list[Gradient] = []
    size = 0
    for each in gradients:
        if held and size + each.value.numel() > BLOCK:
            yield held
            held, size = [], 0
        held.append(each)
        size += each.value.numel()
    if held:
        yield held


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient._values() if gradient.is_sparse else gradient  # noqa: SLF001 -- coalesced
