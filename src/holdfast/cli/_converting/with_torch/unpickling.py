"""The pickle ``.metadata`` of a DCP folder, read without running anything that it names.

``FileSystemReader`` reads it with plain ``pickle``, which calls whatever a file names. Here exactly
the classes that such metadata is made of are known, none of which does anything when it is made;
any other name ends it.
"""

import collections
import io
import pathlib
import pickle
import struct
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint import filesystem, metadata

from holdfast.cli._converting.with_torch.pickles import check_pickles
from holdfast.errors import CorruptedError

_METADATA: Final = "torch.distributed.checkpoint.metadata"
_SHARDED: Final = "torch.distributed._shard.sharded_tensor.metadata"
_KNOWN: Final[dict[tuple[str, str], Any]] = {
    **{(_METADATA, name): getattr(metadata, name) for name in metadata.__all__},
    (_METADATA, "_MEM_FORMAT_ENCODING"): metadata._MEM_FORMAT_ENCODING,  # noqa: SLF001
    # What DCP of before torch 2.3 wrote.
    (_SHARDED, "TensorProperties"): metadata.TensorProperties,
    (_SHARDED, "MEM_FORMAT_ENCODING"): metadata._MEM_FORMAT_ENCODING,  # noqa: SLF001
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,  # noqa: SLF001
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,  # noqa: SLF001
    ("collections", "OrderedDict"): collections.OrderedDict,
    # The folder that it was written to, which need not be a path here.
    ("pathlib", "PosixPath"): pathlib.PurePosixPath,
    ("pathlib._local", "PosixPath"): pathlib.PurePosixPath,
    ("pathlib", "WindowsPath"): pathlib.PureWindowsPath,
    ("pathlib._local", "WindowsPath"): pathlib.PureWindowsPath,
}


class _Refused(pickle.UnpicklingError):
    """A name that no metadata has."""


class _Unpickler(pickle._Unpickler):  # noqa: SLF001 -- see below
    """The one that is written in Python: in the other a single number in a file can take all
    memory there is (the place of what is remembered)."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if module == "torch" and type(found := getattr(torch, name, None)) is torch.dtype:
            return found
        raise _Refused(f"{module}.{name}")


def read_metadata(path: Path) -> Any:
    """The ``Metadata`` of a folder. ``CorruptedError`` if it is damaged or names anything else."""
    data = path.read_bytes()
    check_pickles(data, path=str(path))
    try:
        found = _Unpickler(io.BytesIO(data)).load()
    except _Refused as refusal:
        raise CorruptedError(
            f"this is not what DCP writes: it names {refusal}, which may run code; nothing of it "
            "was run",
            path=str(path),
        ) from None
    except (
        ArithmeticError,
        AttributeError,
        EOFError,
        ImportError,
        LookupError,
        MemoryError,
        RecursionError,
        RuntimeError,
        TypeError,
        ValueError,
        pickle.UnpicklingError,
        struct.error,
    ) as error:
        raise CorruptedError(
            f"this file is cut short or damaged, or no metadata of DCP: {error}", path=str(path)
        ) from error
    if type(found) is not metadata.Metadata:
        raise CorruptedError(f"this holds a {type(found).__name__}, no metadata", path=str(path))
    return found
