"""Tags of Python's own indivisible values: numbers, texts, bytes, paths, dates.

Knows how each is written and read; knows nothing of containers, NumPy or torch. Writers raise
``Unstorable``, readers of untrusted payloads raise ``Malformed`` and nothing else.
"""

import datetime as dt
import math
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from holdfast.format._value_tags import (
    INT64_LEAST,
    INT64_MOST,
    TAG_KEY,
    Malformed,
    Unstorable,
    from_base64,
    items_of,
    kind_of,
    tagged,
    text_of,
    to_base64,
    untagged,
    whole,
)

MAX_HEX_DIGITS: Final = 1024 * 1024

_Dated = TypeVar("_Dated", dt.datetime, dt.date, dt.time)

_HEX = re.compile(r"-?[0-9a-f]+")
_DAY_US = 86_400_000_000
_NOT_FINITE = ("nan", "inf", "-inf")
_PATHS: Mapping[str, type[pathlib.PurePath]] = {
    "path": pathlib.Path,
    "pureposix": pathlib.PurePosixPath,
    "purewindows": pathlib.PureWindowsPath,
}
_PATH_NAMES: Mapping[type, str] = {
    type(pathlib.Path()): "path",
    pathlib.PurePosixPath: "pureposix",
    pathlib.PureWindowsPath: "purewindows",
}


def encode_int(value: int) -> object:
    if INT64_LEAST <= value <= INT64_MOST:
        return value
    if value.bit_length() > MAX_HEX_DIGITS * 4:
        raise Unstorable(
            f"an int of {value.bit_length():,} bits",
            f"the most is {MAX_HEX_DIGITS * 4:,} bits: store it as bytes",
        )
    return tagged("int", format(value, "x"))


def _decode_int(payload: object) -> int:
    text = text_of(payload)
    if len(text) > MAX_HEX_DIGITS + 1:
        raise Malformed(f"an int has more than {MAX_HEX_DIGITS:,} hex digits")
    if not _HEX.fullmatch(text):
        raise Malformed("an int is not written in hex digits")
    return int(text, 16)


def encode_float(value: float) -> object:
    return value if math.isfinite(value) else tagged("float", str(value))


def _decode_float(payload: object) -> float:
    if payload not in _NOT_FINITE:
        raise Malformed("a float that is not a JSON number must be nan, inf or -inf")
    return float(text_of(payload))  # a new nan each time: a set may hold several


def encode_str(value: str) -> object:
    """Text that UTF-8 cannot hold (file names may carry it) is stored as bytes."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return tagged("str", to_base64(value.encode("utf-8", "surrogatepass")))
    return value


def _decode_str(payload: object) -> str:
    try:
        return from_base64(payload).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise Malformed("the bytes of a text are not UTF-8") from None


def _encode_complex(value: complex) -> object:
    return tagged("complex", [encode_float(value.real), encode_float(value.imag)])


def _decode_complex(payload: object) -> complex:
    real, imag = (_plain_float(part) for part in items_of(payload, 2))
    return complex(real, imag)


def _plain_float(encoded: object) -> float:
    if isinstance(encoded, float) and math.isfinite(encoded):
        return encoded
    if isinstance(encoded, dict) and TAG_KEY in encoded:
        tag, payload = untagged(encoded)
        if tag == "float":
            return _decode_float(payload)
    raise Malformed("a float is missing")


def _encode_path(value: pathlib.PurePath) -> object:
    return tagged("path", [_PATH_NAMES[type(value)], encode_str(str(value))])


def _decode_path(payload: object) -> pathlib.PurePath:
    name, text = items_of(payload, 2)
    kind = _PATHS.get(text_of(name))
    if kind is None:
        raise Malformed("a path is of no known kind")
    if isinstance(text, dict) and TAG_KEY in text:
        tag, inner = untagged(text)
        if tag == "str":
            return kind(_decode_str(inner))
    return kind(text_of(text))


def _encode_datetime(value: dt.datetime | dt.time) -> object:
    if value.tzinfo is not None and type(value.tzinfo) is not dt.timezone:
        raise Unstorable(
            f"a {type(value).__name__} in {kind_of(value.tzinfo)}",
            "a zone's rules differ between machines and years: store it in UTC or with a fixed "
            "offset, as by value.astimezone(datetime.timezone.utc)",
        )
    offset = value.utcoffset()
    return tagged(
        type(value).__name__,
        [
            value.replace(tzinfo=None).isoformat(),
            value.fold,
            None if offset is None else offset // dt.timedelta(microseconds=1),
        ],
    )


def _decode_datetime(payload: object) -> dt.datetime:
    text, fold, offset = items_of(payload, 3)
    value = _iso(dt.datetime.fromisoformat, text, "datetime")
    return value.replace(fold=whole(fold, 0, 1), tzinfo=_zone(offset))


def _decode_time(payload: object) -> dt.time:
    text, fold, offset = items_of(payload, 3)
    value = _iso(dt.time.fromisoformat, text, "time")
    return value.replace(fold=whole(fold, 0, 1), tzinfo=_zone(offset))


def _zone(offset: object) -> dt.timezone | None:
    # Apart from the text: Python reads an offset of less than a second as UTC.
    if offset is None:
        return None
    most = _DAY_US - 1
    return dt.timezone(dt.timedelta(microseconds=whole(offset, -most, most)))


def _encode_date(value: dt.date) -> object:
    return tagged("date", value.isoformat())


def _decode_date(payload: object) -> dt.date:
    return _iso(dt.date.fromisoformat, payload, "date")


def _iso(parse: Callable[[str], _Dated], payload: object, what: str) -> _Dated:
    text = text_of(payload)
    try:
        value = parse(text)
    except ValueError:
        value = None
    zone = getattr(value, "tzinfo", None)
    if value is None or value.isoformat() != text or zone is not None:
        raise Malformed(f"a {what} is not written as Python's isoformat() writes it")
    return value


def _encode_timedelta(value: dt.timedelta) -> object:
    return tagged("timedelta", [value.days, value.seconds, value.microseconds])


def _decode_timedelta(payload: object) -> dt.timedelta:
    days, seconds, microseconds = items_of(payload, 3)
    return dt.timedelta(
        days=whole(days, dt.timedelta.min.days, dt.timedelta.max.days),
        seconds=whole(seconds, 0, 86_399),
        microseconds=whole(microseconds, 0, 999_999),
    )


ENCODE: Final[Mapping[type, Callable[[Any], object]]] = {
    int: encode_int,
    float: encode_float,
    str: encode_str,
    bytes: lambda value: tagged("bytes", to_base64(value)),
    complex: _encode_complex,
    dt.datetime: _encode_datetime,
    dt.time: _encode_datetime,
    dt.date: _encode_date,
    dt.timedelta: _encode_timedelta,
    **dict.fromkeys(_PATH_NAMES, _encode_path),
}

DECODE: Final[Mapping[str, Callable[[object], object]]] = {
    "int": _decode_int,
    "float": _decode_float,
    "str": _decode_str,
    "bytes": from_base64,
    "complex": _decode_complex,
    "path": _decode_path,
    "datetime": _decode_datetime,
    "time": _decode_time,
    "date": _decode_date,
    "timedelta": _decode_timedelta,
}
