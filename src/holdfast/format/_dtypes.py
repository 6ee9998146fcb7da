"""The element types of format 1 by their codes. Knows names and sizes; holds no tensor data.

A code is safetensors' own where it has one. Codes of ours name the types it lacks; their bytes
are stored as ``U8``. torch is named here, never imported. Bytes are those of memory, so this is
also where a big-endian machine is refused.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import ml_dtypes
import numpy as np

if sys.byteorder != "little":
    raise ImportError(
        "holdfast writes and reads tensors as they stand in memory, and its format is "
        f"little-endian; this machine is {sys.byteorder}-endian, so holdfast cannot run on it"
    )

DTypeOfNumpy = np.dtype[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class DType:
    """One element type.

    ``stored`` is the code in a shard's header: ``code`` itself, or ``U8`` for a code of ours.
    ``numpy_name`` is a name in ``numpy`` or ``ml_dtypes``, ``torch_name`` one in ``torch``;
    ``None`` where there is no such type.
    """

    code: str
    itemsize: int
    stored: str
    numpy_name: str | None
    torch_name: str | None

    @property
    def alignment(self) -> int:
        """What a reader that maps the file wants the first byte's offset to be a multiple of."""
        return self.itemsize if self.stored == self.code else 1

    @property
    def numpy_tail(self) -> tuple[int, ...]:
        """The dimension that a NumPy array of these bytes has in addition: ``(itemsize,)`` where
        elements of several bytes have no NumPy type and are read as ``uint8``, else ``()``."""
        return (self.itemsize,) if self.numpy_name is None and self.itemsize > 1 else ()


def _dtype(
    code: str,
    itemsize: int,
    numpy_name: str | None,
    torch_name: str | None,
    *,
    stored: str | None = None,
) -> DType:
    return DType(
        code=code,
        itemsize=itemsize,
        stored=stored or code,
        numpy_name=numpy_name,
        torch_name=torch_name,
    )


DTYPES: Final[Mapping[str, DType]] = MappingProxyType(
    {
        dtype.code: dtype
        for dtype in (
            _dtype("BOOL", 1, "bool", "bool"),
            _dtype("U8", 1, "uint8", "uint8"),
            _dtype("I8", 1, "int8", "int8"),
            _dtype("U16", 2, "uint16", "uint16"),
            _dtype("I16", 2, "int16", "int16"),
            _dtype("U32", 4, "uint32", "uint32"),
            _dtype("I32", 4, "int32", "int32"),
            _dtype("U64", 8, "uint64", "uint64"),
            _dtype("I64", 8, "int64", "int64"),
            _dtype("F16", 2, "float16", "float16"),
            _dtype("BF16", 2, "bfloat16", "bfloat16"),
            _dtype("F32", 4, "float32", "float32"),
            _dtype("F64", 8, "float64", "float64"),
            _dtype("F8_E4M3", 1, "float8_e4m3fn", "float8_e4m3fn"),
            _dtype("F8_E5M2", 1, "float8_e5m2", "float8_e5m2"),
            _dtype("F8_E8M0", 1, "float8_e8m0fnu", "float8_e8m0fnu"),
            _dtype("F8_E4M3FNUZ", 1, "float8_e4m3fnuz", "float8_e4m3fnuz"),
            _dtype("F8_E5M2FNUZ", 1, "float8_e5m2fnuz", "float8_e5m2fnuz"),
            _dtype("C64", 8, "complex64", "complex64"),
            _dtype("C128", 16, "complex128", "complex128", stored="U8"),
            _dtype("C32", 4, None, "complex32", stored="U8"),
            # safetensors' F4 counts half bytes and so has no 0-d tensor and no odd length.
            _dtype("F4_E2M1_X2", 1, None, "float4_e2m1fn_x2", stored="U8"),
        )
    }
)
"""Every element type of format 1."""


def dtype_of(code: str) -> DType:
    """The type of that code, or ``ValueError`` if format 1 has none."""
    try:
        return DTYPES[code]
    except KeyError:
        raise ValueError(f"there is no dtype {code!r}; format 1 has {', '.join(DTYPES)}") from None


def numpy_dtype(code: str) -> DTypeOfNumpy:
    """What NumPy calls the type: little-endian, from ``ml_dtypes`` where NumPy has none.

    ``uint8`` for a type that neither has; an array of it has ``DType.numpy_tail`` as one more
    dimension. ``ValueError`` for an unknown code.
    """
    dtype_of(code)
    return _NUMPY_BY_CODE[code]


def dtype_of_numpy(dtype: DTypeOfNumpy) -> DType:
    """The type that stores arrays of ``dtype``, or ``ValueError`` naming it: big-endian, object,
    structured, text and time types are refused."""
    found = _BY_NUMPY.get(dtype) if dtype.isnative and dtype.names is None else None
    if found is None:
        advice = (
            "convert it to little-endian first"
            if not dtype.isnative
            else f"convert it to one of {', '.join(str(known) for known in _BY_NUMPY)}"
        )
        raise ValueError(f"arrays of dtype {dtype} cannot be stored; {advice}")
    return found


def _numpy(dtype: DType) -> DTypeOfNumpy:
    if dtype.numpy_name is None:
        return np.dtype(np.uint8)
    native = hasattr(np, dtype.numpy_name)
    return np.dtype(dtype.numpy_name if native else getattr(ml_dtypes, dtype.numpy_name))


_NUMPY_BY_CODE: Final[Mapping[str, DTypeOfNumpy]] = {
    code: _numpy(dtype) for code, dtype in DTYPES.items()
}
_BY_NUMPY: Final[Mapping[DTypeOfNumpy, DType]] = {
    _NUMPY_BY_CODE[code]: dtype for code, dtype in DTYPES.items() if dtype.numpy_name is not None
}
