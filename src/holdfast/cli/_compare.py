"""How far two arrays of the same kind are apart. Pure. NaN in the same place is no difference."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_FLOATS = ("F16", "F32", "F64", "BF16", "F8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """How many elements differ in value, the largest absolute difference of two numbers, and in
    how many places one is NaN and the other is not. ``max_abs`` is ``None`` for types that are
    not numbers to NumPy; 0 elements means the same values in other bits (-0.0, or another NaN)."""

    elements: int = 0
    max_abs: float | None = 0.0
    nan_changed: int = 0

    def __or__(self, other: "Apart") -> "Apart":
        known = self.max_abs is not None and other.max_abs is not None
        return Apart(
            elements=self.elements + other.elements,
            max_abs=max(self.max_abs or 0, other.max_abs or 0) if known else None,
            nan_changed=self.nan_changed + other.nan_changed,
        )


def is_number(dtype: str) -> bool:
    """Whether NumPy can reckon with tensors of that dtype code."""
    return dtype not in {"C32", "F4_E2M1_X2"}


def wide(array: Array, dtype: str) -> Array:
    """Floats of any kind as float64, complex ones as complex128; others as they are."""
    if dtype.startswith(_FLOATS):
        return array.astype(np.float64)
    return array.astype(np.complex128) if dtype.startswith("C") else array


def apart(a: Array, b: Array, dtype: str) -> Apart:
    """Compare two arrays of one shape, both of that dtype code."""
    if a.tobytes() == b.tobytes():
        return Apart(max_abs=0.0 if is_number(dtype) else None)
    if not is_number(dtype):
        return Apart(elements=int(np.count_nonzero(a != b)), max_abs=None)
    if dtype == "BOOL":
        differ = int(np.count_nonzero(a != b))
        return Apart(elements=differ, max_abs=int(differ > 0))
    if dtype[0] in "IU":
        high, low = np.maximum(a, b), np.minimum(a, b)
        # Of 64 bits the difference of two may not fit with a sign; without one it always does.
        distance = high.astype(np.int64, casting="unsafe") - low.astype(np.int64, casting="unsafe")
        unsigned = distance.view(np.uint64)
        most = int(unsigned.max(initial=np.uint64(0)))
        return Apart(elements=int(np.count_nonzero(unsigned)), max_abs=most)
    return _floats_apart(wide(a, dtype), wide(b, dtype))


def _floats_apart(a: Array, b: Array) -> Apart:
    nan_a, nan_b = np.isnan(a), np.isnan(b)
    equal = (a == b) | (nan_a & nan_b)
    numbers = ~(equal | nan_a | nan_b)
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.abs(a[numbers] - b[numbers])
    return Apart(
        elements=int(np.count_nonzero(~equal)),
        max_abs=float(distance.max(initial=0.0)),
        nan_changed=int(np.count_nonzero(nan_a != nan_b)),
    )
