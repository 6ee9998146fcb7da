"""Which parts of a checkpoint a verification reads, one after the other. Pure.

A part is what ``Catalog.verify(part=...)`` takes. Each costs a look at all headers, so parts are
large; between two of them a verification can be interrupted without losing anything.
"""

import math
import random
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from holdfast.catalog._read_plan import BATCH_BYTES

MOST_PARTS: Final = 256

_PART_BYTES: Final = 64 * 1024 * 1024
_TENSOR_BYTES: Final = 128 * 1024
_FILE_BYTES: Final = 8 * 1024 * 1024
"""What reading a header again costs, as the bytes that are read in that time, times ten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much there is to verify: raw bytes of tensors, tensors and files."""

    nbytes: int
    tensors: int
    files: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The ``chosen`` of ``of`` parts, counted from 1, in the order they are read."""

    of: int
    chosen: tuple[int, ...]

    @property
    def share(self) -> float:
        return len(self.chosen) / self.of


def choose_parts(extent: Extent, *, share: Fraction, seed: str, resumable: bool = False) -> Parts:
    """All of a checkpoint, or at least ``share`` of it, drawn by ``seed``.

    It is read in one go unless a share of it is wanted or it is to be ``resumable``.
    """
    if share == 1 and not resumable:
        return Parts(of=1, chosen=(1,))
    step = _PART_BYTES + _TENSOR_BYTES * extent.tensors + _FILE_BYTES * extent.files
    of = min(math.ceil(extent.nbytes / step), MOST_PARTS)
    of = max(of, share.limit_denominator(100).denominator)
    # There are at least so many batches to be dealt out, so that no part is empty.
    of = max(1, min(of, math.ceil(extent.nbytes / BATCH_BYTES)))
    count = math.ceil(share * of)
    chosen = range(1, of + 1)
    if count < of:
        return Parts(of=of, chosen=tuple(sorted(random.Random(seed).sample(chosen, count))))  # noqa: S311 -- no secret
    return Parts(of=of, chosen=tuple(chosen))
