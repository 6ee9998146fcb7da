"""What the fields of a commit record must be to each other. Knows no bytes and expands nothing.

Work is linear in the size of the record, never in what its numbers claim. Whether boxes overlap
is not checked here; that they have as many elements as the tensor is.
"""

import math
import re
from datetime import datetime
from typing import Final

from holdfast import _checks
from holdfast.format._dtypes import DTYPES, DType
from holdfast.format._entry_names import SHOWN_CHARS, check_name
from holdfast.format._record_schema import (
    CommitRecord,
    StoredCut,
    StoredFile,
    StoredPlacement,
    StoredTensor,
)
from holdfast.format._shard_layout import DATA_ALIGNMENT, raw_bytes

MAX_CELLS: Final = 50_000_000
MAX_BOXES: Final = 1_000_000
MAX_METRIC_CHARS: Final = 1024
MAX_PREFIX_CHARS: Final = 1024

_ATTEMPT: Final = re.compile(r"[0-9a-f]{16}")
_DIGEST: Final = re.compile(r"[0-9a-f]{32}")
_NUMBER: Final = r"(?:0|[1-9][0-9]{0,9})"
_COUNTED: Final = r"(?:[0-9]{5}|[1-9][0-9]{5,9})"
_SHARD_NAME: Final = re.compile(
    rf"(?:shard-{_NUMBER}-[0-9a-f]{{16}}(?:-{_NUMBER})?|model-{_COUNTED}-of-{_COUNTED}-[0-9a-f]{{16}})"
    r"\.safetensors"
)
_CREATED: Final = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,6})?Z"
)


class UnknownDTypeError(ValueError):
    """A tensor's dtype is not one of format 1."""


def check_record(record: CommitRecord) -> None:
    """``ValueError`` unless the record, whose types are right, also makes sense."""
    if not _ATTEMPT.fullmatch(record.attempt):
        raise ValueError(f"attempt must be 16 hex digits, not {record.attempt[:SHOWN_CHARS]!r}")
    _check_created(record.created)
    for name in record.metrics:
        _checks.text("the name of a metric", name, most=MAX_METRIC_CHARS)
    if record.state == "tombstone" and (record.files or record.tensors):
        raise ValueError("a tombstone has no files and no tensors")
    _check_files(record.files)
    cells = boxes = 0
    for name, tensor in record.tensors.items():
        try:
            check_name(name)
            boxes += len(tensor.placement.boxes or ())
            if boxes > MAX_BOXES:
                raise ValueError(f"the record has more than {MAX_BOXES} boxes up to here")  # noqa: TRY301
            cells += _check_tensor(tensor, len(record.files))
            if cells > MAX_CELLS:
                raise ValueError(f"the record has more than {MAX_CELLS} parts up to here")  # noqa: TRY301
        except ValueError as error:
            raise type(error)(f"tensor {name[:SHOWN_CHARS]!r}: {error}") from error


def _check_created(created: str) -> None:
    try:
        if not _CREATED.fullmatch(created):
            raise ValueError("not of that form")  # noqa: TRY301
        datetime.fromisoformat(created)
    except ValueError as error:
        raise ValueError(
            f"created must be a time such as 2026-01-31T12:00:00Z, not {created[:SHOWN_CHARS]!r}"
        ) from error


def _check_files(files: tuple[StoredFile, ...]) -> None:
    seen: set[tuple[str | None, str]] = set()
    for index, file in enumerate(files):
        try:
            _check_file(file)
        except ValueError as error:
            raise ValueError(f"file {index} ({file.name[:SHOWN_CHARS]!r}): {error}") from error
        if (file.prefix, file.name) in seen:
            raise ValueError(f"file {index} ({file.name!r}) is listed twice")
        seen.add((file.prefix, file.name))


