"""The index by which readers of the Hugging Face layout find a model's tensors. Derived from the
commit record, and never read as part of a checkpoint.

It stands under a fixed name, so that it cannot be replaced in one step with the record. Whoever
changes the record therefore settles the index afterwards; two who do so at the same time both look
at the record again, and the last of them has seen the last record.
"""

import logging
from typing import Any, Final

import msgspec

from holdfast.catalog._committed import Found, look
from holdfast.catalog._names import MODEL_INDEX, is_model_name
from holdfast.contracts import SMALL_OBJECT_BYTES, Storage
from holdfast.errors import ObjectNotFoundError, SaveError
from holdfast.format import CommitRecord, dtype_of, entry_of_box
from holdfast.reshard import Box

_log = logging.getLogger("holdfast.catalog")

_OWNER: Final = "holdfast"


class _Metadata(msgspec.Struct, frozen=True):
    holdfast: str


class _Index(msgspec.Struct, frozen=True):
    metadata: _Metadata


def has_model_files(record: CommitRecord) -> bool:
    """Whether the record names files of the Hugging Face layout in its own folder."""
    return any(file.prefix is None and is_model_name(file.name) for file in record.files)


def model_index(record: CommitRecord) -> bytes | None:
    """The index of a record's model files, or ``None`` if it has none. Pure; the same record
    always gives the same bytes.

    It lists the tensors that stand whole in one of them, by the name that they have there.
    """
    if not has_model_files(record):
        return None
    files: dict[str, str] = {}
    total = 0
    for name, tensor in record.tensors.items():
        ((first, _, count), *more) = tensor.placement.files
        file = record.files[first]
        if count == 1 and not more and file.prefix is None and is_model_name(file.name):
            whole = tuple([(0, size) for size in tensor.shape])
            files[entry_of_box(name, tensor.shape, whole)] = file.name
            total += Box.whole(tensor.shape).size * dtype_of(tensor.dtype).itemsize
    index: dict[str, Any] = {
        "metadata": {"total_size": total, _OWNER: record.attempt},
        "weight_map": dict(sorted(files.items())),
    }
    return msgspec.json.format(msgspec.json.encode(index), indent=2) + b"\n"


def check_index(storage: Storage, prefix: str) -> None:
    """``SaveError`` if an index is there that holdfast did not write, and so does not replace.
    Call this before anything is written of a checkpoint that needs one."""
    seen = _read(storage, prefix)
    if seen is not None and not _is_ours(seen):
        raise SaveError(
            "this index is not holdfast's, so it stays; nothing was written. Choose another name "
            "for the checkpoint, or move that model away",
            path=f"{storage.url}/{_key(prefix)}",
        )


def write_index(storage: Storage, prefix: str, record: CommitRecord) -> None:
    """Put the index of a record in place, which may not be committed yet; nothing happens if it
    has no model files. Atomic. ``SaveError`` if somebody else's is there."""
    index = model_index(record)
    if index is None:
        return
    check_index(storage, prefix)
    _write(storage, prefix, index)


def settle_index(storage: Storage, prefix: str) -> None:
    """Bring the index in line with the commit record that is in place. Idempotent.

    Without a committed record that names model files there is none. One that is not holdfast's
    stays, whatever the record says. Raises as ``look`` does if the record cannot be read.
    """
    seen = look(storage, prefix)
    while True:
        _settle(storage, prefix, seen if isinstance(seen, Found) else None)
        now = look(storage, prefix)
        if _whose(now) == _whose(seen):
            return
        seen = now


def _settle(storage: Storage, prefix: str, found: Found | None) -> None:
    wanted = model_index(found.record) if found is not None and found.is_committed else None
    seen = _read(storage, prefix)
    if seen == wanted:
        return
    if seen is not None and not _is_ours(seen):
        if wanted is not None:
            _log.warning("not holdfast's, and left alone: %s in %s", _key(prefix), storage.url)
    elif wanted is None:
        storage.delete(_key(prefix))
    else:
        _write(storage, prefix, wanted)


def _whose(found: object) -> tuple[str, str] | None:
    """What of a record its index depends on: a fence changes nothing."""
    return (found.record.state, found.record.attempt) if isinstance(found, Found) else None


def _key(prefix: str) -> str:
    return f"{prefix}/{MODEL_INDEX}"


def _read(storage: Storage, prefix: str) -> bytes | None:
    """The index that is there. Of one that is too large to be holdfast's, nothing is read."""
    try:
        if storage.stat(_key(prefix)).size_bytes > SMALL_OBJECT_BYTES:
            return b""
        return storage.read(_key(prefix))
    except ObjectNotFoundError:
        return None


def _write(storage: Storage, prefix: str, index: bytes) -> None:
    with storage.open_writer(_key(prefix), size_bytes=len(index)) as writer:
        writer.write_at(0, index)
        writer.finish()


def _is_ours(index: bytes) -> bool:
    try:
        msgspec.json.decode(index, type=_Index)
    except (RecursionError, ValueError):
        return False
    return True
