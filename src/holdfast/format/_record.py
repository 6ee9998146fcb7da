"""The commit record as bytes: wrapped, digested, strictly read. Knows no storage.

    {"format":"holdfast","version":1,"digest":"<32 hex digits>","record":<body>}

The bytes up to the body are exactly these, so that the digest can be checked, and a newer version
told, before any of the body is decoded.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import xxhash

from holdfast.contracts import SMALL_OBJECT_BYTES, Data
from holdfast.errors import CheckpointError, CorruptedError, IncompatibleVersionError
from holdfast.format._entry_names import SHOWN_CHARS
from holdfast.format._record_check import UnknownDTypeError, check_record
from holdfast.format._record_schema import CommitRecord, StoredTensor
from holdfast.format._strict_json import scan_json
from holdfast.format._value_model import MAX_VALUE_JSON_DEPTH
from holdfast.format._value_tags import INT64_LEAST, INT64_MOST

RECORD_VERSION: Final = 1
MAX_RECORD_BYTES: Final = SMALL_OBJECT_BYTES

_START: Final = re.compile(rb'\{"format":"holdfast","version":([1-9][0-9]{0,8})[,}]')
_HEAD: Final = re.compile(rb'\{"format":"holdfast","version":1,"digest":"([0-9a-f]{32})","record":')
_BODY_DEPTH: Final = MAX_VALUE_JSON_DEPTH + 1
_PLAIN: Final = {str, float, bool, type(None)}
_NOT_FINITE: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

_DECODE_BODY: Final = msgspec.json.Decoder(CommitRecord).decode
_DECODE_TENSOR: Final = msgspec.json.Decoder(StoredTensor).decode


class _RawTensors(msgspec.Struct, frozen=True):
    tensors: dict[str, msgspec.Raw] = {}


_DECODE_RAW_TENSORS: Final = msgspec.json.Decoder(_RawTensors).decode


def encode_record(record: CommitRecord) -> bytes:
    """The bytes of ``metadata.json``. ``ValueError`` for a record that could not be read back:
    it is read back here."""
    wire = msgspec.structs.replace(record, metrics=_tagged(record.metrics))
    try:
        body = msgspec.json.encode(wire)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the commit record cannot be written: {error}") from error
    data = b'{"format":"holdfast","version":%d,"digest":"%b","record":%b}' % (
        RECORD_VERSION,
        _body_digest(body).encode(),
        body,
    )
    if len(data) > MAX_RECORD_BYTES:
        raise ValueError(
            f"the commit record would be {len(data)} bytes, more than {MAX_RECORD_BYTES}"
        )
    try:
        _decode_body(body)
    except CheckpointError as error:
        raise ValueError(f"the commit record cannot be written: {error}") from error
    return data


def decode_record(data: Data, *, path: str) -> CommitRecord:
    """Read bytes that may be anything. ``CorruptedError`` if they are no commit record or not the
    bytes that were written, ``IncompatibleVersionError`` if a newer version wrote them.

    Memory is bounded by the size of ``data``, of which 64 MiB are the most.
    """
    try:
        return _decode(bytes(data) if len(data) <= MAX_RECORD_BYTES else None, len(data))
    except CheckpointError as error:
        raise type(error)(error.message, path=path) from error


def _decode(data: bytes | None, size: int) -> CommitRecord:
    if data is None:
        raise CorruptedError(
            f"this is not a holdfast commit record: it has {size} bytes, and a record has at most "
            f"{MAX_RECORD_BYTES}"
        )
    start = _START.match(data)
    if start is None:
        raise CorruptedError(
            f"this is not a holdfast commit record: it begins with {data[:32]!r}"
            if data
            else "this is not a holdfast commit record: it is empty"
        )
    version = int(start[1])
    if version > RECORD_VERSION:
        raise IncompatibleVersionError(
            f"the commit record is of format {version}, and this version of holdfast reads "
            f"formats up to {RECORD_VERSION}; use a newer holdfast"
        )
    head = _HEAD.match(data)
    if head is None or not data.endswith(b"}"):
        raise CorruptedError("the commit record is damaged: its first or its last bytes are wrong")
    body = memoryview(data)[head.end() : -1]
    if _body_digest(body).encode() != head[1]:
        raise CorruptedError(
            "the commit record is damaged: its bytes are not those that were written (digest)"
        )
    return _decode_body(body)


def _body_digest(body: Data) -> str:
    state = xxhash.xxh3_128(b"holdfast\0%d\0" % RECORD_VERSION)
    state.update(body)
    return state.hexdigest()


def _decode_body(body: Data) -> CommitRecord:
    try:
        record = _DECODE_BODY(body)
    except RecursionError:
        scan_json(memoryview(body), max_depth=_BODY_DEPTH)
        raise
    except ValueError as error:
        scan_json(memoryview(body), max_depth=_BODY_DEPTH)
        raise CorruptedError(f"the commit record is wrong: {_located(body, error)}") from error
    if not _is_written(record, body):
        del record  # decoded again, or a record of many keys would be in memory twice
        scan_json(memoryview(body), max_depth=_BODY_DEPTH)
        record = _DECODE_BODY(body)
    try:
        record = msgspec.structs.replace(record, metrics=_untagged(record.metrics))
        check_record(record)
    except UnknownDTypeError as error:
        raise IncompatibleVersionError(
            f"this version of holdfast cannot read the checkpoint: {error}; use a newer holdfast"
        ) from error
    except ValueError as error:
        raise CorruptedError(f"the commit record is wrong: {error}") from error
    return record


def _is_written(record: CommitRecord, body: Data) -> bool:
    """Whether ``body`` is what holdfast writes for the record that was decoded from it, byte for
    byte, and nothing in it is what ``scan_json`` refuses. Found out many times as fast: a key
    that occurs twice is in no record, and so is not written."""
    try:
        return _is_shallow(record) and msgspec.json.encode(record) == body
    except ValueError:  # a number that only JSON can hold
        return False


def _is_shallow(record: CommitRecord) -> bool:
    """Whether the values in the record are not too deep, and its numbers are short."""
    level: list[Any] = [record.custom, record.tree]
    for _ in range(MAX_VALUE_JSON_DEPTH + 1):
        inner: list[Any] = []
        for value in level:
            kind = type(value)
            if kind is dict:
                inner.extend(value.values())
            elif kind is list:
                inner.extend(value)
            elif kind is int:
                if not INT64_LEAST <= value <= INT64_MOST:
                    return False
            elif kind not in _PLAIN:
                return False
        level = inner
    return not level


def _located(body: Data, error: ValueError) -> str:
    """The decoder's words, with the name of the tensor that they are about."""
    try:
        tensors = _DECODE_RAW_TENSORS(body).tensors
    except ValueError:
        return str(error)
    for name, raw in tensors.items():
        try:
            _DECODE_TENSOR(raw)
        except ValueError as own:
            return f"tensor {name[:SHOWN_CHARS]!r}: {own}"
    return str(error)


def _tagged(metrics: Mapping[str, Any]) -> dict[str, Any]:
    tagged: dict[str, Any] = {}
    for name, value in metrics.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(  # noqa: TRY004 -- as every refusal of an argument
                f"metric {name!r} must be an int or a float, not {value!r}"
            )
        if isinstance(value, int) or math.isfinite(value):
            tagged[name] = int(value) if isinstance(value, int) else float(value)
        else:
            tagged[name] = {"$": ["float", str(float(value))]}
    return tagged


def _untagged(metrics: Mapping[str, Any]) -> dict[str, int | float]:
    return {name: _number(name, value) for name, value in metrics.items()}


def _number(name: str, value: object) -> int | float:
    match value:
        case bool():
            pass
        case float():
            return value
        case int() if -(2**63) <= value < 2**63:
            return value
        case {"$": ["float", "nan" | "inf" | "-inf" as text], **rest} if not rest:
            return _NOT_FINITE[text]
    raise ValueError(f"metric {name[:SHOWN_CHARS]!r} is no number: {str(value)[:SHOWN_CHARS]}")
