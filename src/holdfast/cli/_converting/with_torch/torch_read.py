"""Reads what ``torch.save`` wrote, without running anything that is in it and without its bytes.

``torch.load(weights_only=True)`` refuses every pickle that names more than tensors and plain
values. With ``map_location="meta"`` it makes tensors without memory that know where in the file
they are, and these places are read when a target wants them. Files of before torch 1.6 are no
archives: they are read into memory as a whole.
"""

import io
import pickle
import struct
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch

from holdfast.cli._converting.contents import (
    PIECE_BYTES,
    Contents,
    Tensor,
    check_tree,
    is_container,
    rebuilt,
)
from holdfast.cli._converting.file_parts import FilePart, tensor_in_files
from holdfast.cli._converting.recognising import ZIP
from holdfast.cli._converting.with_torch.pickles import check_pickles
from holdfast.distributed._tensors import Unstorable, check_storable, code_of, memory_of
from holdfast.errors import CorruptedError, IncompatibleVersionError
from holdfast.reshard import Box, split_box

_PLAIN: Final = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_NOT_DENSE: Final = "is sparse, nested or quantized; only dense ones are converted"
_ALLOWED_BYTES: Final = 1024**3
_MOST_TIMES: Final = 10_000
"""What a tensor may come to of however few bytes, as one that was expanded does; and if it is
larger than that, how many times the size of its file."""

_PICKLE: Final = "data.pkl"
_PICKLES: Final = 5
"""In a file of before torch 1.6: what it is, of which version, of which machine, the state, and its
keys. Then come the bytes of tensors."""

_HEADER: Final = struct.Struct("<26xHH")  # of a member of an archive; it ends with two lengths
_ENDS: Final = struct.Struct(
    "<4s36xQQ4s4xQ4x4s8xIIH"
)  # that of 64 bits, where it is, and the other
_END_BYTES: Final = 22
_NO_ARCHIVE: Final = (
    zipfile.BadZipFile,
    EOFError,
    NotImplementedError,
    OSError,
    RuntimeError,  # zipfile's word for what is encrypted
    ValueError,
    struct.error,
)
_UNSAFE: Final = "Weights only load failed"


