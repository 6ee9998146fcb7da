"""``holdfast convert``: a state from one format to another. Knows which module reads and which
writes; those that need torch are loaded only then."""

import importlib
import re
from collections.abc import Sequence
from typing import Annotated, Any, Final

import typer

from holdfast.catalog import OpenCheckpoint
from holdfast.cli._converting import safetensors_read, safetensors_write
from holdfast.cli._converting.choosing import only_tensors, prefixed, selected, stripped
from holdfast.cli._converting.contents import Contents, Tensor, leaves, tensors_in
from holdfast.cli._converting.holdfast_read import read_checkpoint
from holdfast.cli._converting.holdfast_write import write_checkpoint
from holdfast.cli._converting.options import Compression, Overwrite
from holdfast.cli._converting.publishing import check_free
from holdfast.cli._converting.recognising import Format, Place, same_place, source_at, target_at
from holdfast.cli._converting.saving import NewCheckpoint
from holdfast.cli._exits import Exit, MisuseError, NothingThereError
from holdfast.cli._place import open_checkpoint, path_of
from holdfast.cli._progress import Tick, bar
from holdfast.cli._text import clean, counted, put, size
from holdfast.errors import TensorNotFoundError
from holdfast.format import CompressionLevel

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?)(i?)B?", re.IGNORECASE)
_FOLDER_FILES: Final = {
    Format.DCP: (".distcp", ".metadata"),
    Format.HUGGINGFACE: (".safetensors", ".safetensors.index.json"),
}
_SHARING: Final = frozenset({Format.HOLDFAST, Format.TORCH})
"""Formats in which a tensor that has two names is stored once."""


def run(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A torch.save file, DCP folder, safetensors file, Hugging Face folder or holdfast "
            "checkpoint; found out by what is in it.",
        ),
    ],
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A new one. Its format is that of its ending (.pt, .pth, .bin, .ckpt, "
            ".safetensors), else a holdfast checkpoint, unless --to is given.",
        ),
    ],
    *,
    to: Annotated[
        Format | None, typer.Option("--to", help="The format of the target.", show_default=False)
    ] = None,
    select: Annotated[
        list[str] | None,
        typer.Option(
            "--select",
            metavar="PATTERN",
            help="Only what is called so, as 'model.*'. May be given several times.",
        ),
    ] = None,
    strip_prefix: Annotated[
        str, typer.Option("--strip-prefix", metavar="TEXT", help="Take this off every name.")
    ] = "",
    prefix: Annotated[
        str, typer.Option("--prefix", metavar="TEXT", help="Put this before every name.")
    ] = "",
    tensors_only: Annotated[
        bool, typer.Option("--tensors-only", help="Leave plain values out, as an epoch.")
    ] = False,
    file_size: Annotated[
        str,
        typer.Option("--file-size", metavar="SIZE", help="Of the files of a Hugging Face folder."),
    ] = "5GB",
    compression: Compression = CompressionLevel.NONE,
    overwrite: Overwrite = False,
) -> int:
    """Nothing in a source is run, whoever wrote it, and only some MiB of it are in memory at once.
    The target is there when it is whole, and not before. What its format cannot hold is refused
    with a list.

    A tensor is called after its place in the state: that in state["model"]["0.weight"] is
    model.0.weight.
    """
    read, write = source_at(source), target_at(target, to)
    file_bytes = _bytes(file_size)
    _check_apart(read, write)
    _check_torch(read, write)
    new = NewCheckpoint.at(target) if write.format is Format.HOLDFAST else None
    if new is None:
        _check_target(write, overwrite=overwrite)
    contents = _read(read, write, new, tensors_only=tensors_only)
    tree = _chosen(contents.tree, select or [], strip_prefix, prefix, tensors_only=tensors_only)
    named = tensors_in(tree)
    stored = [tensor for _, tensor in named]
    if write.format in _SHARING:
        stored = [*{id(tensor): tensor for tensor in stored}.values()]
    total = sum(tensor.nbytes for tensor in stored)
    with bar(clean(write.text), total) as tick:
        if new is not None:
            changed = Contents(tree=tree, facts=contents.facts)
            write_checkpoint(changed, new, overwrite=overwrite, level=compression, tick=tick)
        else:
            _write(write, tree, overwrite=overwrite, file_bytes=file_bytes, tick=tick)
    values = sum(not isinstance(value, Tensor) for _, value in leaves(tree))
    told = f", {counted(values, 'value')}" if values else ""
    where = write.text if new is None else new.url
    tensors = counted(len(named), "tensor")
    put(f"{clean(where)}: {write.format.words}, {tensors}, {size(total)}{told}")
    return Exit.OK


