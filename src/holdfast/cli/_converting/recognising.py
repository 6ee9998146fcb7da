"""Which format a source is of, by what is in it, and a target, by its name. Reads a few bytes."""

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.catalog._names import MODEL_INDEX, is_own_name
from holdfast.cli._exits import MisuseError, NothingThereError
from holdfast.cli._place import path_of, real
from holdfast.contracts import COMMIT_RECORD
from holdfast.errors import CorruptedError
from holdfast.storage._roots import ROOT_MARK


class Format(enum.StrEnum):
    """What ``--to`` takes."""

    TORCH = "torch"
    DCP = "dcp"
    SAFETENSORS = "safetensors"
    HUGGINGFACE = "huggingface"
    HOLDFAST = "holdfast"

    @property
    def words(self) -> str:
        return _WORDS[self]


_WORDS: Final = {
    Format.TORCH: "a torch.save file",
    Format.DCP: "a DCP folder",
    Format.SAFETENSORS: "a safetensors file",
    Format.HUGGINGFACE: "a Hugging Face folder",
    Format.HOLDFAST: "a holdfast checkpoint",
}

DCP_METADATA: Final = ".metadata"

_ENDINGS: Final = {
    ".pt": Format.TORCH,
    ".pth": Format.TORCH,
    ".bin": Format.TORCH,
    ".ckpt": Format.TORCH,
    ".safetensors": Format.SAFETENSORS,
}
ZIP: Final = b"PK\x03\x04"
_LEGACY_TORCH: Final = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_LENGTH_BYTES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A source or a target as it was typed. ``path`` is ``None`` if it is not on a disk."""

    text: str
    path: Path | None
    format: Format

    @property
    def file(self) -> Path:
        """Where it is on a disk, as all are that are no checkpoint of holdfast's."""
        if self.path is None:
            raise MisuseError(f"{self.text} is on no disk")
        return self.path


def source_at(text: str) -> Place:
    """``NothingThereError`` if nothing is there, ``CorruptedError`` for a file of no format that is
    known."""
    path = path_of(text)
    if path is None:
        return Place(text=text, path=None, format=Format.HOLDFAST)
    if path.is_dir():
        return Place(text=text, path=path, format=_of_folder(path))
    if not path.exists():
        raise NothingThereError("there is no such file or folder", path=text)
    return Place(text=text, path=path, format=_of_file(path, text))


def target_at(text: str, to: Format | None) -> Place:
    """A name that no format is known by is that of a checkpoint of holdfast's."""
    path = path_of(text)
    named = Format.HOLDFAST if path is None else _ENDINGS.get(path.suffix.lower())
    if path is None and to not in {None, Format.HOLDFAST}:
        raise MisuseError(f"--to {to} writes to a disk, not to {text}")
    if not text.strip("/"):
        raise MisuseError(f"{text!r} names no target")
    return Place(text=text, path=path, format=to or named or Format.HOLDFAST)


def same_place(source: Path, target: Path) -> bool:
    """Whether two paths are one file or folder, or one of them lies in the other."""
    first, second = real(source), real(target)
    if first == second or first in second.parents or second in first.parents:
        return True
    return second.exists() and first.samefile(second)


def model_files(folder: Path) -> tuple[Path | None, list[Path]]:
    """The index of a Hugging Face folder, if it has one, and its safetensors files."""
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    preferred = folder / MODEL_INDEX
    index = preferred if preferred in indexes else indexes[0] if len(indexes) == 1 else None
    return index, sorted(folder.glob("*.safetensors"))


def _of_folder(folder: Path) -> Format:
    if (folder / COMMIT_RECORD).exists() and any(is_own_name(each.name) for each in _files(folder)):
        return Format.HOLDFAST
    if (folder / ROOT_MARK).exists():
        return Format.HOLDFAST  # a store, whatever files lie in it beside
    if (folder / DCP_METADATA).is_file():
        return Format.DCP
    index, files = model_files(folder)
    if index is not None or len(files) == 1 or folder / "model.safetensors" in files:
        return Format.HUGGINGFACE
    return Format.HOLDFAST  # a store, whose newest is meant, or nothing, which finding it says


def _of_file(path: Path, text: str) -> Format:
    beside = (path.parent / COMMIT_RECORD).exists()
    if beside and (path.name == COMMIT_RECORD or is_own_name(path.name)):
        return Format.HOLDFAST
    if not path.is_file():  # a pipe, of which a read would wait for ever
        raise MisuseError("this is neither a file nor a folder", path=text)
    with path.open("rb") as file:
        first = file.read(max(_LENGTH_BYTES + 1, len(_LEGACY_TORCH)))
    if first.startswith((ZIP, _LEGACY_TORCH)):
        return Format.TORCH
    if first[_LENGTH_BYTES : _LENGTH_BYTES + 1] == b"{":
        return Format.SAFETENSORS
    if path.name == DCP_METADATA or path.suffix == ".distcp":
        raise MisuseError("this is a file of a DCP folder; give the folder", path=text)
    known = _ENDINGS.get(path.suffix.lower())
    if known is not None:
        raise CorruptedError(
            f"this file is cut short, or is not {known.words}: it does not begin like one",
            path=text,
        )
    raise CorruptedError(
        "this file is of no format that is known: it begins neither like a torch.save file nor "
        "like a safetensors file",
        path=text,
    )


def _files(folder: Path) -> list[Path]:
    return [each for each in folder.iterdir() if each.is_file()]
