"""Numbers that describe many numbers, added up piece by piece. Pure.

Mean and deviation are merged as Chan, Golub and LeVeque do (1979): a sum of squares would lose all
digits of values that lie far from zero.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.cli._compare import is_number, wide

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """``min``, ``max``, ``mean`` and ``std`` are of the finite values, ``None`` if there are none.
    Of complex numbers they are those of the magnitudes."""

    elements: int = 0
    nan: int = 0
    infinite: int = 0
    zeros: int = 0
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    squares: float = 0.0

    @property
    def finite(self) -> int:
        return self.elements - self.nan - self.infinite

    @property
    def std(self) -> float | None:
        return math.sqrt(self.squares / self.finite) if self.finite else None

    @property
    def told(self) -> dict[str, float | None]:
        """What is said of them, by name."""
        return {
            "elements": self.elements,
            "min": self.min,
            "max": self.max,
            "mean": self.mean,
            "std": self.std,
            "zeros": self.zeros,
            "nan": self.nan,
            "infinite": self.infinite,
        }

    def __or__(self, other: "Stats") -> "Stats":
        if not self.finite or not other.finite:
            some = other if other.finite else self
            low, high, mean, squares = some.min, some.max, some.mean, some.squares
        else:
            total = self.finite + other.finite
            low = min(self.min or 0, other.min or 0)
            high = max(self.max or 0, other.max or 0)
            apart = (other.mean or 0.0) - (self.mean or 0.0)
            mean = (self.mean or 0.0) + apart * other.finite / total
            squares = self.squares + other.squares
            squares += apart * apart * self.finite * other.finite / total
        return Stats(
            elements=self.elements + other.elements,
            nan=self.nan + other.nan,
            infinite=self.infinite + other.infinite,
            zeros=self.zeros + other.zeros,
            min=low,
            max=high,
            mean=mean,
            squares=squares,
        )


def stats_of(array: Array, dtype: str) -> Stats:
    """Of one piece, of that dtype code."""
    if not is_number(dtype):
        return Stats(elements=array.size)
    values = magnitudes(array, dtype)
    kept = finite(values)
    nan = int(np.count_nonzero(np.isnan(values))) if values.dtype.kind == "f" else 0
    zeros = int(np.count_nonzero(kept == 0))
    counts = {"elements": values.size, "nan": nan, "infinite": values.size - nan - kept.size}
    if not kept.size:
        return Stats(**counts)
    with np.errstate(over="ignore", invalid="ignore"):
        as_float = kept.astype(np.float64)
        mean = float(as_float.mean())
        squares = float(np.square(as_float - mean).sum())
    low, high = kept.min().item(), kept.max().item()
    return Stats(**counts, zeros=zeros, min=low, max=high, mean=mean, squares=squares)


def magnitudes(array: Array, dtype: str) -> Array:
    """What is described: numbers as they are, those that are complex by their magnitude."""
    values = wide(array.reshape(-1), dtype)
    if dtype == "BOOL":
        return values.astype(np.uint8)
    return np.abs(values) if values.dtype.kind == "c" else values


def finite(values: Array) -> Array:
    return values[np.isfinite(values)] if values.dtype.kind == "f" else values


def counted(array: Array, dtype: str, edges: Array) -> Array:
    """How many values of a piece lie between each two edges, the last one included."""
    kept = finite(magnitudes(array, dtype)).astype(np.float64)
    counts: Array = np.histogram(kept, edges)[0]
    return counts
