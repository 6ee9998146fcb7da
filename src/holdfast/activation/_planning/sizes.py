"""How large a stage's call is, and how many times as large as the sample's. Reads calls and
regions; decides nothing."""

import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.activation._layers.layer_forward import Arguments
from holdfast.activation._regions.region import Region
from holdfast.activation._storages import memory_bytes

Shapes = tuple[tuple[int, ...], ...]
"""The shapes of the tensors that a call is given."""

Key = tuple[tuple[int, ...], ...]
"""What calls of about one size have in common."""

BUCKET = 1.125
"""Lengths whose ratio to the sample's differs by less than this factor have one key."""

_EMPTY = -(1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A call of a stage: the shapes it was given, how many numbers are in the tensor that it works
    on, what autograd would hold on its account, and the bytes of every tensor that it saved, in
    order."""

    shapes: Shapes
    numel: int
    dropped_bytes: int
    saved: tuple[int, ...]

    def __post_init__(self) -> None:
        counts = [self.numel, self.dropped_bytes, *self.saved]
        for shape in self.shapes:
            counts += shape
        if min(counts) < 0 or max(counts) >= 1 << 63:
            raise ValueError("a size is made of numbers of 63 bits that are not below 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """How many times as large as at the sample's shapes are: what a stage works on (``given``), all
    that it saves (``saved``), whatever grew most (``most``), and at least, each of the storages
    that recipes make again (``made``)."""

    given: float
    saved: float
    most: float
    made: tuple[float, ...]

    def covers(self, other: "Growth") -> bool:
        """Whether what is decided for this is safe for the other."""
        return self.given >= other.given and self.saved >= other.saved and self.most >= other.most

    def joined(self, other: "Growth") -> "Growth":
        """One that covers both."""
        if other.covers(self):
            return other
        if self.covers(other):
            return self
        return Growth(
            given=max(self.given, other.given),
            saved=max(self.saved, other.saved),
            most=max(self.most, other.most),
            made=tuple(map(min, self.made, other.made)),
        )


def even(factor: float, count: int) -> Growth:
    """All of it alike, with ``count`` storages that recipes make again."""
    return Growth(given=factor, saved=factor, most=factor, made=(factor,) * count)


def growth_of(
    sample: Size, met: Size, made_bytes: Sequence[int], constants: Collection[int] = ()
) -> Growth:
    """From the sample's call to another. ``made_bytes``: the sizes, at the sample, of the storages
    that recipes make again; ``constants``: the numbers of elements of what does not grow, as
    parameters."""
    given = _ratio(met.numel, sample.numel)
    saved = _ratio(met.dropped_bytes, sample.dropped_bytes, given)
    if len(met.saved) != len(sample.saved):
        # Another graph. Its recipes may not fit it, and are not counted on.
        most = max(given, saved)
        return Growth(given=given, saved=saved, most=most, made=(0.0,) * len(made_bytes))
    fixed = {count * width for count in constants for width in (1, 2, 4, 8)}
    ratios = [
        (then, now / then)
        for now, then in zip(met.saved, sample.saved, strict=True)
        if then and not (now == then and then in fixed)
    ]
    by_size: dict[int, float] = {}
    for then, ratio in ratios:
        by_size[then] = min(ratio, by_size.get(then, ratio))
    factors = [given, saved, *by_size.values()]
    return Growth(
        given=given,
        saved=saved,
        most=max([given, saved, *(ratio for _, ratio in ratios)]),
        made=tuple(by_size.get(each, min(factors)) for each in made_bytes),
    )


def size_of(call: Arguments, region: Region) -> Size:
    """Of a call that was run as ``region``."""
    return Size(
        shapes=tuple(map(tuple, shapes_of(call))),
        numel=numel_of(call),
        dropped_bytes=region.dropped_bytes(),
        saved=tuple(_bytes(shape, dtype) for shape, dtype, _ in region.described),
    )


def _bytes(shape: Any, dtype: Any) -> int:
    """0 for a tensor with rows of their own lengths, whose shape does not tell."""
    if not all(isinstance(length, int) for length in shape):
        return 0
    return int(shape.numel()) * int(dtype.itemsize)


def shapes_of(call: Arguments) -> Shapes:
    return tuple([_nested(each) if each.is_nested else each.shape for each in _tensors(call)])


def _nested(tensor: Any) -> tuple[int, ...]:
    """In place of a shape that is no row of numbers."""
    return (memory_bytes(tensor),)


def numel_of(call: Arguments) -> int:
    """Of the tensor that a call works on: the first that needs gradients, or if none does, the
    largest."""
    tensors = _tensors(call)
    for each in tensors:
        if each.requires_grad:
            return _numel(each)
    return max(map(_numel, tensors), default=0)


def _numel(tensor: Any) -> int:
    if tensor.is_nested:
        return memory_bytes(tensor) // int(tensor.dtype.itemsize)
    return int(tensor.numel())


def _tensors(call: Arguments) -> list[Any]:
    """In the order in which they are given. Called for every stage of every step."""
    args, kwargs = call
    found: list[Any] = []
    _collect(args, found)
    if kwargs:
        _collect(kwargs.values(), found)
    return found


def _collect(items: Any, found: list[Any]) -> None:
    for item in items:
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, list | tuple):
            _collect(item, found)
        elif isinstance(item, dict):
            _collect(item.values(), found)
        elif (fields := getattr(type(item), "__dataclass_fields__", None)) is not None:
            _collect([getattr(item, name, None) for name in fields], found)


def key_of(sample: Shapes, shapes: Shapes) -> Key:
    """Equal for shapes whose lengths are about the same multiples of the sample's."""
    if tuple(map(len, sample)) == tuple(map(len, shapes)):
        return tuple(
            tuple(map(bucket, now, then)) for now, then in zip(shapes, sample, strict=True)
        )
    return ((_EMPTY,), *(tuple(bucket(length, 1) for length in shape) for shape in shapes))


def is_samples(key: Key) -> bool:
    """Whether no length is another multiple than 1, nor larger than the sample's."""
    return not any(map(any, key))


def is_larger(key: Key) -> bool:
    """Whether some length is larger than the sample's."""
    return any(length > 0 for shape in key for length in shape)


@functools.lru_cache(maxsize=4096)
def bucket(length: int, sample: int) -> int:
    """A length as a number: 0 for the sample's and a little less, 1 for up to 1.125 times that."""
    if length == sample:
        return 0
    if not length or not sample:
        return _EMPTY
    # A little less, or rounding would put a whole power into the next.
    return math.ceil(math.log(length / sample) / math.log(BUCKET) - 1e-9)


def within(shapes: Shapes, known: Shapes) -> bool:
    """Whether no length is larger than the known one; both have one key."""
    return all(
        now <= then
        for shape, other in zip(shapes, known, strict=True)
        for now, then in zip(shape, other, strict=True)
    )


def _ratio(now: int, then: int, otherwise: float = 1.0) -> float:
    return now / then if now and then else otherwise