def _read(read: Place, write: Place, new: NewCheckpoint | None, *, tensors_only: bool) -> Contents:
    if read.format is Format.HOLDFAST:
        return read_checkpoint(_opened(read, write, new))
    if read.format is Format.SAFETENSORS:
        return safetensors_read.read_file(read.file)
    if read.format is Format.HUGGINGFACE:
        return safetensors_read.read_folder(read.file)
    if read.format is Format.TORCH:
        of_torch: Contents = _with_torch("torch_read").read_file(read.file)
        return of_torch
    of_dcp: Contents = _with_torch("dcp_read").read_folder(read.file, tensors_only=tensors_only)
    return of_dcp


def _opened(read: Place, write: Place, new: NewCheckpoint | None) -> OpenCheckpoint:
    try:
        opened = open_checkpoint(read.text)
    except NothingThereError as error:
        if read.path is None or not read.path.is_dir():
            raise
        raise NothingThereError(
            "this folder is of no format that is known: no holdfast checkpoint or store of them, "
            "DCP folder or Hugging Face folder",
            path=read.text,
        ) from error
    url = f"{opened.storage.url}/{opened.found.prefix}"
    if new is not None and new.url == url:
        raise MisuseError(f"{url} is the checkpoint that is read; give another name")
    where = path_of(url)
    if new is None and where is not None and same_place(where, write.file):
        raise MisuseError(f"{write.text} is {read.text}, or lies in it; give another target")
    return opened


def _chosen(
    tree: Any, select: Sequence[str], strip_prefix: str, prefix: str, *, tensors_only: bool
) -> Any:
    if select:
        tree = selected(tree, select)
    if tensors_only:
        tree = only_tensors(tree)
    if not tensors_in(tree) and (select or tensors_only):
        raise TensorNotFoundError("there are no tensors in what is to be converted")
    if strip_prefix:
        tree = stripped(tree, strip_prefix)
    return prefixed(tree, prefix) if prefix else tree


def _write(write: Place, tree: Any, *, overwrite: bool, file_bytes: int, tick: Tick) -> None:
    if write.format is Format.SAFETENSORS:
        safetensors_write.write_file(tree, write.file, overwrite=overwrite, tick=tick)
    elif write.format is Format.HUGGINGFACE:
        safetensors_write.write_folder(
            tree, write.file, overwrite=overwrite, file_bytes=file_bytes, tick=tick
        )
    elif write.format is Format.TORCH:
        _with_torch("torch_write").write_file(tree, write.file, overwrite=overwrite, tick=tick)
    else:
        _with_torch("dcp_write").write_folder(tree, write.file, overwrite=overwrite, tick=tick)


def _with_torch(module: str) -> Any:
    return importlib.import_module(f"holdfast.cli._converting.with_torch.{module}")


def _check_torch(read: Place, write: Place) -> None:
    """Say at once if torch is needed and not there."""
    for place in (read, write):
        if place.format in {Format.TORCH, Format.DCP}:
            try:
                importlib.import_module("torch")
            except ImportError as error:
                raise MisuseError(
                    f"{place.text} is {place.format.words}, which needs torch: pip install "
                    '"holdfast[torch]"'
                ) from error


def _check_apart(read: Place, write: Place) -> None:
    if read.path is None or write.path is None or read.format is Format.HOLDFAST:
        return  # a store stands for its newest, which has to be found first
    if same_place(read.path, write.path):
        raise MisuseError(f"{write.text} is {read.text}, or lies in it; give another target")


def _check_target(write: Place, *, overwrite: bool) -> None:
    """Refuse a target that is taken before the source is read, which may take a while."""
    known = _FOLDER_FILES.get(write.format)
    check_free(write.file, overwrite=overwrite, folder=known is not None, known=known or ())


def _bytes(text: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    if found is None or float(found[1]) == 0:
        raise MisuseError(f"--file-size must be a size, as 5GB or 500MiB, not {text!r}")
    base = 1024 if found[3] else 1000
    return int(float(found[1]) * base ** " KMGT".index(found[2].upper() or " "))