def read_file(path: Path) -> Contents:
    """``CorruptedError`` if it is damaged, or if to load it would run code."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if not file.read(len(ZIP)).startswith(ZIP):
            tree = loaded(file, path, "cpu")
            check_tree(tree, str(path))
            return Contents(tree=lifted(tree, path, size=size, known={}))
        tree = loaded(file, path, "meta")
    check_tree(tree, str(path))
    return Contents(tree=located(tree, path, start=0, size=size))


def loaded(file: BinaryIO | io.BytesIO, path: Path, device: str) -> Any:
    """What ``torch.load`` makes of a file, safely."""
    file.seek(0)
    if file.read(len(ZIP)) == ZIP:
        _check_archive(file, path)
    else:
        file.seek(0)
        check_pickles(file.read(), path=str(path), count=_PICKLES)
    file.seek(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is deprecated in torch's own code
            return torch.load(file, map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CorruptedError(
            f"torch refuses to load this, as it may run code: {_why(error)}; nothing of it was run",
            path=str(path),
        ) from error
    except (
        AssertionError,
        AttributeError,
        EOFError,
        LookupError,
        MemoryError,
        OverflowError,
        RuntimeError,
        TypeError,
        ValueError,
        struct.error,
    ) as error:
        if "_quantized" in str(error):
            raise IncompatibleVersionError(f"a tensor {_NOT_DENSE}", path=str(path)) from error
        raise CorruptedError(
            f"torch cannot load this file; it is cut short, damaged or of another kind: "
            f"{_first_line(error)}",
            path=str(path),
        ) from error


def _check_archive(file: BinaryIO | io.BytesIO, path: Path) -> None:
    """``CorruptedError`` unless all in the archive stands in it as it is, uncompressed, and its
    pickle can be loaded at all."""
    try:
        _check_end(file, path)
        with zipfile.ZipFile(file) as archive:
            packed = [each for each in archive.infolist() if each.compress_type]
            if not packed:
                # torch finds names in any case.
                names = [(each, each.filename.lower()) for each in archive.infolist()]
                found = [each for each, name in names if name.endswith(_PICKLE)]
                if len(found) > 1:
                    raise CorruptedError(f"there is more than one {_PICKLE} in it", path=str(path))
                for each in found:
                    data = archive.read(each) if each.CRC else _unchecked(file, each)
                    check_pickles(data, path=str(path))
    except _NO_ARCHIVE as error:
        raise CorruptedError(
            f"this file is cut short or damaged: {_first_line(error)}", path=str(path)
        ) from error
    if packed:
        raise CorruptedError(
            f"{packed[0].filename!r} is compressed in this archive, which torch.save never does",
            path=str(path),
        )


def _check_end(file: BinaryIO | io.BytesIO, path: Path) -> None:
    """``CorruptedError`` unless the list of what is in the archive is where its end says, and right
    before that: others look for it in the one place, and torch in the other."""
    size = file.seek(0, io.SEEK_END)
    file.seek(max(0, size - _ENDS.size))
    end = _ENDS.unpack(file.read(_ENDS.size).rjust(_ENDS.size, b"\0"))
    mark_64, length, start, mark_at, at_64, mark, short_length, short_start, comment = end
    if mark_at == b"PK\6\7":
        is_whole = mark_64 == b"PK\6\6" and at_64 == start + length == size - _ENDS.size
    else:
        is_whole = short_start + short_length == size - _END_BYTES
    if mark != b"PK\5\6" or comment or not is_whole:
        raise CorruptedError(
            "this archive does not end as torch.save ends one: it is cut short or damaged",
            path=str(path),
        )


def _unchecked(file: BinaryIO | io.BytesIO, member: zipfile.ZipInfo) -> bytes:
    """An uncompressed member without a CRC, as ``set_crc32_options(False)`` has them saved, which
    ``zipfile`` takes for damaged. It follows its header, the name, and what is extra."""
    end = file.seek(0, io.SEEK_END)
    file.seek(member.header_offset)
    name, extra = _HEADER.unpack(file.read(_HEADER.size))
    start = file.seek(member.header_offset + _HEADER.size + name + extra)
    return file.read(max(0, min(member.file_size, end - start)))


def located(value: Any, path: Path, *, start: int, size: int, known: Any = None) -> Any:
    """A loaded tree with tensors that are read from the ``size`` bytes of an archive that begins
    at ``start`` of a file. Two that are the same bytes seen in the same way are one."""
    known = {} if known is None else known
    if isinstance(value, torch.Tensor):
        return _located(value, path, start, size, known)
    if is_container(value):
        return rebuilt(value, lambda each: located(each, path, start=start, size=size, known=known))
    return value


def _located(tensor: Any, path: Path, start: int, size: int, known: dict[Any, Tensor]) -> Tensor:
    dtype = _checked(tensor, path)
    storage = tensor.untyped_storage()
    itemsize, shape = tensor.element_size(), tuple(tensor.shape)
    offset = storage._checkpoint_offset  # noqa: SLF001 -- where torch tells it, and nowhere else
    first = tensor.storage_offset() * itemsize
    key = (offset, first, dtype, shape, tensor.stride())
    if key not in known:
        strides = tuple(step * itemsize for step in tensor.stride())
        part = FilePart(
            box=Box.whole(shape), path=path, offset=start + offset + first, strides=strides
        )
        check_within(part, itemsize, start + min(size, offset + storage.nbytes()), size)
        known[key] = tensor_in_files(f"of shape {shape}", dtype, shape, [part])
    return known[key]


def check_within(part: FilePart, itemsize: int, end: int, size: int) -> None:
    """``CorruptedError`` for a part that leaves its bytes, which end at ``end``, and for one that
    is the same few bytes of an archive of ``size`` over and over, beyond all measure."""
    shape, path = part.box.shape, str(part.path)
    if part.end(itemsize) > end or any(stride < 0 for stride in part.strides):
        raise CorruptedError(
            f"a tensor of shape {shape} reaches beyond the bytes that it is in", path=path
        )
    _check_measure(shape, part.box.size * itemsize, size, part.path)


def _check_measure(shape: tuple[int, ...], nbytes: int, size: int, path: Path) -> None:
    if nbytes > max(_ALLOWED_BYTES, _MOST_TIMES * size):
        raise CorruptedError(
            f"a tensor of shape {shape} is {nbytes} bytes, made of {size} or fewer over and over; "
            "this is damaged or meant to do harm",
            path=str(path),
        )


def lifted(value: Any, path: Path, *, size: int, known: dict[Any, Tensor]) -> Any:
    """A loaded tree with tensors that torch has in memory, of the ``size`` bytes of an archive."""
    if isinstance(value, torch.Tensor):
        key = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
        if not value.numel() or key not in known:
            known[key] = _in_memory(value, path, size)
        return known[key]
    if is_container(value):
        return rebuilt(value, lambda each: lifted(each, path, size=size, known=known))
    return value


def _in_memory(tensor: Any, path: Path, size: int) -> Tensor:
    dtype, itemsize = _checked(tensor, path), tensor.element_size()
    local = check_storable(tensor)
    whole = Box.whole(tuple(local.shape))
    _check_measure(whole.shape, whole.size * itemsize, size, path)

    def pieces() -> Iterator[memoryview]:
        if local.is_contiguous() and local.numel():
            yield memory_of(local)
        elif local.numel():
            for box in split_box(whole, PIECE_BYTES // itemsize):
                yield memory_of(local[tuple(map(slice, box.start, box.stop))].contiguous())

    return Tensor(dtype=dtype, shape=whole.shape, pieces=pieces)


def _checked(tensor: Any, path: Path) -> str:
    """The code of its dtype. ``IncompatibleVersionError`` for what is no plain dense tensor."""
    if (problem := _problem(tensor)) is None:
        try:
            return str(code_of(tensor.dtype).code)
        except Unstorable as refusal:
            problem = str(refusal)
    shape = tuple(tensor.shape)
    raise IncompatibleVersionError(f"a tensor of shape {shape} {problem}", path=str(path))


def _problem(tensor: Any) -> str | None:
    if type(tensor) not in _PLAIN:
        return f"is a {type(tensor).__name__}, which only its own library can read"
    if tensor.is_quantized or tensor.layout is not torch.strided or tensor.is_nested:
        return _NOT_DENSE
    if tensor.is_conj() or tensor.is_neg():
        return "is a conjugated or negated view; save its resolve_conj()"
    return None


def _why(error: Exception) -> str:
    """The one thing that torch says of a pickle which it refuses, without the advice to run it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if "Unsupported" in line or "was not an allowed global" in line]
    text = told[0] if told else next((li for li in lines if _UNSAFE not in li), _UNSAFE)
    return text.removeprefix("WeightsUnpickler error:").partition(". Please")[0].strip(" .")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
