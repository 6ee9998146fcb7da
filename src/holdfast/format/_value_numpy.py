"""Tags of NumPy's scalars and of small arrays kept inside the tree.

Knows the closed list of dtypes and their little-endian bytes; knows nothing of torch, of shards,
or of where a value stands. Readers of untrusted payloads check sizes before they allocate.
"""

import contextlib
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from holdfast.format._value_tags import (
    Malformed,
    Unstorable,
    Unsupported,
    from_base64,
    items_of,
    tagged,
    text_of,
    to_base64,
    whole,
)

MAX_INLINE_BYTES: Final = 1024 * 1024

# fmt: off
_OWN = frozenset({
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
})
_EXTENDED = frozenset({
    "bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn",
    "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float6_e2m3fn",
    "float6_e3m2fn", "float4_e2m1fn", "int1", "int2", "int4", "uint1", "uint2", "uint4",
    "complex32", "bcomplex32",
})
# fmt: on
_DATES = re.compile(r"(?:datetime|timedelta)64(?:\[[1-9]?[0-9]{0,9}[a-zA-Z]{1,2}\])?")
_TEXTS = re.compile(r"[US][1-9][0-9]{0,6}")
_LAST_CHARACTER = 0x10FFFF


def encode_scalar(value: np.generic) -> object:
    """A NumPy scalar of a dtype that the format has, else ``Unstorable``."""
    if type(value) is np.str_:
        return tagged("numpy.scalar", ["str", to_base64(value.encode("utf-8", "surrogatepass"))])
    if type(value) is np.bytes_:
        return tagged("numpy.scalar", ["bytes", to_base64(bytes(value))])
    name = _name(value.dtype)
    if name is None or type(value) is not value.dtype.type:
        raise _refusal(f"a NumPy scalar of dtype {value.dtype}")
    return tagged("numpy.scalar", [name, to_base64(_little(np.asarray(value)))])


def encode_array(value: npt.NDArray[Any]) -> object:
    """A plain NumPy array of at most 1 MiB, else ``Unstorable``."""
    name = _name(value.dtype)
    if name is None:
        raise _refusal(f"a NumPy array of dtype {value.dtype}")
    if value.nbytes > MAX_INLINE_BYTES:
        raise Unstorable(
            f"a NumPy array of dtype {value.dtype} and {value.nbytes:,} bytes",
            f"the most outside of shards, which hold numbers, is {MAX_INLINE_BYTES:,} bytes: "
            "convert it to numbers (dates by value.view('int64')), or store it as a list or in "
            "several arrays",
        )
    return tagged("numpy.array", [name, list(value.shape), to_base64(_little(value))])


def _decode_scalar(payload: object) -> np.generic:
    name, data = items_of(payload, 2)
    if name == "bytes":
        return np.bytes_(from_base64(data))
    if name == "str":
        try:
            return np.str_(from_base64(data).decode("utf-8", "surrogatepass"))
        except UnicodeDecodeError:
            raise Malformed("the bytes of a text are not UTF-8") from None
    dtype = _dtype(text_of(name))
    if dtype.kind in "US":
        raise Malformed(f"a scalar cannot be of dtype {name}")
    scalar: np.generic = _array(dtype, from_base64(data, size=dtype.itemsize))[0]
    return scalar


def _decode_array(payload: object) -> npt.NDArray[Any]:
    name, shape, data = items_of(payload, 3)
    dtype = _dtype(text_of(name))
    sizes = [whole(size, 0) for size in items_of(shape)]
    nbytes = math.prod(sizes) * dtype.itemsize
    if nbytes > MAX_INLINE_BYTES:
        raise Malformed(f"an array inside the tree has more than {MAX_INLINE_BYTES:,} bytes")
    array = _array(dtype, from_base64(data, size=nbytes))
    try:
        return array.reshape(sizes)
    except ValueError:
        raise Malformed("NumPy has no arrays of such a shape") from None


def _name(dtype: np.dtype[Any]) -> str | None:
    """The dtype's name in the format, whatever its byte order, or ``None`` if it has none."""
    if dtype.itemsize == 0:
        return None
    if dtype.kind == "S":
        return f"S{dtype.itemsize}"
    if dtype.kind == "U":
        return f"U{dtype.itemsize // 4}"
    name = dtype.name
    known = name in _OWN or name in _EXTENDED or _DATES.fullmatch(name)
    return name if known else None


def _dtype(name: str) -> np.dtype[Any]:
    if name in _EXTENDED:
        kind: type[np.generic] | None = getattr(ml_dtypes, name, None)
        if kind is None:
            raise Unsupported(f"of dtype {name}, which the installed ml_dtypes lacks")
        return np.dtype(kind)
    if name in _OWN or _TEXTS.fullmatch(name):
        return np.dtype(name)
    if _DATES.fullmatch(name):
        with contextlib.suppress(TypeError):
            dtype: np.dtype[Any] = np.dtype(name)
            if dtype.name == name:
                return dtype
    raise Malformed("a NumPy value has no dtype of this format")


def _little(array: npt.NDArray[Any]) -> bytes:
    if array.dtype.name not in _EXTENDED:
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return array.tobytes(order="C")


def _array(dtype: np.dtype[Any], data: bytes) -> npt.NDArray[Any]:
    if dtype.kind == "b" and data.strip(b"\0\1"):
        raise Malformed("a bool is neither 0 nor 1")
    stored = dtype if dtype.name in _EXTENDED else dtype.newbyteorder("<")
    if dtype.kind == "U":
        characters = np.frombuffer(data, "<u4")
        if characters.size and characters.max() > _LAST_CHARACTER:
            raise Malformed("a text has a character that does not exist")
    return np.frombuffer(data, stored).astype(dtype)


def _refusal(what: str) -> Unstorable:
    return Unstorable(
        what, "store numbers, bools, dates or texts of a fixed length, each in an array of its own"
    )


DECODE: Final[Mapping[str, Callable[[object], object]]] = {
    "numpy.scalar": _decode_scalar,
    "numpy.array": _decode_array,
}
