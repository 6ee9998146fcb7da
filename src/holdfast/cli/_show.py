"""``holdfast show``: what a checkpoint says of itself. Reads its commit record and no tensors."""

import datetime as dt
import fnmatch
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from holdfast.catalog import OpenCheckpoint, TensorInfo
from holdfast.catalog._opened import decoded
from holdfast.cli._arguments import AsJson, CheckpointArgument
from holdfast.cli._ls import described
from holdfast.cli._place import open_checkpoint
from holdfast.cli._text import age, clean, counted, number, put, put_json, put_table, shape, size
from holdfast.cli._tree import tensor_lines
from holdfast.cli._values import flat_values, plain, shown
from holdfast.errors import TensorNotFoundError

_VALUES = 20


def run(
    checkpoint: CheckpointArgument = ".",
    *,
    tensors: Annotated[
        str | None,
        typer.Option(
            "--tensors", metavar="PATTERN", help="Only list tensors, as 'model.*.weight'."
        ),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Fold no groups of the tree.")] = False,
    as_json: AsJson = False,
) -> int:
    """Large groups of tensors are folded to one line each, unless --full is given."""
    opened = open_checkpoint(checkpoint)
    found = _matching(opened, tensors)
    if as_json:
        put_json(_document(opened, found))
    elif tensors is not None:
        rows = [(each.name, each.dtype, shape(each.shape), size(each.nbytes)) for each in found]
        put_table(("tensor", "dtype", "shape", "size"), rows, right=("size",))
    else:
        _put_facts(opened)
        _put_values(opened)
        put(f"\ntensors: {len(found)}, {size(sum(each.nbytes for each in found))}")
        for line in tensor_lines(found, full=full):
            put(line)
    return 0


def _matching(opened: OpenCheckpoint, pattern: str | None) -> list[TensorInfo]:
    tensors = opened.tensors
    if pattern is None:
        return [*tensors.values()]
    if pattern in tensors:
        return [tensors[pattern]]
    found = [each for name, each in tensors.items() if fnmatch.fnmatchcase(name, pattern)]
    if not found:
        raise TensorNotFoundError(f"no tensor fits {pattern!r}", path=opened.found.prefix)
    return found


def _put_facts(opened: OpenCheckpoint) -> None:
    record, info = opened.found.record, opened.info
    passed = (dt.datetime.now(dt.UTC) - info.timestamp).total_seconds()
    ranks = counted(info.world_size, "rank")
    facts = {
        "checkpoint": info.prefix,
        "store": opened.storage.url,
        "step": "-" if info.step is None else str(info.step),
        "saved": f"{record.created} ({age(passed)} ago)",
        "written by": f"{record.writer}, {ranks}, attempt {record.attempt}",
        "format": f"{info.format}, version {info.version}",
        "files": f"{len(record.files)}, {size(info.size_bytes)}",
    }
    facts |= {f"metric {name}": number(value) for name, value in info.metrics.items()}
    for prefix, (count, nbytes) in _references(opened).items():
        facts[f"refers to {prefix}"] = f"{counted(count, 'file')}, {size(nbytes)}"
    width = max(map(len, facts))
    for name, value in facts.items():
        put(f"{clean(name).ljust(width)}  {clean(value)}")


def _put_values(opened: OpenCheckpoint) -> None:
    found = opened.found
    custom = decoded(found, found.record.custom, root="custom")
    state = decoded(found, found.record.tree)
    for title, value in (("custom", custom), ("values", state)):
        flat = flat_values(value)
        if value is None or not flat:
            continue
        put(f"\n{title}:")
        for name, each in [*flat.items()][:_VALUES]:
            put(f"  {clean(name) or '(all)'}: {clean(shown(each))}")
        if len(flat) > _VALUES:
            put(f"  ... and {len(flat) - _VALUES} more (--json has all)")


def _references(opened: OpenCheckpoint) -> Mapping[str, tuple[int, int]]:
    """The other checkpoints whose files this one needs: how many files, and their bytes."""
    found: dict[str, tuple[int, int]] = {}
    for file in opened.found.record.files:
        if file.prefix is not None:
            count, nbytes = found.get(file.prefix, (0, 0))
            found[file.prefix] = count + 1, nbytes + file.size_bytes
    return found


def _document(opened: OpenCheckpoint, tensors: list[TensorInfo]) -> dict[str, Any]:
    found = opened.found
    return {
        "store": opened.storage.url,
        "checkpoint": {
            **described(opened.info),
            "attempt": found.record.attempt,
            "writer": found.record.writer,
            "custom": _plain(decoded(found, found.record.custom, root="custom")),
            "values": _plain(decoded(found, found.record.tree)),
        },
        "files": [
            {"name": file.name, "size_bytes": file.size_bytes, "of": file.prefix or found.prefix}
            for file in found.record.files
        ],
        "tensors": [
            {"name": t.name, "dtype": t.dtype, "shape": t.shape, "nbytes": t.nbytes}
            for t in tensors
        ],
    }


def _plain(value: object) -> dict[str, Any]:
    """Values by their place."""
    return {name: plain(each) for name, each in flat_values(value).items()}
