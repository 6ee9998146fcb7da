"""The gradients of a step and their norm, whose one reduction is the test for overflow too. Knows
no optimizer.

Norms are summed in FP32, which 16-bit gradients can overflow only if they are BF16 and of 1e19 and
more: if the norm is not finite, each gradient is looked at, and if all of them are finite they are
summed again in FP64. Gradients that ranks share out are summed over their meshes, so that all ranks
come to the same norm and do the same.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch.distributed.tensor import DTensor

from holdfast.precision._blocks import Scratch, blocks_of, cut, flat, is_dense, laid_as
from holdfast.precision._masters import NARROW, Pair, is_finite, local_of
from holdfast.precision._meshes import Sharing, any_of, sharing_of, sum_of

_LARGEST: Final = float(torch.finfo(torch.float32).max)
_ROW: Final = 4096
_LEAST: Final = 1e-6  # which torch's clip_grad_norm_ adds to a norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """A gradient as it was found: this rank's part, laid out in memory as the master is."""

    pair: Pair
    value: torch.Tensor

    @property
    def is_sparse(self) -> bool:
        return bool(self.value.is_sparse)

    @property
    def is_whole(self) -> bool:
        """Whether neither it nor the master is to be cast."""
        no_cast = self.value.dtype is torch.float32
        return no_cast and not self.pair.is_split and self.pair.remainder is None

    @property
    def needs_cast(self) -> bool:
        """Whether it is dense and 16-bit."""
        return not self.is_sparse and self.value.dtype in NARROW


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The norm of all gradients as they are, and whose are not finite."""

    norm: float
    nonfinite: tuple[str, ...] = ()

    @property
    def is_overflow(self) -> bool:
        return not math.isfinite(self.norm)


def gradients_of(
    pairs: Iterable[Pair], given: Callable[[Pair], torch.Tensor | None]
) -> list[Gradient]:
    """Of the pairs that are ``given`` one. Sparse ones are FP32 and coalesced."""
    found = []
    for pair in pairs:
        value = given(pair)
        if value is None:
            continue
        if type(value) is torch.Tensor and value.is_contiguous() and pair.master.is_contiguous():
            found.append(Gradient(pair=pair, value=value))  # as nearly all are
            continue
        if isinstance(value, DTensor) and value.placements != pair.weight.placements:
            value = value.redistribute(placements=pair.weight.placements)
        value = local_of(value)
        if value.is_sparse:
            # Of FP16, rows that are added up could overflow though their sum would not.
            value = value.float().coalesce()
        else:
            master = local_of(pair.master)
            value = laid_as(value, master) if is_dense(master) else value
        found.append(Gradient(pair=pair, value=value))
    return found


def measured(
    gradients: Sequence[Gradient],
    pairs: Sequence[Pair],
    scratch: Scratch,
) -> Measured:
    """The norm of gradients. ``pairs`` are all there are, on every rank the same."""
    sharings = dict.fromkeys(sharing_of(pair.weight) for pair in pairs)
    norms: dict[Sharing | None, list[torch.Tensor]] = {key: [] for key in sharings}
    norms.setdefault(None, []).extend(_cast_norms(gradients, scratch))
    for each in gradients:
        if not each.needs_cast:
            norm = torch.linalg.vector_norm(_values(each))
            norms[sharing_of(each.pair.weight)].append(norm)
    norm = _total(norms)
    if math.isfinite(norm):
        return Measured(norm=norm)
    bad = {id(each.pair) for each in gradients if not is_finite(_values(each))}
    flags = any_of([id(pair) in bad for pair in pairs], [key for key in norms if key is not None])
    if any(flags):
        named = tuple(pair.name for pair, flag in zip(pairs, flags, strict=True) if flag)
        return Measured(norm=norm, nonfinite=named)
    norms = {key: [] for key in norms}
    for each in gradients:
        values = _values(each)
        wide = torch.complex128 if values.is_complex() else torch.float64
        again = torch.linalg.vector_norm(values, dtype=wide)
        norms[sharing_of(each.pair.weight)].append(again)
    return Measured(norm=_total(norms))


def divisor_of(norm: float, scale: float, most: float | None) -> float:
    """What gradients of this norm are to be divided by: the loss scale and the clipping, as one
    factor."""
    clipping = 1.0 if most is None else max(1.0, (norm / scale + _LEAST) / most)
    return min(scale * clipping, _LARGEST)


def _cast_norms(gradients: Sequence[Gradient], scratch: Scratch) -> list[torch.Tensor]:
    norms = []
    for device in dict.fromkeys(each.value.device for each in gradients):
        cast = [each.value for each in gradients if each.needs_cast and each.value.device == device]
        # One that is not dense has no order in memory to be cut in.
        norms += [torch.linalg.vector_norm(each.float()) for each in cast if not is_dense(each)]
        sources = [flat(each) for each in cast if is_dense(each)]
        blocks = blocks_of(tuple(source.numel() for source in sources))
        for spans, parts in zip(blocks, cut(sources, blocks), strict=True):
            torch._foreach_copy_(scratch.take(spans, device), parts)
            norms += _norms(scratch.all(sum(span.size for span in spans), device))
    return norms


def _norms(values: torch.Tensor) -> list[torch.Tensor]:
    """The norms of rows of values, as one row is reduced by one thread alone."""
    size = values.numel()
    whole = size - size % _ROW
    if not whole:
        return [torch.linalg.vector_norm(values)]
    found = [torch.linalg.vector_norm(values[:whole].view(-1, _ROW), dim=1)]
    return found if whole == size else [*found, torch.linalg.vector_norm(values[whole:])]


def _total(norms: dict[Sharing | None, list[torch.Tensor]]) -> float:
    """The norm of norms. The one number of a step that is read, and so waited for."""
    total = torch.zeros((), dtype=torch.float64, device="cpu")
    for sharing, held in norms.items():
        square = torch.zeros((), dtype=torch.float64, device="cpu")
        for device in dict.fromkeys(each.device for each in held):
            here = torch.cat([each.view(-1) for each in held if each.device == device])
            # FP64 from here on: the square of an FP32 norm may be no FP32 number.
            square = square.to(device) + here.double().square().sum()
        square = square if sharing is None else sum_of(square, sharing)
        total = total.to(square.device) + square
    found = float(total)
    return math.sqrt(found) if found >= 0 else math.nan


def _values(gradient: Gradient) -> torch.Tensor:
    if gradient.is_sparse:
        return gradient.value._values()  # noqa: SLF001 -- it is coalesced
    return gradient.value