def _check_file(file: StoredFile) -> None:
    if not _SHARD_NAME.fullmatch(file.name):
        raise ValueError(
            "this is no name of a shard, shard-<rank>-<attempt>[-<n>].safetensors or "
            "model-<n>-of-<count>-<attempt>.safetensors"
        )
    if file.table is not None and file.table != f"{file.name.removesuffix('.safetensors')}.chunks":
        raise ValueError(
            f"its table must be named as it is, but with .chunks, not {file.table[:SHOWN_CHARS]!r}"
        )
    if not _DIGEST.fullmatch(file.digest):
        raise ValueError(f"digest must be 32 hex digits, not {file.digest[:SHOWN_CHARS]!r}")
    if file.size_bytes < DATA_ALIGNMENT:
        raise ValueError(f"no shard is of {file.size_bytes} bytes, less than {DATA_ALIGNMENT}")
    if file.prefix is not None:
        _checks.text("prefix", file.prefix, most=MAX_PREFIX_CHARS)
        _checks.key("prefix", file.prefix)


def _check_tensor(tensor: StoredTensor, files: int) -> int:
    parts = _check_parts(tensor.placement, tensor.shape, _dtype(tensor.dtype))
    listed = 0
    for first, step, count in tensor.placement.files:
        last = first + step * (count - 1)
        if count < 1 or first >= files or not 0 <= last < files:
            raise ValueError(
                f"the run [{first}, {step}, {count}] of its files leaves the {files} of the record"
            )
        listed += count
    if listed != parts:
        raise ValueError(f"it has {parts} parts, but files for {listed}")
    return parts


def _check_parts(placement: StoredPlacement, shape: tuple[int, ...], dtype: DType) -> int:
    raw_bytes(dtype, shape)
    if (placement.cuts is None) == (placement.boxes is None):
        raise ValueError("its placement must have either cuts or boxes")
    if placement.boxes is not None:
        return _check_boxes(placement.boxes, shape)
    cuts = placement.cuts or ()
    if len(cuts) != len(shape):
        raise ValueError(f"it has {len(shape)} dimensions, but cuts for {len(cuts)}")
    parts = 1
    for dimension, (cut, size) in enumerate(zip(cuts, shape, strict=True)):
        parts *= _check_cut(cut, size, dimension)
    if parts != 1 and 0 in shape:
        raise ValueError("a tensor without elements has one part")
    return parts


def _check_cut(cut: StoredCut, size: int, dimension: int) -> int:
    if cut.at is None and cut.step is not None:
        if not (cut.step <= size and (cut.step > 0 or size == 0)):
            raise ValueError(f"dimension {dimension} of size {size} has no step {cut.step}")
        return -(-size // cut.step) if size else 1
    if cut.at is not None and cut.step is None:
        return _check_positions(cut.at, size, dimension) + 1
    raise ValueError(f"the cut of dimension {dimension} must have either step or at")


def _check_positions(runs: tuple[tuple[int, int, int], ...], size: int, dimension: int) -> int:
    positions = before = 0
    for first, step, count in runs:
        last = first + step * (count - 1)
        if count < 1 or first <= before or (step < 1 and count > 1) or last >= size:
            raise ValueError(
                f"the cuts of dimension {dimension} do not rise from 0 to {size} "
                f"in the run [{first}, {step}, {count}]"
            )
        positions += count
        before = last
    return positions


def _check_boxes(boxes: tuple[tuple[tuple[int, int], ...], ...], shape: tuple[int, ...]) -> int:
    elements = 0
    for index, box in enumerate(boxes):
        if len(box) != len(shape):
            raise ValueError(f"box {index} has {len(box)} dimensions, not {len(shape)}")
        for (start, stop), size in zip(box, shape, strict=True):
            if not (start < stop <= size or (start, stop, size) == (0, 0, 0)):
                raise ValueError(f"box {index} is not inside the shape {list(shape)}")
        elements += math.prod([stop - start for start, stop in box])
    if elements != math.prod(shape) or not boxes or (0 in shape and len(boxes) != 1):
        raise ValueError(
            f"its {len(boxes)} boxes have {elements} elements, and the tensor {math.prod(shape)}"
        )
    return len(boxes)


def _dtype(code: str) -> DType:
    dtype = DTYPES.get(code)
    if dtype is None:
        raise UnknownDTypeError(f"there is no dtype {code[:SHOWN_CHARS]!r}")
    return dtype
