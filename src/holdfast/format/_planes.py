"""Takes elements apart into planes of equal bytes, and back. Knows byte order, not compression.

Plane ``j`` holds byte ``j`` of every element, least significant first. The bytes of a weight's
exponent are alike and those of its mantissa are noise, so apart they compress and together they
hardly do. *Turned* elements are rotated left by one bit first: the sign leaves the top byte, and
for bfloat16 and float32 the exponent fills it exactly.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

WIDTHS = (1, 2, 4, 8)
"""Bytes per element that can be taken apart."""

TURNED_WIDTHS = (2, 4, 8)
"""Those that can be turned."""

Plane = NDArray[np.uint8]


class Splitter:
    """``split`` with memory of its own, for chunks of at most ``most`` bytes. Not thread-safe.

    The memory is kept because fresh pages for every chunk cost more than the arithmetic.
    """

    def __init__(self, most: int) -> None:
        self._turned = np.empty(most, np.uint8)
        self._shifted = np.empty(most, np.uint8)
        self._planes = np.empty(most, np.uint8)

    def split(self, elements: memoryview, width: int, *, turned: bool) -> list[Plane]:
        """The ``width`` planes of a whole number of elements, until the next call."""
        if width == 1:
            return [np.frombuffer(elements, np.uint8)]
        word = np.dtype(f"<u{width}")
        values: NDArray[Any] = np.frombuffer(elements, word)
        shifted = self._shifted[: len(elements)].view(word)
        if turned:
            rotated = self._turned[: len(elements)].view(word)
            np.left_shift(values, word.type(1), out=rotated)
            np.right_shift(values, word.type(8 * width - 1), out=shifted)
            values = np.bitwise_or(rotated, shifted, out=rotated)
        planes = self._planes[: len(elements)].reshape(width, -1)
        np.copyto(planes[0], values, casting="unsafe")
        for j in range(1, width):
            np.right_shift(values, word.type(8 * j), out=shifted)
            np.copyto(planes[j], shifted, casting="unsafe")
        return list(planes)


def join(planes: list[Plane], into: memoryview, *, turned: bool) -> None:
    """Fill ``into``, writable bytes, with what ``split`` took apart."""
    width = len(planes)
    out = np.frombuffer(into, np.uint8).reshape(-1, width)
    for j, plane in enumerate(planes):
        out[:, j] = plane
    if turned:
        word = np.dtype(f"<u{width}")
        values = np.frombuffer(into, word)
        values[:] = (values >> word.type(1)) | (values << word.type(8 * width - 1))
